"""The reference trainer: its record, halts, leaving and joining workers, stops and resumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import require_possible
from entrenar_py.shared.trace import (
    Halt,
    Injected,
    Membership,
    Saved,
    Shard,
    Start,
    Trace,
    Update,
)

USUAL = Scenario(
    system="reference",
    workload="mlp",
    world_size=3,
    seed=0,
    num_shards=5,
    num_samples=21,
    batch_size=8,
    num_steps=6,
    width=8,
)


def _run(*faults: Fault, **changes: Any) -> Trace:
    return systems.run(USUAL.with_(faults=faults, **changes))


def _leave(rank: int, step: int) -> Fault:
    return Fault(kind="leave", rank=rank, step=step)


def _join(rank: int, step: int) -> Fault:
    return Fault(kind="join", rank=rank, step=step)


def _nan(**place: Any) -> Fault:
    return Fault(kind="non_finite_gradient", step=2, value="nan", **place)


def _held(trace: Trace) -> list[tuple[Any, ...]]:
    return [(u.step, u.rank, u.weights, u.optimizer, u.buffers, u.loss) for u in trace.of(Update)]


def _present(trace: Trace, step: int) -> list[int]:
    return [u.rank for u in trace.of(Update) if u.step == step]


def test_a_run_keeps_its_promises() -> None:
    """A run completes with equal bits, updates every worker in every step, and uses all samples."""
    trace = _run()
    assert (trace.end.status, trace.promises) == ("completed", ("bitwise",))
    assert [(u.step, u.rank) for u in trace.of(Update)] == [
        (s, r) for s in range(6) for r in range(3)
    ]
    assert [(s.step, s.rank, s.resumed) for s in trace.of(Start)] == [
        (0, r, False) for r in range(3)
    ]
    for epoch in (0, 1):
        ids = [i for shard in trace.of(Shard) if shard.epoch == epoch for i in shard.ids]
        assert sorted(ids) == list(range(21))
    assert trace.environment["torch"]


def test_two_runs_are_the_same() -> None:
    """Two runs of one scenario have equal events."""
    assert _run(dropout=0.2).events == _run(dropout=0.2).events


def test_digests_are_those_of_the_values() -> None:
    """Recording values adds every tensor's elements, and changes no digest."""
    plain, full = _run(), _run(detail="values")
    for one, other in zip(plain.of(Update), full.of(Update), strict=True):
        assert {n: t.digest for n, t in one.weights.items()} == {
            n: t.digest for n, t in other.weights.items()
        }
        for record in (*other.weights.values(), *other.gradient.values()):
            values = record.values()
            assert values is not None
            assert np.isfinite(values).all()


def test_frozen_tensors_rest_and_trainable_ones_move() -> None:
    """The decoder's base keeps its bits, and each adapter changes, A after B."""
    trace = _run(workload="decoder", num_steps=2, learning_rate=0.5)
    start, last = trace.of(Start)[0], trace.of(Update)[-1]
    assert start.frozen
    assert start.trainable
    for name in start.frozen:
        assert last.weights[name] == start.weights[name]
    for name in start.trainable:
        assert last.weights[name] != start.weights[name]


