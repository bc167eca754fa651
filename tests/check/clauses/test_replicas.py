"""Replicas hold equal tensors, ties stay one tensor, checkpoints hold the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import ALONE, SHORTENED, Runs
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import (
    Declared,
    Event,
    Membership,
    Noticed,
    Saved,
    Start,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.check.causes.test_state import A, B, sharing
from tests.traces import (
    altered,
    broken,
    falsified,
    left_open,
    one,
    scenario,
    undecided,
    values,
    without,
)

SUBJECT = scenario(optimizer="momentum")
STOPPED = scenario(optimizer="momentum", stops=(4,))
BAD = values(1.0, 2.0)


def test_ranks_that_part_at_an_epochs_end_are_found_in_short_epochs() -> None:
    """One that goes back to its best weights alone does so after an epoch, which may be long."""
    usual = traces.run(SUBJECT)
    parted = traces.swapping("weights", "output.bias", BAD)
    short = altered(usual, Update, {"step": 4, "rank": 0}, **parted)
    found = falsified("replica_identity", Runs(usual, witnesses={SHORTENED: (short,)}))
    assert (found.step, found.tensor) == (4, "output.bias")
    traces.held("replica_identity", Runs(usual, witnesses={SHORTENED: (usual,)}))


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_differs_is_named(part: str, rank: int) -> None:
    """The one of three workers that differs is named, even rank 0, with step and tensor."""
    trace = traces.run(SUBJECT)
    name = list(getattr(trace.of(Update)[0], part))[-1]
    apart = altered(trace, Update, {"step": 2, "rank": rank}, **traces.swapping(part, name, BAD))
    found = falsified("replica_identity", apart)
    assert (found.step, found.rank, found.tensor) == (2, rank, name)
    assert part in found.message
    assert found.scenario == SUBJECT.to_dict()


def test_the_element_is_named_where_values_are_known() -> None:
    """With recorded values the counterexample names the element and both values."""
    base = traces.hand_written(
        *(Start(step=0, rank=rank, weights={"w": values(1.0, 2.0, 3.0)}) for rank in (0, 1))
    )
    trace = altered(base, Start, {"rank": 1}, weights={"w": values(1.0, 2.0, 3.5)})
    found = falsified("replica_identity", trace)
    assert (found.tensor, found.element) == ("w", 2)
    assert found.expected is not None
    assert found.got is not None
    assert "3.0" in found.expected
    assert "3.5" in found.got


def test_the_state_before_the_first_step_counts() -> None:
    """Workers that start from different weights are found at step -1."""
    trace = traces.run(SUBJECT)
    bad = traces.swapping("weights", "output.bias", BAD)
    found = falsified("replica_identity", altered(trace, Start, {"rank": 1}, **bad))
    assert (found.step, found.rank, found.tensor) == (-1, 1, "output.bias")


def test_the_first_of_several_steps_is_named() -> None:
    """A lasting drift is reported in the step in which it began."""
    late = {"step": lambda step: step >= 3, "rank": 2}
    bad = traces.swapping("weights", "output.bias", BAD)
    assert (
        falsified("replica_identity", altered(traces.run(SUBJECT), Update, late, **bad)).step == 3
    )


def test_a_tensor_that_only_one_worker_holds_is_named() -> None:
    """A tensor that only one worker holds is a difference."""
    trace = traces.run(SUBJECT)
    weights = dict(traces.one(trace, Update, step=1, rank=2).weights)
    del weights["hidden1.bias"]
    lacking = altered(trace, Update, {"step": 1, "rank": 2}, weights=weights)
    found = falsified("replica_identity", lacking)
    assert (found.step, found.rank, found.tensor) == (1, 2, "hidden1.bias")


def test_a_worker_that_sits_out_a_step_is_named() -> None:
    """A member without an update in a step that others made is falsified."""
    found = falsified("replica_identity", without(traces.run(SUBJECT), Update, step=3, rank=1))
    assert (found.step, found.rank) == (3, 1)


def test_who_left_is_not_missed_until_back() -> None:
    """A worker makes no step between leaving and joining, and must make each one after that."""
    trace = traces.run(scenario(faults=(traces.leave(1, 2), traces.join(1, 4))))
    traces.held("replica_identity", trace)
    found = falsified("replica_identity", without(trace, Update, step=5, rank=1))
    assert (found.step, found.rank) == (5, 1)


def test_one_worker_compares_nothing() -> None:
    """A run on one worker is inconclusive, never held."""
    assert "two workers" in left_open("replica_identity", traces.run(scenario(world_size=1)))


def test_weights_that_were_not_recorded_are_missed() -> None:
    """A rank without recorded weights is missing, and named."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 2, "rank": 1}, weights={})
    assert (
        left_open("replica_identity", trace)
        == "rank 1 recorded no weights in step 2: record Update.weights"
    )


