"""F-TI-002 on traces broken by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.shared.trace import Saved, Start, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.causes.test_state import A, B, sharing
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, scenario, values, without

SUBJECT = scenario(optimizer="momentum")
STOPPED = scenario(optimizer="momentum", stops=(4,))
BAD = values(1.0, 2.0)


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_a_checkpoint_holds_what_the_worker_held(part: str) -> None:
    """A stale or zeroed tensor in a checkpoint is named, with the step of the checkpoint."""
    trace = traces.run(STOPPED)
    tensors = getattr(trace.of(Saved)[0], part)
    name = next(iter(tensors))
    changed = {part: traces.swapped(tensors, name, BAD)}
    found = broken(traces.judge("optimizer_state", [altered(trace, Saved, {}, **changed)]))
    assert (found.step, found.rank, found.tensor) == (4, 0, name)
    assert "checkpoint holds other" in found.message


def test_a_resume_restores_what_was_saved() -> None:
    """State lost on loading is named, with the rank that lost it."""
    trace = altered(traces.run(STOPPED), Start, {"resumed": True, "rank": 2}, optimizer={})
    found = broken(traces.judge("optimizer_state", [trace]))
    assert (found.step, found.rank) == (4, 2)
    assert "resumed with other optimizer" in found.message


def test_a_resume_restores_the_position() -> None:
    """Epoch, offset and schedule step are part of the state."""
    where = {"resumed": True, "rank": 1}
    trace = altered(traces.run(STOPPED), Start, where, progress={"step": 0})
    found = broken(traces.judge("optimizer_state", [trace]))
    assert (found.step, found.rank) == (4, 1)
    assert "another position" in found.message


def test_the_state_of_copies_is_not_recorded() -> None:
    """An optimizer of copies has state, but none for the model's parameters."""
    bare = altered(traces.run(SUBJECT), Update, {}, optimizer={})
    finding = traces.judge("optimizer_state", [traces.was(bare, steps="copies")])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "that of copies of the weights" in finding.reason


def test_a_checkpoint_that_was_never_loaded_shows_nothing() -> None:
    """A checkpoint that was never loaded is inconclusive."""
    finding = traces.judge("optimizer_state", [without(traces.run(STOPPED), Start, resumed=True)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "never loaded" in finding.reason


def test_optimizer_state_differs_between_ranks() -> None:
    """A rank whose moments drifted is found."""
    trace = altered(
        traces.run(SUBJECT), Update, {"step": 1, "rank": 1}, optimizer={"momentum": BAD}
    )
    found = broken(traces.judge("optimizer_state", [trace]))
    assert (found.step, found.rank, found.tensor) == (1, 1, "momentum")


def test_a_resume_of_sharded_state() -> None:
    """Each rank loads its own part, or takes it from a checkpoint of the whole state."""
    weights, changed = {"w": values(1.0)}, {"a": BAD}
    base = sharing(A, B)
    saved = Saved(step=1, rank=0, weights=weights, optimizer=A | B)
    starts = [
        Start(step=1, rank=rank, weights=weights, optimizer=held, resumed=True)
        for rank, held in enumerate((A, B))
    ]
    trace = replace(base, events=(*base.events[:-1], saved, *starts, base.events[-1]))
    assert traces.judge("optimizer_state", [trace]).verdict is Verdict.HELD
    found = broken(
        traces.judge("optimizer_state", [altered(trace, Start, {"rank": 0}, optimizer=changed)])
    )
    assert (found.step, found.rank, found.tensor) == (1, 0, "a")


@pytest.mark.parametrize("kind", [Saved, Start])
def test_what_a_checkpoint_does_not_reveal(kind: type[Saved | Start]) -> None:
    """Empty weights are unrecorded; other empty parts were lost, if the workers had them."""
    trace = traces.run(STOPPED)
    finding = traces.judge("optimizer_state", [altered(trace, kind, {"step": 4}, weights={})])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert f"record {kind.__name__}.weights" in finding.reason
    for part in ("optimizer", "buffers"):
        lost = altered(trace, kind, {"step": 4}, **{part: {}})
        assert part in broken(traces.judge("optimizer_state", [lost])).message


def test_buffers_that_only_a_checkpoint_holds() -> None:
    """Buffers that the checkpoint has and the workers never recorded are missing."""
    bare = altered(altered(traces.run(STOPPED), Update, {}, buffers={}), Start, {}, buffers={})
    finding = traces.judge("optimizer_state", [bare])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "rank 0 recorded no buffers in step 4: record Update.buffers" in finding.reason
    assert "ranks 0, 1, 2 recorded no buffers in step 4: record Start.buffers" in finding.reason


def test_a_checkpoint_that_one_rank_did_not_load() -> None:
    """A rank that continues from a checkpoint without loading it is named, and so is one whose own
    state before the checkpoint is unknown.
    """
    trace = traces.run(STOPPED)
    for bare, missing in (
        (without(trace, Start, resumed=True, rank=1), "step 4 was never loaded by rank 1: record"),
        (without(trace, Update, step=3, rank=0), "record its Update of step 3"),
    ):
        finding = traces.judge("optimizer_state", [bare])
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert missing in finding.reason


def test_an_optimizer_without_state() -> None:
    """For plain SGD without a checkpoint the reason says that there is no state to compare."""
    finding = traces.judge("optimizer_state", [traces.run(scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("optimizer=sgd keeps no state, and no checkpoint")


@pytest.mark.parametrize(
    ("optimizer", "rule", "why"),
    [
        ("sgd", "known", "it is SGD without momentum"),
        ("sgd", "own", "it is SGD without momentum"),
        ("momentum", "known", ""),
        ("adamw", "own", ""),
    ],
)
def test_an_optimizer_of_a_script_that_keeps_no_state(optimizer: str, rule: str, why: str) -> None:
    """Where no rank ever had any state, there is none to lose; else it is judged."""
    ran = traces.observed(scenario(optimizer=optimizer), rule=rule)
    absent = CHECKS["optimizer_state"].absent([ran])
    assert (why in absent) if why else absent == ""
    assert CHECKS["optimizer_state"].absent([traces.hand_written(subject=ran.scenario)]) == ""


def test_a_stateless_optimizer_of_the_user_s_own() -> None:
    """Its kind is unknown: that no update has any state is what was seen."""
    ran = traces.observed(scenario(optimizer="sgd"), rule="own")
    own = replace(ran, scenario=ran.scenario.with_(optimizer="momentum"))
    assert CHECKS["optimizer_state"].absent([own]).startswith("the optimizer keeps no state")
    assert CHECKS["optimizer_state"].absent([traces.was(own, rule="known")]) == ""


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_state_that_each_rank_keeps_of_other_tensors_is_compared_with_one_worker_s(
    factor: float,
) -> None:
    """No two ranks hold the same state. All of it together is that of the run on one worker."""
    both = {"a/buffer": values(1.0, 2.0), "b/buffer": values(3.0)}
    alone = altered(traces.observed(scenario(world_size=1)), Update, {}, optimizer=both)
    own = [{"a/buffer": values(factor, 2 * factor)}, {"b/buffer": values(3.0)}]
    spread = traces.observed(scenario(world_size=2))
    for rank, state in enumerate(own):
        spread = altered(spread, Update, {"rank": rank}, optimizer=state)
    runs = Runs(base=spread, witnesses={ALONE: (alone,)})
    finding = CHECKS["optimizer_state"].judge(traces.clause("optimizer_state"), runs)
    assert (finding.verdict is Verdict.HELD) is (factor == 1.0)
