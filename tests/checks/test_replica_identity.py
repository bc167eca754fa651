"""F-DP-001 and F-TI-002 on hand-broken traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.trace import Membership, Saved, Start, Tensors, Trace, Update
from entrenar_py.verdict import Verdict
from tests.checks import traces
from tests.checks.traces import altered, broken, one, scenario, values, without

SUBJECT = scenario(optimizer="momentum")
STOPPED = scenario(optimizer="momentum", stops=(4,))
BAD = values(1.0, 2.0)


def updated(step: int, rank: int, weights: Tensors, optimizer: Tensors | None = None) -> Update:
    """An update of which only the state matters."""
    return Update(
        step=step,
        rank=rank,
        loss=1.0,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights=weights,
        optimizer=optimizer or {},
    )


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_differs_is_named(part: str, rank: int) -> None:
    """Of three workers the odd one out is named, rank 0 too, with the step and the tensor."""
    trace = traces.run(SUBJECT)
    tensors = getattr(traces.one(trace, Update, step=2, rank=rank), part)
    name = list(tensors)[-1]
    changed = {part: traces.swapped(tensors, name, BAD)}
    found = broken(
        traces.judge(
            "replica_identity", [altered(trace, Update, {"step": 2, "rank": rank}, **changed)]
        )
    )
    assert (found.step, found.rank, found.tensor) == (2, rank, name)
    assert part in found.message
    assert found.scenario == SUBJECT.to_dict()


def test_the_element_is_named_where_values_are_known() -> None:
    """With values recorded the counterexample names the element and both values."""
    base = traces.hand_written(
        *(Start(step=0, rank=rank, weights={"w": values(1.0, 2.0, 3.0)}) for rank in (0, 1))
    )
    trace = altered(base, Start, {"rank": 1}, weights={"w": values(1.0, 2.0, 3.5)})
    found = broken(traces.judge("replica_identity", [trace]))
    assert (found.tensor, found.element) == ("w", 2)
    assert found.expected is not None
    assert found.got is not None
    assert "3.0" in found.expected
    assert "3.5" in found.got


def test_the_state_before_the_first_step_counts() -> None:
    """Workers that start from different weights are found at step -1."""
    trace = traces.run(SUBJECT)
    start = trace.of(Start)[1]
    bad = traces.swapped(start.weights, "output.bias", BAD)
    found = broken(
        traces.judge("replica_identity", [altered(trace, Start, {"rank": 1}, weights=bad)])
    )
    assert (found.step, found.rank, found.tensor) == (-1, 1, "output.bias")


def test_the_first_of_several_steps_is_named() -> None:
    """A drift that stays is reported where it began."""
    trace = traces.run(SUBJECT)
    for step in (5, 3, 4):
        right = traces.one(trace, Update, step=step, rank=2).weights
        bad = traces.swapped(right, "output.bias", BAD)
        trace = altered(trace, Update, {"step": step, "rank": 2}, weights=bad)
    assert broken(traces.judge("replica_identity", [trace])).step == 3


def test_a_tensor_that_only_one_worker_holds_is_named() -> None:
    """A lost tensor differs from a held one."""
    trace = traces.run(SUBJECT)
    weights = dict(traces.one(trace, Update, step=1, rank=2).weights)
    del weights["hidden1.bias"]
    found = broken(
        traces.judge(
            "replica_identity", [altered(trace, Update, {"step": 1, "rank": 2}, weights=weights)]
        )
    )
    assert (found.step, found.rank, found.tensor) == (1, 2, "hidden1.bias")


def test_a_worker_that_sits_out_a_step_is_named() -> None:
    """A member without an update in a step that others made did not stay identical."""
    found = broken(
        traces.judge("replica_identity", [without(traces.run(SUBJECT), Update, step=3, rank=1)])
    )
    assert (found.step, found.rank) == (3, 1)


def test_who_left_is_not_missed_until_back() -> None:
    """Between leaving and joining a worker makes no step; after joining it must again."""
    trace = traces.run(scenario(faults=(traces.leave(1, 2), traces.join(1, 4))))
    assert traces.judge("replica_identity", [trace]).verdict is Verdict.HELD
    found = broken(traces.judge("replica_identity", [without(trace, Update, step=5, rank=1)]))
    assert (found.step, found.rank) == (5, 1)


def test_one_worker_compares_nothing() -> None:
    """A run on one worker is inconclusive, never held."""
    finding = traces.judge("replica_identity", [traces.run(scenario(world_size=1))])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "two workers" in finding.reason


def test_weights_that_were_not_recorded_are_missed() -> None:
    """A rank that reveals no weights is no alarm; the reason names it."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 2, "rank": 1}, weights={})
    finding = traces.judge("replica_identity", [trace])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "rank 1 recorded no weights in step 2: record Update.weights"


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_a_checkpoint_holds_what_the_worker_held(part: str) -> None:
    """A tensor stale or zero in the checkpoint is named, with the step it was saved before."""
    trace = traces.run(STOPPED)
    tensors = getattr(trace.of(Saved)[0], part)
    name = next(iter(tensors))
    changed = {part: traces.swapped(tensors, name, BAD)}
    found = broken(traces.judge("optimizer_state", [altered(trace, Saved, {}, **changed)]))
    assert (found.step, found.rank, found.tensor) == (4, 0, name)
    assert "checkpoint holds other" in found.message


