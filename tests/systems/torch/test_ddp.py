"""torch's DistributedDataParallel as a system: real processes over gloo, with `observe`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entrenar_py import systems
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario


def _run(**changes: Any) -> trace.Trace:
    usual: dict[str, Any] = {
        "system": "ddp",
        "workload": "mlp",
        "world_size": 3,
        "seed": 0,
        "num_samples": 21,
        "batch_size": 8,
        "num_steps": 4,
    }
    return systems.run(Scenario(**{**usual, **changes}))


def test_all_ranks_train() -> None:
    """Every rank makes every step, and each sample of the batch is used once."""
    run = _run(accumulation=2)
    assert run.end == trace.End(status="completed")
    updates = [(one.step, one.rank) for one in run.of(trace.Update)]
    assert updates == [(step, rank) for step in range(4) for rank in range(3)]
    drawn = [i for shard in run.of(trace.Shard) if shard.epoch == 0 for i in shard.ids]
    assert sorted(drawn) == list(range(21))
    assert {shard.shard for shard in run.of(trace.Shard)} == set(range(6))


def test_everyone_stops_at_the_same_place() -> None:
    """Every rank names the micro-batch with the NaN that was planted in a logical shard."""
    fault = Fault(kind="non_finite_gradient", step=1, shard=7, value="nan", tensor="output.bias")
    run = _run(faults=(fault,), accumulation=2)
    assert run.end.status == "halted"
    assert {(halt.step, halt.rank, halt.shard, halt.tensor) for halt in run.of(trace.Halt)} == {
        (1, 2, 5, "output.bias")
    }
    assert len(run.of(trace.Halt)) == 3
    assert max(update.step for update in run.of(trace.Update)) == 0


def test_who_dies_is_gone_and_comes_back() -> None:
    """After a worker dies the others resume from the checkpoint; it joins under its own number."""
    leave = Fault(kind="leave", rank=1, step=0)
    run = _run(faults=(leave, Fault(kind="join", rank=1, step=2)))
    assert run.end.status == "completed", run.end
    made = {step: {u.rank for u in run.of(trace.Update) if u.step == step} for step in range(4)}
    assert made == {0: {0, 2}, 1: {0, 2}, 2: {0, 1, 2}, 3: {0, 1, 2}}
    assert [(one.rank, one.change) for one in run.of(trace.Membership)] == [
        (1, "left"),
        (1, "joined"),
    ]


def test_what_a_rank_fails_by_is_told() -> None:
    """A run on more GPUs than there are fails with that reason, and does not hang."""
    run = _run(backends=("cuda",), world_size=9, num_shards=9)
    assert run.end.status == "failed"
    assert "9 ranks need a GPU each" in run.end.reason


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_trains_as_gloo_does() -> None:
    """On two GPUs the losses are equal within float32 rounding."""
    on_cpu, on_gpu = (_run(world_size=2, backends=(name,)) for name in ("cpu", "cuda"))
    assert on_gpu.end.status == "completed", on_gpu.end
    losses = [[s.loss_sum for s in run.of(trace.Shard)] for run in (on_cpu, on_gpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
