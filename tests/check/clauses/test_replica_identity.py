"""F-DP-001 on traces broken by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import SHORTENED, Runs
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Event, Membership, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, one, scenario, values, without

SUBJECT = scenario(optimizer="momentum")
STOPPED = scenario(optimizer="momentum", stops=(4,))
BAD = values(1.0, 2.0)


def updated(step: int, rank: int, weights: Tensors, optimizer: Tensors | None = None) -> Update:
    """Return an update with default values for fields that are no state."""
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


def test_ranks_that_part_at_an_epochs_end_are_found_in_short_epochs() -> None:
    """One that goes back to its best weights alone does so after an epoch, which may be long."""
    usual = traces.run(SUBJECT)
    tensors = traces.one(usual, Update, step=4, rank=0).weights
    name = next(iter(tensors))
    parted = {"weights": traces.swapped(tensors, name, BAD)}
    short = altered(usual, Update, {"step": 4, "rank": 0}, **parted)
    row, invariant = CHECKS["replica_identity"], traces.clause("replica_identity")
    finding = row.judge(invariant, Runs(usual, witnesses={SHORTENED: (short,)}))
    assert (broken(finding).step, broken(finding).tensor) == (4, name)
    right = row.judge(invariant, Runs(usual, witnesses={SHORTENED: (usual,)}))
    assert right.verdict is Verdict.HELD


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_differs_is_named(part: str, rank: int) -> None:
    """The one of three workers that differs is named, even rank 0, with step and tensor."""
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
    """With recorded values the counterexample names the element and both values."""
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
    """A lasting drift is reported in the step in which it began."""
    trace = traces.run(SUBJECT)
    for step in (5, 3, 4):
        right = traces.one(trace, Update, step=step, rank=2).weights
        bad = traces.swapped(right, "output.bias", BAD)
        trace = altered(trace, Update, {"step": step, "rank": 2}, weights=bad)
    assert broken(traces.judge("replica_identity", [trace])).step == 3


def test_a_tensor_that_only_one_worker_holds_is_named() -> None:
    """A tensor that only one worker holds is a difference."""
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
    """A member without an update in a step that others made is falsified."""
    found = broken(
        traces.judge("replica_identity", [without(traces.run(SUBJECT), Update, step=3, rank=1)])
    )
    assert (found.step, found.rank) == (3, 1)


def test_who_left_is_not_missed_until_back() -> None:
    """A worker makes no step between leaving and joining, and must make each one after that."""
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
    """A rank without recorded weights is missing, and named."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 2, "rank": 1}, weights={})
    finding = traces.judge("replica_identity", [trace])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "rank 1 recorded no weights in step 2: record Update.weights"


