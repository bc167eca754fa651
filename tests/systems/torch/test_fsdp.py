"""torch's fully_shard as a system: real processes over gloo, with `observe`."""

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
        "system": "fsdp",
        "workload": "mlp",
        "world_size": 3,
        "seed": 0,
        "num_samples": 21,
        "batch_size": 8,
        "num_steps": 4,
        "width": 8,
    }
    return systems.run(Scenario(**{**usual, **changes}))


def _losses(run: trace.Trace) -> list[float]:
    return [one.loss_sum or 0.0 for one in run.of(trace.Shard)]


def test_all_ranks_train() -> None:
    """Every rank makes every step, has the same whole weights, and draws its own samples."""
    run = _run(accumulation=2, detail="values")
    assert run.end == trace.End(status="completed")
    updates = run.of(trace.Update)
    assert [(one.step, one.rank) for one in updates] == [(s, r) for s in range(4) for r in range(3)]
    bias = updates[0].weights["output.bias"].values()
    assert bias is not None
    assert len(bias) == 10  # the ranks hold 4, 4 and 2 of them
    assert len({str(one.weights) for one in updates if one.step == 3}) == 1
    drawn = [i for shard in run.of(trace.Shard) if shard.epoch == 0 for i in shard.ids]
    assert sorted(drawn) == list(range(21))
    single = _run(system="textbook", world_size=1)
    assert sum(_losses(run)) == pytest.approx(sum(_losses(single)), rel=1e-5)


def test_micro_batches_without_samples_are_no_second_look_at_others() -> None:
    """A micro-batch without samples is empty, as gradients not yet reduced are in no `.grad`."""
    run = _run(world_size=1, num_samples=2, batch_size=2, num_steps=1, accumulation=4)
    assert [shard.ids for shard in run.of(trace.Shard)] == [(0,), (1,), (), ()]


def test_everyone_stops_at_the_same_place() -> None:
    """A NaN is named by its rank and micro-batch, before the reduction spreads it."""
    fault = Fault(kind="non_finite_gradient", step=1, shard=7, value="nan", tensor="output.bias")
    run = _run(faults=(fault,), accumulation=2)
    assert run.end.status == "halted"
    halts = [(halt.step, halt.rank, halt.shard, halt.tensor) for halt in run.of(trace.Halt)]
    assert halts == [(1, 2, 5, "output.bias")] * 3
    assert [(one.rank, one.shard) for one in run.of(trace.Shard) if not one.finite] == [(2, 5)]
    assert max(update.step for update in run.of(trace.Update)) == 0


def test_another_number_of_ranks_goes_on() -> None:
    """A worker dies before there is optimizer state, and comes back when there is."""
    leave = Fault(kind="leave", rank=1, step=0)
    run = _run(faults=(leave, Fault(kind="join", rank=1, step=2)), optimizer="adamw")
    assert run.end.status == "completed", run.end
    made = {step: {u.rank for u in run.of(trace.Update) if u.step == step} for step in range(4)}
    assert made == {0: {0, 2}, 1: {0, 2}, 2: {0, 1, 2}, 3: {0, 1, 2}}
    assert sum(_losses(run)[-6:]) == pytest.approx(
        sum(_losses(_run(optimizer="adamw"))[-6:]), rel=1e-4
    )


def test_bfloat16_is_computed_in_and_not_kept() -> None:
    """Losses differ from float32's within bfloat16's precision, and weights are float32."""
    full, mixed = (_run(options={"precision": name}) for name in ("float32", "bf16"))
    assert _losses(mixed) == pytest.approx(_losses(full), rel=0.02)
    assert _losses(mixed) != _losses(full)
    assert {one.dtype for one in mixed.of(trace.Update)[-1].weights.values()} == {"float32"}


def test_an_unknown_precision_is_refused() -> None:
    """The run fails with the allowed values."""
    reason = _run(options={"precision": "fp4"}).end.reason
    assert "option precision='fp4': allowed are float32, bf16" in reason


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_trains_as_gloo_does() -> None:
    """On two GPUs the losses are equal within float32 rounding."""
    on_cpu, on_gpu = (_run(world_size=2, backends=(name,)) for name in ("cpu", "cuda"))
    assert on_gpu.end.status == "completed", on_gpu.end
    assert _losses(on_gpu) == pytest.approx(_losses(on_cpu), rel=1e-4)
