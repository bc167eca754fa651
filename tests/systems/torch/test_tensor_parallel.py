"""Tensor and sequence parallelism as systems: real processes over gloo, with `observe`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entrenar_py import systems
from entrenar_py.check.evidence.needs import ORACLE
from entrenar_py.check.harness import companions
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Verdict
from entrenar_py.systems.torch import tensor_parallel
from tests import traces


def scenario(**changes: Any) -> Scenario:
    """Return a run of two groups of two ranks, with one batch of seven lines of unequal length."""
    usual: dict[str, Any] = {
        "system": "tensor_parallel",
        "workload": "decoder_full",
        "world_size": 4,
        "seed": 0,
        "num_samples": 7,
        "batch_size": 7,
        "num_steps": 1,
        "num_shards": 4,
        "detail": "values",
    }
    return Scenario(**{**usual, **changes})


@pytest.mark.parametrize(
    ("system", "world_size"), [("tensor_parallel", 4), ("sequence_parallel", 2)]
)
def test_it_trains_as_a_single_device_does(system: str, world_size: int) -> None:
    """Losses, gradients and weights on every rank are those of a single device."""
    subject = scenario(system=system, world_size=world_size, clip_norm=0.5)
    ((oracle,),) = companions.of((ORACLE,), subject).beside.values()
    runs = [traces.run(subject), traces.run(oracle)]
    finding = traces.judge("parity", runs)
    assert finding.verdict is Verdict.HELD, finding
    gradients = [set(update.gradient) for update in runs[0].of(trace.Update)]
    assert len(gradients) == world_size
    assert all(names == set(runs[1].of(trace.Update)[0].gradient) for names in gradients)


def test_each_rank_holds_half() -> None:
    """Each rank has half of the cut tensors, and the whole of the few small ones."""
    held = traces.run(scenario(clip_norm=0.5)).of(trace.Held)
    assert [(one.rank, one.num_parts) for one in held] == [(rank, 2) for rank in range(4)]
    assert all(0.5 < one.held_bytes / one.whole_bytes < 0.52 for one in held)


def test_a_fault_is_named_where_it_struck() -> None:
    """An element is named by its index in the whole tensor, whichever rank has its piece."""
    fault = Fault(
        kind="non_finite_gradient", step=0, rank=1, tensor="output.bias", element=9, value="nan"
    )
    run = systems.run(scenario(workload="mlp", world_size=2, faults=(fault,)))
    assert run.end.status == "halted", run.end
    assert {(h.rank, h.tensor) for h in run.of(trace.Halt)} == {(1, "output.bias")}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tp": 4}, "2 key-value heads; use a number that divides them"), ({"tp": "2"}, "tp='2'")],
)
def test_what_can_not_be_cut_is_refused(options: dict[str, Any], message: str) -> None:
    """Impossible options are refused before a process is started."""
    with pytest.raises(UsageError, match=message):
        tensor_parallel.run(scenario(options=options))


def test_a_world_that_the_groups_do_not_divide_has_smaller_ones() -> None:
    """Groups become smaller; a rank alone in its group has the whole model."""
    sizes = [tensor_parallel.degree(scenario(), world) for world in (1, 2, 3, 4, 6)]
    assert sizes == [1, 2, 1, 2, 2]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("system", ["tensor_parallel", "sequence_parallel", "pipeline_parallel"])
def test_nccl_trains_as_gloo_does(system: str) -> None:
    """On two GPUs the losses are equal within float32 rounding."""
    subject = scenario(system=system, world_size=2)
    on_cpu, on_gpu = (
        systems.run(subject.with_(backends=(name,), num_steps=3)) for name in ("cpu", "cuda")
    )
    assert on_gpu.end.status == "completed", on_gpu.end
    losses = [[s.loss_sum for s in run.of(trace.Shard)] for run in (on_cpu, on_gpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
