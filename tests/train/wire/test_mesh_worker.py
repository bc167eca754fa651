"""The machine of a mesh worker and its links: rounds, owners of blocks, admission, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Dial
from entrenar_py.train.wire.mesh_worker import AGAIN
from entrenar_py.train.wire.messages import (
    MESH_WORKER_MAY_HEAR,
    MESSAGES,
    Assign,
    Average,
    Commit,
    Computed,
    Fetch,
    Group,
    Halt,
    Heartbeat,
    Leave,
    Message,
    NonFinite,
    Overflow,
    Staged,
    State,
    TreeNode,
    WorkerPhase,
)
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
from tests.train.wire.samples import SAMPLES
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


# --- what another worker may not say ----------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "said", "complaint_"),
    [
        ("in", node(3, 0, 0), "not due from rank 0"),  # a block of rank 0's
        ("in", node(4, 0, 1), "not due from rank 0"),  # a shard of mine
        ("in", node(4, 1, 0), "not due from rank 0"),  # one of its and one of mine
        ("in", node(4, 3, 0), "not due from rank 0"),  # above the root
        ("in", node(4, 0, 9), "not due from rank 0"),  # no such shard
        ("out", node(4, 0, 0), "not due from rank 2"),  # a shard of rank 0's
        ("in", node(5, 0, 0), "TreeNode block=5 of rank 0"),  # no such block
        ("in", average(6), "Average block=6 of rank 0"),
        ("in", average(4), "Average block=4: not due from rank 0"),  # a block of mine
        ("in", average(2), "Average block=2: not due from rank 0"),  # a block of rank 2's
    ],
)
def test_what_is_not_due_ends_the_link(peer: str, said: Message, complaint_: str) -> None:
    """A message that is not due ends the link and the round."""
    (closed, told, *rest) = linked().receive_from(peer, said, 0.0)
    assert isinstance(closed, do.Close)
    assert complaint_ in closed.reason
    assert told == complaint(0 if peer == "in" else 2, closed.reason)
    assert rest == []


@pytest.mark.parametrize("said", [node(4, 0, 0), average(3)])
def test_nothing_is_due_twice(said: Message) -> None:
    """A second copy of a node or an average is refused."""
    machine = linked()
    assert machine.receive_from("in", said, 0.0) != []
    assert isinstance(machine.receive_from("in", said, 0.0)[0], do.Close)


EXCHANGED = (TreeNode, Average, Heartbeat)


@pytest.mark.parametrize("kind", [one for one in MESSAGES.values() if one not in EXCHANGED])
def test_workers_say_nothing_else_to_each_other(kind: type[Message]) -> None:
    """The coordinator's messages are illegal between workers."""
    (closed, *_) = linked().receive_from("in", SAMPLES[kind][0], 0.0)
    assert closed == do.Close("in", f"{kind.__name__} from another worker")


ILLEGAL = [
    (phase, kind)
    for phase in (WorkerPhase.READY, WorkerPhase.COMPUTING, WorkerPhase.STAGED)
    for kind in MESSAGES.values()
    if kind not in MESH_WORKER_MAY_HEAR[phase]
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_ends_the_stay(phase: WorkerPhase, kind: type[Message]) -> None:
    """An illegal message of the coordinator ends all links, too."""
    machine = linked()
    machine.phase = phase
    effects = machine.receive(SAMPLES[kind][0], 0.0)
    reason = f"{kind.__name__} to a worker that is {phase}"
    over = [do.Close(peer, "this worker left its group") for peer in ("in", "out")]
    assert effects == [do.Send(PEER, Leave(reason=reason)), do.Close(PEER, reason), *over]
    assert machine.receive_from("in", Heartbeat(), 0.0) == []


# --- links ------------------------------------------------------------------------------------


def test_a_link_that_is_lost_is_complained_of() -> None:
    """A failed dial is, too; a stranger's link isn't, and none is twice."""
    machine = linked()
    assert machine.lost_link("in", "cut") == [do.Close("in", "cut"), complaint(0, "cut")]
    assert machine.lost_link("in", "cut") == []
    assert machine.undialable(TO_2, "refused") == [complaint(2, "refused")]
    assert machine.undialable(Dial(2, "elsewhere:2"), "refused") == []
    machine.links.accepted("stranger", NONCE, 0.0)
    effects = machine.receive_from("stranger", Heartbeat(), 0.0)
    assert [type(one) for one in effects] == [do.Close]


def test_who_connects_again_is_complained_of() -> None:
    """Messages that it got over the old link may be lost."""
    machine = linked()
    machine.links.accepted("in 2", NONCE, 0.0)
    effects = machine.receive_from("in 2", hello_of(0), 0.0)
    assert effects[0] == do.Close("in", AGAIN)
    assert effects[-1] == complaint(0, AGAIN)


def test_a_silent_worker_is_complained_of() -> None:
    """After `dead_after_s` without a frame of any message."""
    machine = linked()
    machine.heard(20.0)
    machine.links.heard("in", 20.0)
    reason = "silent for 30.0 s"
    assert do.Close("out", reason) not in machine.tick(29.9)
    assert machine.tick(30.0)[-2:] == [do.Close("out", reason), complaint(2, reason)]


def test_there_is_nobody_to_complain_to_between_stays() -> None:
    """While it is disconnected it ignores links that break."""
    machine = linked()
    over = [do.Close(peer, "this worker left its group") for peer in ("in", "out")]
    assert machine.lost("cut") == [do.Close(PEER, "cut"), *over]
    assert machine.lost_link("in", "cut") == []
    assert machine.undialable(TO_2, "refused") == []