def test_a_second_step_is_seen() -> None:
    """A rank that makes the same step twice is found."""
    calm = traces.run(SUBJECT)
    again = one(calm, Update, step=2, rank=1)
    events = tuple(e for o in calm.events for e in ([o, o] if o is again else [o]))
    found = falsified("replica_identity", replace(calm, events=events))
    assert found.place() == "step 2, rank 1"


def test_a_second_step_before_the_checkpoint_is_seen() -> None:
    """A resume undoes the events after its checkpoint only, so an earlier second step is found."""
    calm = traces.run(STOPPED)
    late, early = (one(calm, Update, step=step, rank=1) for step in (5, 3))
    start = replace(one(calm, Start, rank=1, resumed=True), step=5)
    traces.held("replica_identity", traces.also(calm, start, late))
    found = falsified("replica_identity", traces.also(calm, early))
    assert (found.step, found.rank) == (3, 1)


def test_who_died_before_a_rollback_is_not_missed() -> None:
    """A worker that died before a rollback to step 2 is not expected in later steps."""
    weights = [{"w": values(float(step))} for step in range(4)]
    starts = [Start(step=0, rank=rank, weights=weights[0]) for rank in range(3)]
    made = [
        traces.update(step, rank, weights=weights[step]) for step in range(3) for rank in range(3)
    ]
    dead = Membership(step=3, rank=2, change="left")
    back = [Start(step=2, rank=rank, weights=weights[1], resumed=True) for rank in (0, 1)]
    again = [traces.update(step, rank, weights=weights[step]) for step in (2, 3) for rank in (0, 1)]
    trace = traces.hand_written(*starts, *made, dead, *back, *again)
    traces.held("replica_identity", trace)
    found = falsified("replica_identity", without(trace, Update, step=3, rank=1))
    assert (found.step, found.rank) == (3, 1)


def test_a_worker_that_was_never_heard_of() -> None:
    """If two of three declared workers were recorded, the third is missing."""
    two = traces.run(scenario(world_size=2))
    gone = scenario(faults=(traces.leave(2, 1),))
    left = Membership(step=1, rank=2, change="left")
    heard_of = replace(two, scenario=gone, events=(left, *two.events))
    for trace in (replace(two, scenario=scenario()), heard_of):
        reason = traces.judge("replica_identity", [trace]).reason
        assert reason.startswith("of world_size=3 workers rank 2 never started")


def test_a_worker_that_is_to_join_need_not_start() -> None:
    """A worker that the scenario lets join or leave is not missing."""
    two = traces.run(scenario(world_size=2))
    waiting = replace(two, scenario=scenario(faults=(traces.join(2, 5),)))
    traces.held("replica_identity", waiting)


@pytest.mark.parametrize("part", ["optimizer", "buffers"])
def test_a_worker_that_joins_with_nothing(part: str) -> None:
    """A joining worker that lacks state which its later updates have lost it."""
    subject = SUBJECT.with_(faults=(traces.leave(1, 1), traces.join(1, 4)))
    trace = altered(traces.run(subject), Start, {"step": 4}, **{part: {}})
    found = falsified("replica_identity", trace)
    assert (found.step, found.rank) == (3, 1)
    assert f"joined with different {part}" in found.message


@pytest.mark.parametrize("step", [2, 4])
def test_who_has_left_makes_no_step(step: int) -> None:
    """An update by a rank that had left is falsified, but not once it is back."""
    subject = SUBJECT.with_(faults=(traces.leave(1, 2),))
    trace = traces.run(subject)
    ghost = replace(one(trace, Update, step=step, rank=0), rank=1)
    with_ghost = traces.also(trace, ghost)
    found = falsified("replica_identity", with_ghost)
    assert (found.step, found.rank) == (step, 1)
    assert "had left, but updated" in found.message
    back = Start(step=step, rank=1, weights=one(trace, Update, step=step - 1, rank=0).weights)
    joined = traces.also(trace, back, ghost)
    assert "had left" not in traces.judge("replica_identity", [joined]).reason


def test_a_rank_that_stops_without_a_start() -> None:
    """A rank without a recorded start must still make each step that others make."""
    trace = without(traces.run(SUBJECT), Start, rank=1)
    traces.held("replica_identity", trace)
    found = falsified("replica_identity", without(trace, Update, step=4, rank=1))
    assert (found.step, found.rank) == (4, 1)


