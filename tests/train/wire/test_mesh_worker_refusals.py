"""The machine of a mesh worker: what ends a link, and which complaints follow."""

from __future__ import annotations

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Dial
from entrenar_py.train.wire.mesh_worker import AGAIN
from entrenar_py.train.wire.messages import (
    MESSAGES,
    Average,
    Heartbeat,
    Leave,
    Message,
    TreeNode,
)
from entrenar_py.train.wire.phases import MESH_WORKER_MAY_HEAR, WorkerPhase
from tests.train.wire.mesh_situations import (
    NONCE,
    PEER,
    TO_2,
    average,
    complaint,
    hello_of,
    linked,
    node,
)
from tests.train.wire.samples import SAMPLES

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