# --- stop and resume --------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.sets(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from(["sgd", "momentum", "adamw"]),
    st.integers(0, 99),
)
def test_a_resumed_run_is_the_straight_one(stops: set[int], optimizer: str, seed: int) -> None:
    """A run stopped anywhere, even within an epoch or twice, ends on the same bits."""
    changes: dict[str, Any] = {
        "optimizer": optimizer,
        "seed": seed,
        "dropout": 0.2,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    straight, resumed = _run(**changes), _run(stops=tuple(stops), **changes)
    assert _held(resumed) == _held(straight)
    assert [s.draws for s in resumed.of(Shard)] == [s.draws for s in straight.of(Shard)]
    assert [saved.step for saved in resumed.of(Saved)] == sorted(stops)


@pytest.mark.parametrize("system", ["reference", "textbook"])
def test_a_resumed_run_is_written_alike(system: str) -> None:
    """The trace has its tensors in a fixed order, although a checkpoint has none."""
    runs = [_run(system=system, stops=(2,), optimizer="adamw") for _ in range(6)]
    orders = {tuple(tuple(update.optimizer) for update in run.of(Update)) for run in runs}
    assert len(orders) == 1


def test_a_resume_restores_what_was_saved() -> None:
    """Every worker starts from the checkpoint's state and position."""
    trace = _run(stops=(4,), optimizer="adamw")
    (saved,) = trace.of(Saved)
    assert saved.progress == {"step": 4, "schedule_step": 4, "epoch": 1, "offset": 8}
    resumed = [start for start in trace.of(Start) if start.resumed]
    assert [start.rank for start in resumed] == [0, 1, 2]
    for start in resumed:
        assert (start.weights, start.optimizer, start.buffers, start.progress) == (
            saved.weights,
            saved.optimizer,
            saved.buffers,
            saved.progress,
        )


def test_workers_that_left_stay_away_after_a_resume() -> None:
    """A resume does not bring back a worker that left."""
    trace = _run(_leave(0, 1), stops=(2,))
    assert trace.of(Saved)[0].rank == 1
    assert _present(trace, 5) == [1, 2]


# --- membership -------------------------------------------------------------------------------


def test_departures_and_returns_are_recorded() -> None:
    """The trace says which worker left, which came back, and with which state."""
    trace = _run(_leave(1, 2), _join(1, 4))
    changes = [(m.step, m.rank, m.change) for m in trace.of(Membership)]
    assert changes == [(2, 1, "left"), (4, 1, "joined")]
    assert [_present(trace, step) for step in (1, 2, 3, 4)] == [
        [0, 1, 2],
        [0, 2],
        [0, 2],
        [0, 1, 2],
    ]
    assert [(i.step, i.rank) for i in trace.of(Injected)] == [(2, 1), (4, 1)]
    back = trace.of(Start)[-1]
    before = next(u for u in trace.of(Update) if u.step == 3)
    assert (back.rank, back.step, back.weights) == (1, 4, before.weights)


@pytest.mark.parametrize(
    ("faults", "first", "last"),
    [
        ((_join(2, 3),), [0, 1], [0, 1, 2]),
        ((_join(0, 2), _leave(0, 4)), [1, 2], [1, 2]),
        ((_leave(0, 4), _join(0, 2)), [1, 2], [1, 2]),
        ((_join(1, 3), _leave(1, 3)), [0, 2], [0, 2]),
        ((_leave(1, 0), _leave(2, 0)), [0], [0]),
        ((_leave(1, 1), _join(1, 2), _leave(1, 3)), [0, 1, 2], [0, 2]),
    ],
)
def test_who_is_there(faults: tuple[Fault, ...], first: list[int], last: list[int]) -> None:
    """A worker whose first change is to join is absent until then, in any order of faults."""
    trace = _run(*faults)
    assert trace.end.status == "completed", trace.end.reason
    assert (_present(trace, 0), _present(trace, 5)) == (first, last)
    alone = [(step, *rest) for step, rank, *rest in _held(_run(world_size=1))]
    assert [(step, *rest) for step, _, *rest in _held(trace)] == [
        held for held in alone for _ in _present(trace, held[0])
    ]


def require(scenario: Scenario) -> None:
    """Raise UsageError for what no run of `scenario` can be."""
    require_possible(scenario)
    systems.require_workload(scenario)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([_leave(0, 1), _leave(1, 1), _leave(2, 1)], "leave rank=2 step=1: no other worker would"),
        ([_leave(1, 1), _leave(1, 2)], "leave rank=1 step=2: that worker is not present; use one"),
        ([_leave(1, 1), _join(1, 2), _join(1, 3)], "join rank=1 step=3: that worker is already"),
        ([_join(0, 1), _join(1, 1), _join(2, 1)], "faults join for every rank"),
        ([_leave(1, 2), _nan(rank=1)], "gradient rank=1 step=2: that worker is not present"),
        ([Fault(kind="absent", backend="cpu")], "kind='absent' on system reference: allowed are"),
        (
            [_nan(tensor="nope")],
            "tensor='nope': allowed are hidden1.weight, hidden1.bias, hidden2.",
        ),
        ([_nan(tensor="running_mean")], "tensor='running_mean': allowed are hidden1.weight"),
        ([_nan(tensor="output.bias", element=10)], "element=10: output.bias of mlp has 10 element"),
        ([_nan(element=512)], "element=512: hidden1.weight of mlp has 512 elements; use 0 to 511"),
    ],
)
def test_impossible_faults_are_refused(faults: list[Fault], message: str) -> None:
    """Both trainers refuse them before they run; a run is a failed trace that names the fault."""
    for system in ("reference", "textbook"):
        scenario = USUAL.with_(system=system, faults=tuple(faults))
        expected = message.replace("reference", system)
        with pytest.raises(UsageError) as caught:
            require(scenario)
        assert expected in str(caught.value)
        end = systems.run(scenario).end
        assert end.status == "failed"
        assert expected in end.reason