def test_a_resume_restores_what_was_saved() -> None:
    """State that is lost on loading is named, with the rank that lost it."""
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


def test_a_checkpoint_that_was_never_loaded_shows_nothing() -> None:
    """Saving alone proves no resume."""
    finding = traces.judge("optimizer_state", [without(traces.run(STOPPED), Start, resumed=True)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "never loaded" in finding.reason


def test_optimizer_state_differs_between_ranks() -> None:
    """F-TI-002 finds a rank whose moments drifted."""
    trace = altered(
        traces.run(SUBJECT), Update, {"step": 1, "rank": 1}, optimizer={"momentum": BAD}
    )
    found = broken(traces.judge("optimizer_state", [trace]))
    assert (found.step, found.rank, found.tensor) == (1, 1, "momentum")


def test_a_second_step_is_seen() -> None:
    """A rank that updates again in a step it already made: the trap of a step after a step."""
    calm = traces.run(SUBJECT)
    again = one(calm, Update, step=2, rank=1)
    trace = replace(
        calm, events=tuple(e for o in calm.events for e in ([o, o] if o is again else [o]))
    )
    finding = traces.judge("replica_identity", [trace])
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    assert finding.counterexample.place() == "step 2, rank 1"


def test_a_second_step_before_the_checkpoint_is_seen() -> None:
    """A resume undoes what came after its checkpoint, and nothing before it."""
    calm = traces.run(STOPPED)
    last = calm.events[-1]
    late, early = (one(calm, Update, step=step, rank=1) for step in (5, 3))
    start = replace(one(calm, Start, rank=1, resumed=True), step=5)
    again = replace(calm, events=(*calm.events[:-1], start, late, last))
    assert traces.judge("replica_identity", [again]).verdict is Verdict.HELD
    found = broken(
        traces.judge("replica_identity", [replace(calm, events=(*calm.events[:-1], early, last))])
    )
    assert (found.step, found.rank) == (3, 1)


def test_who_died_before_a_rollback_is_not_missed() -> None:
    """Of three workers one dies in step 3; the others go back to step 2 and go on without it."""
    weights = [{"w": values(float(step))} for step in range(4)]
    starts = [Start(step=0, rank=rank, weights=weights[0]) for rank in range(3)]
    made = [updated(step, rank, weights[step]) for step in range(3) for rank in range(3)]
    dead = Membership(step=3, rank=2, change="left")
    back = [Start(step=2, rank=rank, weights=weights[1], resumed=True) for rank in (0, 1)]
    again = [updated(step, rank, weights[step]) for step in (2, 3) for rank in (0, 1)]
    trace = traces.hand_written(*starts, *made, dead, *back, *again)
    assert traces.judge("replica_identity", [trace]).verdict is Verdict.HELD
    found = broken(traces.judge("replica_identity", [without(trace, Update, step=3, rank=1)]))
    assert (found.step, found.rank) == (3, 1)


def test_a_worker_that_was_never_heard_of() -> None:
    """Three workers declared and two recorded: the third was compared with no one."""
    two = traces.run(scenario(world_size=2))
    finding = traces.judge("replica_identity", [replace(two, scenario=scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("of world_size=3 workers ranks [2] never started")


def test_a_worker_that_is_to_join_need_not_start() -> None:
    """A worker that the scenario has join or leave is not missed."""
    two = traces.run(scenario(world_size=2))
    waiting = replace(two, scenario=scenario(faults=(traces.join(2, 5),)))
    assert traces.judge("replica_identity", [waiting]).verdict is Verdict.HELD


def sharing(*held: Tensors) -> Trace:
    """One step after which each rank holds this optimizer state."""
    subject = scenario(world_size=len(held), optimizer="momentum")
    weights = {"w": values(1.0)}
    updates = [updated(0, rank, weights, tensors) for rank, tensors in enumerate(held)]
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
    """ZeRO-1: each rank keeps the state of its own tensors; what two hold is compared."""
    finding = traces.judge("replica_identity", [sharing(*held)])
    assert finding.verdict is Verdict.HELD
    assert finding.notes == (
        "optimizer state is sharded over ranks: compared is what two of them hold",
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
    """What all others hold, or two hold differently, is found all the same."""
    found = broken(traces.judge("replica_identity", [sharing(*held)]))
    assert (found.rank, found.tensor) == (rank, tensor)


def test_a_resume_of_sharded_state() -> None:
    """Each rank loads its own part, or takes it from a checkpoint that holds everything."""
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


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_what_one_rank_never_recorded(part: str) -> None:
    """State that only some ranks record is missing, not different, in both clauses."""
    trace = altered(traces.run(SUBJECT), Update, {"rank": 1}, **{part: {}})
    for check in ("replica_identity", "optimizer_state"):
        finding = traces.judge(check, [trace])
        asked = check == "replica_identity" or part == "optimizer"
        assert finding.verdict is (Verdict.INCONCLUSIVE if asked else Verdict.HELD)
        assert finding.reason == (
            f"rank 1 recorded no {part} in step 0: record Update.{part}" if asked else ""
        )


@pytest.mark.parametrize("kind", [Saved, Start])
def test_what_a_checkpoint_does_not_reveal(kind: type[Saved | Start]) -> None:
    """Weights and buffers are never empty: where they are, nobody recorded them. Optimizer state
    is, where it was lost.
    """
    trace = traces.run(STOPPED)
    for part in ("weights", "buffers"):
        finding = traces.judge("optimizer_state", [altered(trace, kind, {"step": 4}, **{part: {}})])
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert f"record {kind.__name__}.{part}" in finding.reason
    lost = altered(trace, kind, {"step": 4}, optimizer={})
    assert traces.judge("optimizer_state", [lost]).verdict is Verdict.FALSIFIED


def test_starts_alone_show_no_step() -> None:
    """Replicas that agree before the first step have not been compared after any."""
    finding = traces.judge("replica_identity", [without(traces.run(SUBJECT), Update)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "no step was recorded: record an Update for every rank and step"


def test_an_optimizer_without_state() -> None:
    """Plain SGD and no checkpoint: the reason says that there is no state to compare."""
    finding = traces.judge("optimizer_state", [traces.run(scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("optimizer=sgd keeps no state, and no checkpoint")
