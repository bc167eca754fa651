"""Optimizer state that is sharded, lost, or recorded by some ranks only."""

from __future__ import annotations

import pytest

from entrenar_py.shared.trace import Tensors, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, one, scenario, values

SUBJECT = scenario(optimizer="momentum")
BAD = values(1.0, 2.0)


def sharing(*held: Tensors) -> Trace:
    """Return a run of one step after which each rank holds this optimizer state."""
    subject = scenario(world_size=len(held), optimizer="momentum")
    weights = {"w": values(1.0)}
    updates = [traces.updated(0, rank, weights, tensors) for rank, tensors in enumerate(held)]
    return traces.hand_written(*updates, subject=subject)


A, B, C, D = ({name: values(1.0)} for name in "abcd")


@pytest.mark.parametrize(
    "held",
    [
        pytest.param((A, B), id="two halves"),
        pytest.param((A, B, C), id="three thirds"),
        pytest.param((A | C, B | C), id="halves beside a common tensor"),
        pytest.param((A, A, B, B), id="halves, each held twice"),
    ],
)
def test_sharded_optimizer_state(held: tuple[Tensors, ...]) -> None:
    """With ZeRO-1, each rank keeps its own tensors' state, and shared tensors are compared."""
    finding = traces.judge("replica_identity", [sharing(*held)])
    assert finding.verdict is Verdict.HELD
    assert finding.notes == (
        "optimizer state is sharded over ranks: only what two of them hold was compared",
    )


@pytest.mark.parametrize(
    ("held", "rank", "tensor"),
    [
        pytest.param((A | B, A), 1, "b", id="lost by one of two"),
        pytest.param((A | B, A, A), 0, "b", id="held by one that holds all"),
        pytest.param((A | B, B | C, D), 2, "b", id="lost by one of three"),
        pytest.param((A | C, B | {"c": BAD}), 1, "c", id="a common tensor differs"),
        pytest.param((A, {"a": BAD}, B, B), 1, "a", id="a half that is held twice differs"),
    ],
)
def test_sharding_excuses_no_loss(held: tuple[Tensors, ...], rank: int, tensor: str) -> None:
    """A tensor that one rank lacks and all others hold was lost; two that differ are found."""
    found = broken(traces.judge("replica_identity", [sharing(*held)]))
    assert (found.rank, found.tensor) == (rank, tensor)


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_what_one_rank_never_recorded(part: str) -> None:
    """State that only some ranks record is missing, not different, for both clauses."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 1}, **{part: {}})
    for check in ("replica_identity", "optimizer_state"):
        finding = traces.judge(check, [trace])
        asked = check == "replica_identity" or part == "optimizer"
        assert finding.verdict is (Verdict.INCONCLUSIVE if asked else Verdict.HELD)
        assert finding.reason == (
            f"rank 1 recorded no {part} in step 0 and later: record Update.{part}" if asked else ""
        )


@pytest.mark.parametrize("check", ["replica_identity", "optimizer_state"])
def test_a_first_step_that_was_skipped(check: str) -> None:
    """State recorded after other steps, but not after a rank's first, was not made in it."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 0, "rank": 1}, optimizer={})
    found = broken(traces.judge(check, [trace]))
    assert (found.step, found.rank) == (0, 1)


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer"])
def test_a_blind_rank_hides_no_other(part: str) -> None:
    """Two ranks that differ are found, even if the third recorded no weights."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 2}, weights={})
    tensors = getattr(one(trace, Update, step=3, rank=1), part)
    bad = traces.swapped(tensors, next(iter(tensors)), BAD)
    apart = altered(trace, Update, {"step": 3, "rank": 1}, **{part: bad})
    found = broken(traces.judge("replica_identity", [apart]))
    assert (found.step, found.rank) == (3, 1)


def test_ranks_that_lack_the_same_are_told_together() -> None:
    """Ranks with the same gap share one reason, with the first step."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 1}, weights={})
    finding = traces.judge("replica_identity", [altered(trace, Update, {"rank": 2}, weights={})])
    assert finding.reason == (
        "ranks 1, 2 recorded no weights in step 0 and later: record Update.weights"
    )


def test_state_that_no_rank_has_after_some_step() -> None:
    """Buffers recorded after some steps must be recorded after every step."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 4}, buffers={})
    finding = traces.judge("replica_identity", [trace])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "ranks 0, 1, 2 recorded no buffers in step 4: record Update.buffers"
