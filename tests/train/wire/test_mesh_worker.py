"""The machine of a mesh worker: rounds, postponed messages, and owners of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import (
    Assign,
    Commit,
    Computed,
    Fetch,
    Group,
    Halt,
    Message,
    NonFinite,
    Overflow,
    Staged,
    State,
    TreeNode,
)
from entrenar_py.train.wire.phases import WorkerPhase
from tests.train.wire.mesh_situations import (
    GROUP,
    NEXT,
    NONCE,
    OWN,
    PEER,
    TO_2,
    average,
    complaint,
    computes,
    entered,
    hello_of,
    linked,
    node,
)
from tests.train.wire.star import closing

# --- a step -----------------------------------------------------------------------------------


def test_a_group_begins_a_round() -> None:
    """Earlier results are void, higher ranks are dialed, postponed messages are delivered."""
    machine = entered()
    assert machine.receive(GROUP, 0.0) == [TO_2, do.Regroup(1), do.Again()]


def test_every_block_goes_to_its_owner() -> None:
    """In the order of blocks; own blocks are counted here."""
    sent = computes(linked())
    assert sent[0] == do.Send(PEER, Computed(step=5, shards=(1, 2)))
    to = {0: "in", 2: "out"}
    expected = [
        do.Contribute(replace(one, round=1))
        if one.block % 3 == 1
        else do.Send(to[one.block % 3], replace(one, round=1))
        for one in OWN
    ]
    assert sent[1:] == expected


def test_a_whole_step() -> None:
    """Own blocks are averaged when complete, and sent to others; then the others' come."""
    machine = linked()
    computes(machine)
    first, last = node(4, 0, 0), node(4, 0, 3)
    assert machine.receive_from("in", first, 0.0) == [do.Keep(0, first)]
    assert machine.receive_from("out", last, 0.0) == [do.Keep(2, last), do.Reduce(5, 4)]
    told = average(4)
    assert machine.reduced(5, 4, 1.0, 4.0) == [do.Send("in", told), do.Send("out", told)]
    for peer, block in (("in", 3), ("out", 2), ("in", 0)):
        assert machine.receive_from(peer, average(block), 0.0) == [do.Hold(5, block)]
    machine.receive_from("in", node(1, 0, 0), 0.0)
    assert machine.receive_from("out", node(1, 0, 3), 0.0)[-1] == do.Reduce(5, 1)
    assert machine.reduced(5, 1, 1.0, 4.0)[-1] == do.Send(PEER, Staged(step=5, round=1))
    assert machine.phase is WorkerPhase.STAGED
    (make, applied, *begun) = machine.receive(Commit(step=5), 0.0)
    assert (make, machine.step) == (do.Make(5), 6)
    assert isinstance(applied, do.Send)
    assert begun == [do.Regroup(1), do.Again()]


def test_the_next_steps_are_of_the_same_round() -> None:
    """Every rank has the shards that it had, until another Group comes."""
    machine = linked()
    for block in (3, 0):
        machine.receive_from("in", average(block), 0.0)
    machine.receive_from("out", average(2), 0.0)
    computes(machine)
    for block in (4, 1):
        for peer, index in (("in", 0), ("out", 3)):
            machine.receive_from(peer, node(block, 0, index), 0.0)
        machine.reduced(5, block, 1.0, 4.0)
    machine.receive(Commit(step=5), 0.0)
    (kept,) = machine.receive_from("in", node(4, 0, 0, step=6), 0.0)
    assert isinstance(kept, do.Keep)
    refused = machine.receive_from("out", node(4, 0, 2, step=6), 0.0)
    assert refused[0] == do.Close("out", "TreeNode block=4 level=0 index=2: not due from rank 2")


def test_an_average_that_is_not_finite_is_told() -> None:
    """The coordinator gets the report, and halts all workers."""
    machine = linked()
    assert machine.overflowed(5, 4) == [do.Send(PEER, Overflow(step=5, block=4))]
    effects = machine.receive(Halt(step=5, reason="overflow"), 0.0)
    over = [do.Close(peer, "this worker left its group") for peer in ("in", "out")]
    assert effects == [*over, do.Close(PEER, "overflow"), do.Finish("halted", "overflow")]


def test_a_shard_that_is_not_finite_goes_to_nobody_else() -> None:
    """Only the coordinator gets a message about it."""
    machine = linked()
    (asked,) = machine.receive(Assign(step=5, shards=(1, 2)), 0.0)
    assert isinstance(asked, do.Compute)
    bad = NonFinite(step=5, shard=1, tensor="w", element=0, loss=1.0, ids=(3,))
    assert machine.computed(asked, bad) == [do.Send(PEER, bad)]


