"""DiLoCo as a system: real processes over gloo, with `observe`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entrenar_py import systems
from entrenar_py.check.clauses import local_sgd
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault

NAN = Fault(kind="non_finite_gradient", rank=1, step=2, value="nan")


def _run(**changes: Any) -> trace.Trace:
    """Run three workers with rounds of two steps, and a last one of one step."""
    return systems.run(local_sgd.plan_scenario(**changes))


def _digests(events: list[Any], step: int) -> set[str]:
    return {one.weights["hidden1.weight"].digest for one in events if one.step == step}


def test_workers_differ_and_are_brought_together() -> None:
    """A round has one all-reduce, at its end, after which all workers are equal."""
    run = _run()
    assert run.end == trace.End(status="completed")
    together = run.of(trace.Synchronised)
    places = [(one.step, one.rank) for one in together]
    assert places == [(step, rank) for step in (1, 3, 4) for rank in range(3)]
    assert {(one.collectives, one.collectives_alone) for one in together} == {(1, 0)}
    for step in (1, 3, 4):
        assert len(_digests(run.of(trace.Update), step)) == 3
        assert len(_digests(together, step)) == 1


def test_who_dies_loses_its_round() -> None:
    """The others end their round without it, and it joins in the middle of a later one."""
    moves = (Fault(kind="leave", rank=1, step=1), Fault(kind="join", rank=1, step=3))
    run = _run(faults=moves)
    assert run.end.status == "completed", run.end
    together = {step: [] for step in (1, 3, 4)}  # type: dict[int, list[int]]
    for one in run.of(trace.Synchronised):
        together[one.step].append(one.rank)
    assert together == {1: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2]}
    joined = next(one for one in run.of(trace.Start) if (one.rank, one.step) == (1, 3))
    assert {joined.weights["hidden1.weight"].digest} == _digests(run.of(trace.Synchronised), 1)


@pytest.mark.parametrize("stops", [(), (3,)])
def test_everyone_halts_before_the_outer_step(stops: tuple[int, ...]) -> None:
    """All halt before the outer step, even if the run was to stop within that round."""
    run = _run(faults=(NAN,), stops=stops)
    assert run.end.status == "halted"
    assert {(one.rank, one.step, one.shard) for one in run.of(trace.Halt)} == {(1, 2, 1)}
    assert len(run.of(trace.Halt)) == 3
    assert max(one.step for one in run.of(trace.Synchronised)) == 1
    assert not [one for one in run.of(trace.Update) if one.rank == 1 and one.step == 2]


def test_options_out_of_range_are_told() -> None:
    """The run fails, and the reason names the option."""
    run = _run(options={"outer_momentum": 1.5})
    assert run.end.status == "failed"
    assert "outer_momentum=1.5" in run.end.reason


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_trains_as_gloo_does() -> None:
    """On two GPUs the losses are equal within float32 rounding, with one collective a round."""
    on_cpu, on_gpu = (
        _run(world_size=2, optimizer="sgd", learning_rate=0.05, backends=(name,))
        for name in ("cpu", "cuda")
    )
    assert on_gpu.end.status == "completed", on_gpu.end
    losses = [[s.loss_sum for s in run.of(trace.Shard)] for run in (on_cpu, on_gpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    together = on_gpu.of(trace.Synchronised)
    assert {(one.collectives, one.collectives_alone) for one in together} == {(1, 0)}