def test_starts_alone_show_no_step() -> None:
    """Equal states before the first step alone are inconclusive."""
    assert (
        left_open("replica_identity", without(traces.run(SUBJECT), Update))
        == "no step was recorded: record an Update for every rank and step"
    )


def trained_alone(*, ids: tuple[tuple[int, ...], ...], alone: bool = True) -> Trace:
    """Return a script's run of two ranks which draw these samples, and hold the same weights."""
    events: list[Event] = [
        Start(step=0, rank=rank, weights={"w": values(1.0)}, trainable=("w",)) for rank in (0, 1)
    ]
    for step in range(2):
        for rank in (0, 1):
            shard = traces.shard(
                step, rank, shard=rank, ids=ids[rank], gradient={"w": values(1.0 * ids[rank][0])}
            )
            events += [shard, traces.update(step, rank, weights={"w": values(2.0 + step)})]
    subject = scenario(world_size=2).with_(system=OBSERVED, workload="own", optimizer="sgd")
    return traces.was(traces.hand_written(*events, subject=subject), alone=alone)


def test_two_trainings_that_never_communicate_are_no_replicas() -> None:
    """Ranks that are seeded alike and draw the same samples hold the same weights by themselves."""
    trace = trained_alone(ids=((1, 2), (1, 2)))
    found = falsified("replica_identity", trace)
    assert (found.step, found.rank) == (0, 1)
    assert "ranks 0, 1 never communicate" in found.message
    drifted = altered(trace, Update, {"step": 1, "rank": 1}, weights={"w": values(9.0)})
    found = falsified("replica_identity", drifted)
    assert (found.step, found.tensor) == (1, "w")
    assert found.message.endswith("connects them during training")


def test_communication_that_is_not_seen_is_not_denied() -> None:
    """Ranks with other samples and the same weights have a server behind a socket, perhaps."""
    for trace in (
        trained_alone(ids=((1, 2), (3, 4))),
        trained_alone(ids=((1, 2), (1, 2)), alone=False),
    ):
        traces.held("replica_identity", trace)


# --- ties -----------------------------------------------------------------------------------------


def trained(*events: Event, copies: tuple[float, ...]) -> Trace:
    """Return a run of one worker, in which the second name of a tensor takes the values `copies`.

    The first name takes 0, 1, 2.
    """
    held = [{"w": values(float(at)), "v": values(copy)} for at, copy in enumerate(copies)]
    start, *steps = traces.reaching(held, trainable=("w", "v"))
    alone = traces.scenario(world_size=1)
    return traces.hand_written(start, *events, *steps, subject=alone)


def judged(trace: Trace) -> Finding:
    """Return the finding of F-DP-001."""
    return traces.judge("replica_identity", [trace])


@pytest.mark.parametrize(("copies", "step"), [((0, 1, 3), 1), ((5, 1, 2), -1)])
def test_copies_that_differ(copies: tuple[float, ...], step: int) -> None:
    """Of a declared tie, a copy that differs is named in the first step where it does."""
    tie = Declared(step=0, rank=0, tied=(("w", "v"),))
    found = broken(judged(trained(tie, copies=copies)))
    assert (found.step, found.rank, found.tensor) == (step, 0, "v")


def test_copies_that_agree() -> None:
    """Copies of a declared tie that agree are compared, before the first step and after each."""
    tie = Declared(step=0, rank=0, tied=(("w", "v"),))
    finding = judged(trained(tie, copies=(0, 1, 2)))
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 3)


def test_names_that_part() -> None:
    """Names of one tensor that become two are reported if nobody declared a tie."""
    once = Noticed(step=0, rank=0, shared=(("w", "v"),))
    reason = undecided(judged(trained(once, copies=(0, 1, 3))))
    assert "w and v were one tensor when observe() was called, and differ in step 1" in (reason)
    assert "tied=(('w', 'v'),)" in reason
    (note,) = judged(trained(once, copies=(0, 1, 2))).notes
    assert "are two tensors that agree" in note


def test_an_embedding_like_another_tensor() -> None:
    """Two tensors that start with the same values may have been one: a note says so."""
    seen = Noticed(step=0, rank=0, alike=(("w", "v"),))
    (note,) = judged(trained(seen, copies=(0, 1, 3))).notes
    assert "w and v have the same values before the first step, but are two tensors" in note