def test_a_second_step_is_seen() -> None:
    """A rank that makes the same step twice is found."""
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
    """A resume undoes the events after its checkpoint only, so an earlier second step is found."""
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
    """A worker that died before a rollback to step 2 is not expected in later steps."""
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
    """If two of three declared workers were recorded, the third is missing."""
    two = traces.run(scenario(world_size=2))
    finding = traces.judge("replica_identity", [replace(two, scenario=scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("of world_size=3 workers rank 2 never started")
    gone = scenario(faults=(traces.leave(2, 1),))
    left = Membership(step=1, rank=2, change="left")
    heard_of = replace(two, scenario=gone, events=(left, *two.events))
    finding = traces.judge("replica_identity", [heard_of])
    assert finding.reason.startswith("of world_size=3 workers rank 2 never started")


def test_a_worker_that_is_to_join_need_not_start() -> None:
    """A worker that the scenario lets join or leave is not missing."""
    two = traces.run(scenario(world_size=2))
    waiting = replace(two, scenario=scenario(faults=(traces.join(2, 5),)))
    assert traces.judge("replica_identity", [waiting]).verdict is Verdict.HELD


@pytest.mark.parametrize("part", ["optimizer", "buffers"])
def test_a_worker_that_joins_with_nothing(part: str) -> None:
    """A joining worker that lacks state which its later updates have lost it."""
    subject = SUBJECT.with_(faults=(traces.leave(1, 1), traces.join(1, 4)))
    trace = altered(traces.run(subject), Start, {"step": 4}, **{part: {}})
    found = broken(traces.judge("replica_identity", [trace]))
    assert (found.step, found.rank) == (3, 1)
    assert f"joined with other {part}" in found.message


@pytest.mark.parametrize("step", [2, 4])
def test_who_has_left_makes_no_step(step: int) -> None:
    """An update by a rank that had left is falsified, but not once it is back."""
    subject = SUBJECT.with_(faults=(traces.leave(1, 2),))
    trace = traces.run(subject)
    ghost = replace(one(trace, Update, step=step, rank=0), rank=1)
    with_ghost = replace(trace, events=(*trace.events[:-1], ghost, trace.events[-1]))
    found = broken(traces.judge("replica_identity", [with_ghost]))
    assert (found.step, found.rank) == (step, 1)
    assert "had left and yet updated" in found.message
    back = Start(step=step, rank=1, weights=one(trace, Update, step=step - 1, rank=0).weights)
    joined = replace(trace, events=(*trace.events[:-1], back, ghost, trace.events[-1]))
    assert "had left" not in traces.judge("replica_identity", [joined]).reason


def test_a_rank_that_stops_without_a_start() -> None:
    """A rank without a recorded start must still make each step that others make."""
    trace = without(traces.run(SUBJECT), Start, rank=1)
    assert traces.judge("replica_identity", [trace]).verdict is Verdict.HELD
    found = broken(traces.judge("replica_identity", [without(trace, Update, step=4, rank=1)]))
    assert (found.step, found.rank) == (4, 1)


def test_starts_alone_show_no_step() -> None:
    """Equal states before the first step alone are inconclusive."""
    finding = traces.judge("replica_identity", [without(traces.run(SUBJECT), Update)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "no step was recorded: record an Update for every rank and step"


def trained_alone(*, ids: tuple[tuple[int, ...], ...], alone: bool = True) -> Trace:
    """Return a script's run of two ranks which draw these samples, and hold the same weights."""
    events: list[Event] = [
        Start(step=0, rank=rank, weights={"w": values(1.0)}, trainable=("w",)) for rank in (0, 1)
    ]
    for step in range(2):
        for rank in (0, 1):
            shard = Shard(
                step=step,
                epoch=0,
                rank=rank,
                shard=rank,
                ids=ids[rank],
                loss_sum=1.0,
                weight=1.0,
                finite=True,
                gradient={"w": values(1.0 * ids[rank][0])},
            )
            events += [shard, updated(step, rank, {"w": values(2.0 + step)})]
    subject = scenario(world_size=2).with_(system=OBSERVED, workload="own", optimizer="sgd")
    return traces.was(traces.hand_written(*events, subject=subject), alone=alone)


def test_two_trainings_that_never_communicate_are_no_replicas() -> None:
    """Ranks that are seeded alike and draw the same samples hold the same weights by themselves."""
    trace = trained_alone(ids=((1, 2), (1, 2)))
    found = broken(traces.judge("replica_identity", [trace]))
    assert (found.step, found.rank) == (0, 1)
    assert "ranks 0, 1 never communicate" in found.message
    drifted = altered(trace, Update, {"step": 1, "rank": 1}, weights={"w": values(9.0)})
    found = broken(traces.judge("replica_identity", [drifted]))
    assert (found.step, found.tensor) == (1, "w")
    assert found.message.endswith("connects them as they train")


def test_communication_that_is_not_seen_is_not_denied() -> None:
    """Ranks with other samples and the same weights have a server behind a socket, perhaps."""
    for trace in (
        trained_alone(ids=((1, 2), (3, 4))),
        trained_alone(ids=((1, 2), (1, 2)), alone=False),
    ):
        assert traces.judge("replica_identity", [trace]).verdict is Verdict.HELD