def test_a_fault_that_strikes_no_one_is_no_calm_run() -> None:
    """Rank 2 never computes shard 0: both trainers fail, because nothing was planted."""
    fault = _nan(rank=2, shard=0)
    for system in ("reference", "textbook"):
        end = _run(fault, system=system).end
        assert end.status == "failed"
        assert "'shard': 0" in end.reason
        assert "was never injected" in end.reason
    halted = _run(_nan(shard=1), Fault(kind="non_finite_loss", step=4, shard=0, value="nan"))
    assert halted.end.status == "halted", "the second fault's step is never reached"


# --- non-finite values ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_a_halt_names_the_place(kind: str, value: str) -> None:
    """A halt names step, worker, shard, tensor and samples; the step is not made."""
    gradient = kind == "non_finite_gradient"
    place: dict[str, Any] = {"tensor": "output.bias", "element": 4} if gradient else {}
    trace = _run(Fault(kind=kind, step=2, shard=3, value=value, **place))
    assert trace.end.status == "halted"
    (halt,) = trace.of(Halt)
    culprit = next(s for s in trace.of(Shard) if (s.step, s.shard) == (2, 3))
    assert not culprit.finite
    assert (halt.step, halt.rank, halt.shard, halt.ids) == (2, culprit.rank, 3, culprit.ids)
    assert halt.tensor == ("output.bias" if gradient else None)
    what = "gradient output.bias[4]" if gradient else f"loss {value}"
    assert f"non-finite {what} on worker {culprit.rank}, step 2, shard 3" in halt.reason
    assert max(update.step for update in trace.of(Update)) == 1
    assert [(i.step, i.rank, i.shard) for i in trace.of(Injected)] == [(2, culprit.rank, 3)]


def test_the_first_culprit_is_named_and_opposites_do_not_warn() -> None:
    """Inf and -Inf in one element are not added after the halt, so that numpy doesn't warn."""
    faults = [
        Fault(kind="non_finite_gradient", step=0, shard=shard, value=value)
        for shard, value in ((1, "inf"), (2, "-inf"), (4, "nan"))
    ]
    trace = _run(*faults)
    assert trace.end.status == "halted", trace.end.reason
    assert [halt.shard for halt in trace.of(Halt)] == [1]
    assert len(trace.of(Injected)) == 3


def test_a_fault_of_one_rank_strikes_its_shards_alone() -> None:
    """A fault with a `rank` strikes only the shards of that rank."""
    trace = _run(Fault(kind="non_finite_loss", step=0, rank=1, value="nan"))
    assert {s.rank for s in trace.of(Shard) if not s.finite} == {1}


def test_a_halted_step_moves_no_one() -> None:
    """The steps before the halt are equal to those of the undisturbed run."""
    fault = Fault(kind="non_finite_loss", step=3, shard=0, value="nan")
    halted, calm = _held(_run(fault)), _held(_run())
    assert halted == calm[: len(halted)]
    assert len(halted) == 3 * 3


def test_huge_gradients_average_to_a_finite_one() -> None:
    """Per-sample gradients near the largest float have a finite mean, and do not halt the run."""
    trace = _run(Fault(kind="huge_gradient", step=1, element=0, value="1e38"), num_steps=2)
    assert trace.end.status == "completed", trace.end.reason
    last = trace.of(Update)[-1]
    assert last.finite
    assert last.grad_norm == pytest.approx(1e38, rel=1e-6)


def test_a_run_that_diverges_halts() -> None:
    """With an absurd learning rate weights overflow, and the next step halts."""
    trace = _run(workload="linear", learning_rate=1e38)
    assert trace.end.status == "halted", trace.end.reason
    (halt,) = trace.of(Halt)
    assert halt.step > 0


def test_rates_and_norms_are_recorded() -> None:
    """The norms show the clipping, and the rates the schedule."""
    trace = _run(clip_norm=0.01, schedule="linear", warmup_steps=1)
    first = [update for update in trace.of(Update) if update.rank == 0]
    assert [u.learning_rate for u in first] == pytest.approx([0.025, 0.05, 0.04, 0.03, 0.02, 0.01])
    for update in first:
        assert update.grad_norm is not None
        assert update.grad_norm > 0.01
        assert update.applied_norm == pytest.approx(0.01, rel=1e-3)