# --- the optimizer's state ------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_a_checkpoint_holds_what_the_worker_held(part: str) -> None:
    """A stale or zeroed tensor in a checkpoint is named, with the step of the checkpoint."""
    trace = traces.run(STOPPED)
    name = next(iter(getattr(trace.of(Saved)[0], part)))
    changed = traces.swapping(part, name, BAD)
    found = falsified("optimizer_state", altered(trace, Saved, {}, **changed))
    assert (found.step, found.rank, found.tensor) == (4, 0, name)
    assert "checkpoint holds different" in found.message


def test_a_resume_restores_what_was_saved() -> None:
    """State lost on loading is named, with the rank that lost it."""
    trace = altered(traces.run(STOPPED), Start, {"resumed": True, "rank": 2}, optimizer={})
    found = falsified("optimizer_state", trace)
    assert (found.step, found.rank) == (4, 2)
    assert "resumed with different optimizer" in found.message


def test_a_resume_restores_the_position() -> None:
    """Epoch, offset and schedule step are part of the state."""
    where = {"resumed": True, "rank": 1}
    trace = altered(traces.run(STOPPED), Start, where, progress={"step": 0})
    found = falsified("optimizer_state", trace)
    assert (found.step, found.rank) == (4, 1)
    assert "a different position" in found.message


def test_the_state_of_copies_is_not_recorded() -> None:
    """An optimizer of copies has state, but none for the model's parameters."""
    bare = altered(traces.run(SUBJECT), Update, {}, optimizer={})
    assert "belongs to copies of the weights" in left_open(
        "optimizer_state", traces.was(bare, steps="copies")
    )


def test_a_checkpoint_that_was_never_loaded_shows_nothing() -> None:
    """A checkpoint that was never loaded is inconclusive."""
    assert "never loaded" in left_open(
        "optimizer_state", without(traces.run(STOPPED), Start, resumed=True)
    )


def test_optimizer_state_differs_between_ranks() -> None:
    """A rank whose moments drifted is found."""
    trace = altered(
        traces.run(SUBJECT), Update, {"step": 1, "rank": 1}, optimizer={"momentum": BAD}
    )
    found = falsified("optimizer_state", trace)
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
    trace = traces.also(base, saved, *starts)
    traces.held("optimizer_state", trace)
    found = falsified("optimizer_state", altered(trace, Start, {"rank": 0}, optimizer=changed))
    assert (found.step, found.rank, found.tensor) == (1, 0, "a")


@pytest.mark.parametrize("kind", [Saved, Start])
def test_what_a_checkpoint_does_not_reveal(kind: type[Saved | Start]) -> None:
    """Empty weights are unrecorded; other empty parts were lost, if the workers had them."""
    trace = traces.run(STOPPED)
    assert f"record {kind.__name__}.weights" in left_open(
        "optimizer_state", altered(trace, kind, {"step": 4}, weights={})
    )
    for part in ("optimizer", "buffers"):
        lost = altered(trace, kind, {"step": 4}, **{part: {}})
        assert part in falsified("optimizer_state", lost).message


def test_buffers_that_only_a_checkpoint_holds() -> None:
    """Buffers that the checkpoint has and the workers never recorded are missing."""
    bare = altered(altered(traces.run(STOPPED), Update, {}, buffers={}), Start, {}, buffers={})
    reason = left_open("optimizer_state", bare)
    assert "rank 0 recorded no buffers in step 4: record Update.buffers" in reason
    assert "ranks 0, 1, 2 recorded no buffers in step 4: record Start.buffers" in reason


def test_a_checkpoint_that_one_rank_did_not_load() -> None:
    """A rank that continues from a checkpoint without loading it is named, and so is one whose own
    state before the checkpoint is unknown.
    """
    trace = traces.run(STOPPED)
    for bare, missing in (
        (without(trace, Start, resumed=True, rank=1), "step 4 was never loaded by rank 1: record"),
        (without(trace, Update, step=3, rank=0), "record its Update of step 3"),
    ):
        assert missing in left_open("optimizer_state", bare)


def test_an_optimizer_without_state() -> None:
    """For plain SGD without a checkpoint the reason says that there is no state to compare."""
    assert left_open("optimizer_state", traces.run(scenario())).startswith(
        "optimizer=sgd keeps no state, and no checkpoint"
    )


def test_state_of_a_script_on_one_worker() -> None:
    """It has state, so no other optimizer is advised: nothing else has state to compare it with."""
    reason = left_open(
        "optimizer_state", traces.observed(scenario(world_size=1, optimizer="momentum"))
    )
    assert reason.startswith("no optimizer state of two workers, and no run continued from a")


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
    finding = traces.judge("optimizer_state", runs)
    assert (finding.verdict is Verdict.HELD) is (factor == 1.0)