def test_the_state_is_given_when_it_is_asked_for() -> None:
    """Only between two steps, and only the one before its current step."""
    machine = linked()
    assert machine.receive(Fetch(step=5), 0.0) == [do.Send(PEER, State(step=5))]
    assert closing(machine.receive(Fetch(step=4), 0.0)) == do.Close(
        PEER, "step=4: this worker is at step 5"
    )


# --- rounds -----------------------------------------------------------------------------------


def test_another_round_begins_from_nothing() -> None:
    """Own results are sent again; other workers' have to arrive again."""
    machine = linked()
    computes(machine)
    for block in (3, 0):
        machine.receive_from("in", average(block), 0.0)
    machine.receive_from("in", node(4, 0, 0), 0.0)
    effects = machine.receive(NEXT, 0.0)
    assert (effects[0], effects[-1]) == (do.Regroup(2), do.Again())
    again = [one.message for one in effects if isinstance(one, do.Send)]
    again += [one.node for one in effects if isinstance(one, do.Contribute)]
    assert {(one.block, one.index, one.round) for one in again if isinstance(one, TreeNode)} == {
        (block, index, 2) for block in range(5) for index in (1, 2)
    }
    assert machine.receive_from("in", average(3, round_=2), 0.0) == [do.Hold(5, 3)]
    assert machine.receive_from("in", node(4, 0, 0, round_=2), 0.0) != []


def test_what_was_staged_is_not_any_more() -> None:
    """In a new round every block has to arrive again."""
    machine = linked()
    machine.phase = WorkerPhase.STAGED
    machine.receive(NEXT, 0.0)
    assert machine.phase is WorkerPhase.READY


@pytest.mark.parametrize("said", [node(4, 0, 0), average(3)])
def test_what_is_of_a_round_that_is_over_is_void(said: Message) -> None:
    """A late message of an earlier round is ignored."""
    machine = linked()
    machine.receive(NEXT, 0.0)
    assert machine.receive_from("in", said, 0.0) == []


@pytest.mark.parametrize(
    "said", [node(4, 0, 0, step=4), average(3, step=4), node(4, 0, 0, step=4, round_=0)]
)
def test_what_is_of_a_step_that_is_over_ends_the_link(said: Message) -> None:
    """An earlier step could not end without it, so it is illegal."""
    machine = linked()
    reason = "step=4: this worker is at step 5"
    assert machine.receive_from("in", said, 0.0) == [do.Close("in", reason), complaint(0, reason)]


@pytest.mark.parametrize(
    "said", [node(4, 0, 0, round_=2), node(4, 1, 0, step=6), average(3, step=6)]
)
def test_what_is_early_waits(said: Message) -> None:
    """A message of a later round or step is postponed."""
    assert linked().receive_from("in", said, 0.0) == [do.Postpone("in")]


def test_all_waits_where_there_is_no_round() -> None:
    """Before the first Group all messages of others are postponed."""
    machine = entered()
    machine.links.accepted("in", NONCE, 0.0)
    machine.receive_from("in", hello_of(0), 0.0)
    assert machine.receive_from("in", node(4, 0, 0), 0.0) == [do.Postpone("in")]


def test_no_more_waits_than_a_round_can_have() -> None:
    """A link with more postponed messages is closed, to bound memory."""
    machine, early = linked(), node(4, 0, 0, round_=2)
    for _ in range(5 * 5):
        assert machine.receive_from("in", early, 0.0) == [do.Postpone("in")]
    (closed, *_) = machine.receive_from("in", early, 0.0)
    assert closed == do.Close("in", "more early messages than a round can have")


@pytest.mark.parametrize(
    "group",
    [
        replace(GROUP, ranks=(0, 2), addresses=("a:0", "c:2")),
        replace(GROUP, addresses=("a:0", "b:1")),
        replace(GROUP, ranks=(), addresses=()),
    ],
)
def test_a_group_without_me_makes_no_sense(group: Group) -> None:
    """Such a group, or one with a missing address, ends the connection."""
    machine = linked()
    reason = f"Group ranks={group.ranks}: this worker or an address is missing"
    assert closing(machine.receive(group, 0.0)) == do.Close(PEER, reason)


def test_a_group_of_another_step_makes_no_sense() -> None:
    """A group must be of the current step."""
    closed = closing(linked().receive(replace(GROUP, step=6), 0.0))
    assert closed == do.Close(PEER, "step=6: this worker is at step 5")
