"""A worker of a mesh, bare: rounds, what waits for them, whose blocks are whose, complaints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.protocol import effects as do
from entrenar_py.protocol import handshake
from entrenar_py.protocol.effects import Dial, Effect
from entrenar_py.protocol.links import AGAIN
from entrenar_py.protocol.mesh_worker import MeshWorker
from entrenar_py.protocol.messages import (
    MESSAGES,
    VERSION,
    Accept,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Fetch,
    Group,
    Halt,
    Heartbeat,
    Hello,
    Message,
    NonFinite,
    Overflow,
    Staged,
    State,
    TreeNode,
    Unreachable,
    Welcome,
)
from entrenar_py.protocol.phases import MESH_WORKER_MAY_HEAR, WorkerPhase
from tests.protocol.samples import SAMPLES
from tests.protocol.star import SECRET, TERMS, TIMING

PEER, NONCE = "coordinator", "0" * 32
CHALLENGE = Challenge(version=VERSION, nonce=NONCE)
# Worker 1 of three, which averages blocks 1 and 4 of 5; shards 0 to 3 are with 0, 1, 1 and 2.
GROUP = Group(
    step=5, round=1, holders=(0, 1, 1, 2), ranks=(0, 1, 2), addresses=("a:0", "b:1", "c:2")
)
TO_2 = Dial(2, "c:2")
NEXT = replace(GROUP, round=2)


def node(block: int, level: int, index: int, *, round_: int = 1, step: int = 5) -> TreeNode:
    """A node of a tree over four shards."""
    return TreeNode(
        step=step, round=round_, block=block, level=level, index=index, loss=1.0, weight=1.0
    )


def average(block: int, *, round_: int = 1, step: int = 5) -> Average:
    """A block of the average."""
    return Average(step=step, round=round_, block=block, loss=1.0, weight=4.0)


def hello_of(rank: int) -> Hello:
    """What another worker says to CHALLENGE, with its proof."""
    hello = Hello(
        version=VERSION,
        run=TERMS.run,
        manifest=TERMS.manifest,
        data=TERMS.data,
        backend="cpu",
        rank=rank,
        port=None,
        nonce=NONCE,
        proof="",
    )
    return replace(hello, proof=handshake.proof_of_worker(SECRET, CHALLENGE, hello))


def entered() -> MeshWorker:
    """Worker 1, with the state before step 5, of a vector in five blocks."""
    machine = MeshWorker(TERMS, secret=SECRET, backend="cpu", port=1, timing=TIMING)
    machine.connected(PEER, NONCE, 0.0)
    (sent, _) = machine.receive(CHALLENGE, 0.0)
    assert isinstance(sent, do.Send)
    assert isinstance(sent.message, Hello)
    assert sent.message.port == 1
    proof = handshake.proof_of_coordinator(SECRET, CHALLENGE, sent.message)
    machine.receive(Welcome(rank=1, step=5, blocks=5, resumed=False, proof=proof), 0.0)
    return machine


def linked() -> MeshWorker:
    """The same in round 1, linked with worker 0, by "in", and with worker 2, by "out"."""
    machine = entered()
    machine.receive(GROUP, 0.0)
    machine.accepted("in", NONCE, 0.0)
    machine.receive_from("in", hello_of(0), 0.0)
    machine.dialed("out", TO_2, NONCE, 0.0)
    (sent, _) = machine.receive_from("out", CHALLENGE, 0.0)
    assert isinstance(sent, do.Send)
    assert isinstance(sent.message, Hello)
    proof = handshake.proof_of_coordinator(SECRET, CHALLENGE, sent.message)
    machine.receive_from("out", Accept(proof=proof), 0.0)
    assert [machine.links.rank_of(peer) for peer in ("in", "out")] == [0, 2]
    return machine


def computes(machine: MeshWorker) -> list[Effect]:
    """What follows when it has computed shards 1 and 2, which are no node together."""
    (asked,) = machine.receive(Assign(step=5, shards=(1, 2)), 0.0)
    assert isinstance(asked, do.Compute)
    return machine.computed(asked, OWN)


OWN = [node(block, 0, index, round_=0) for block in (4, 3, 2, 1, 0) for index in (1, 2)]


def complaint(rank: int, reason: str, *, round_: int = 1) -> do.Send:
    """What the coordinator is told of a worker that can't be reached."""
    return do.Send(PEER, Unreachable(round=round_, rank=rank, reason=reason))


# --- a step -----------------------------------------------------------------------------------


def test_a_group_begins_a_round() -> None:
    """From nothing: what came is void, who is of higher rank is dialed, what waited is told."""
    machine = entered()
    assert machine.receive(GROUP, 0.0) == [TO_2, do.Regroup(), do.Again()]


def test_every_block_goes_to_its_owner() -> None:
    """In the order of the blocks; one's own are counted here."""
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
    """Own blocks are averaged when all shards are there, and told; then come the others."""
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
    assert begun == [do.Regroup(), do.Again()]


def test_the_next_steps_are_of_the_same_round() -> None:
    """Everyone has its run of the shards then: the first of them is the largest."""
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
    (kept,) = machine.receive_from("in", node(4, 1, 0, step=6), 0.0)
    assert isinstance(kept, do.Keep)
    refused = machine.receive_from("out", node(4, 0, 2, step=6), 0.0)
    assert refused[0] == do.Close("out", "TreeNode block=4 level=0 index=2: not due from rank 2")


def test_an_average_that_is_not_finite_is_told() -> None:
    """To the coordinator, which halts everyone: this one, too."""
    machine = linked()
    assert machine.overflowed(5, 4) == [do.Send(PEER, Overflow(step=5, block=4))]
    effects = machine.receive(Halt(step=5, reason="overflow"), 0.0)
    over = [do.Close(peer, "the stay is over") for peer in ("in", "out")]
    assert effects == [*over, do.Close(PEER, "overflow"), do.Finish("halted", "overflow")]


def test_a_shard_that_is_not_finite_goes_to_nobody_else() -> None:
    """The coordinator hears of it, and no worker gets a node."""
    machine = linked()
    (asked,) = machine.receive(Assign(step=5, shards=(1, 2)), 0.0)
    assert isinstance(asked, do.Compute)
    bad = NonFinite(step=5, shard=1, tensor="w", element=0, loss=1.0, ids=(3,))
    assert machine.computed(asked, bad) == [do.Send(PEER, bad)]


def test_the_state_is_given_when_it_is_asked_for() -> None:
    """Between two steps, and only that before the step it stands at."""
    machine = linked()
    assert machine.receive(Fetch(step=5), 0.0) == [do.Send(PEER, State(step=5))]
    (closed, *_) = machine.receive(Fetch(step=4), 0.0)
    assert closed == do.Close(PEER, "step=4: this worker is at step 5")


# --- rounds -----------------------------------------------------------------------------------


def test_another_round_begins_from_nothing() -> None:
    """What was computed here is sent again; what had come of others has to come again."""
    machine = linked()
    computes(machine)
    for block in (3, 0):
        machine.receive_from("in", average(block), 0.0)
    machine.receive_from("in", node(4, 0, 0), 0.0)
    effects = machine.receive(NEXT, 0.0)
    assert (effects[0], effects[-1]) == (do.Regroup(), do.Again())
    again = [one.message for one in effects if isinstance(one, do.Send)]
    again += [one.node for one in effects if isinstance(one, do.Contribute)]
    assert {(one.block, one.index, one.round) for one in again if isinstance(one, TreeNode)} == {
        (block, index, 2) for block in range(5) for index in (1, 2)
    }
    assert machine.receive_from("in", average(3, round_=2), 0.0) == [do.Hold(5, 3)]
    assert machine.receive_from("in", node(4, 0, 0, round_=2), 0.0) != []


def test_what_was_staged_is_not_any_more() -> None:
    """Whoever holds every block of a round that is over has to hold them again."""
    machine = linked()
    machine.phase = WorkerPhase.STAGED
    machine.receive(NEXT, 0.0)
    assert machine.phase is WorkerPhase.READY


@pytest.mark.parametrize("said", [node(4, 0, 0), average(3)])
def test_what_is_of_a_round_that_is_over_is_void(said: Message) -> None:
    """It was on its way when the round ended: that is nobody's fault."""
    machine = linked()
    machine.receive(NEXT, 0.0)
    assert machine.receive_from("in", said, 0.0) == []


@pytest.mark.parametrize(
    "said", [node(4, 0, 0, step=4), average(3, step=4), node(4, 0, 0, step=4, round_=0)]
)
def test_what_is_of_a_step_that_is_over_ends_the_link(said: Message) -> None:
    """Nobody would have made that step without it: who says it now withholds what is due."""
    machine = linked()
    reason = "step=4: this worker is at step 5"
    assert machine.receive_from("in", said, 0.0) == [do.Close("in", reason), complaint(0, reason)]


@pytest.mark.parametrize(
    "said", [node(4, 0, 0, round_=2), node(4, 1, 0, step=6), average(3, step=6)]
)
def test_what_is_early_waits(said: Message) -> None:
    """For the round, or for the step, that it is of."""
    assert linked().receive_from("in", said, 0.0) == [do.Postpone("in")]


def test_all_waits_where_there_is_no_round() -> None:
    """Others may have heard of it sooner."""
    machine = entered()
    machine.accepted("in", NONCE, 0.0)
    machine.receive_from("in", hello_of(0), 0.0)
    assert machine.receive_from("in", node(4, 0, 0), 0.0) == [do.Postpone("in")]


def test_no_more_waits_than_a_round_can_have() -> None:
    """Whoever sends without end is left: what waits is memory."""
    machine, early = linked(), node(4, 0, 0, round_=2)
    for _ in range(5 * 5):
        assert machine.receive_from("in", early, 0.0) == [do.Postpone("in")]
    (closed, *_) = machine.receive_from("in", early, 0.0)
    assert closed == do.Close("in", "more of a round to come than a round can have")


@pytest.mark.parametrize(
    "group",
    [
        replace(GROUP, ranks=(0, 2), addresses=("a:0", "c:2")),
        replace(GROUP, addresses=("a:0", "b:1")),
        replace(GROUP, ranks=(), addresses=()),
    ],
)
def test_a_group_without_me_makes_no_sense(group: Group) -> None:
    """Nor one whose ranks have not each their address: the coordinator is left."""
    machine = linked()
    (closed, *_) = machine.receive(group, 0.0)
    reason = f"Group ranks={group.ranks}: without me, or their addresses"
    assert closed == do.Close(PEER, reason)


def test_a_group_of_another_step_makes_no_sense() -> None:
    """A round begins in the step in work."""
    (closed, *_) = linked().receive(replace(GROUP, step=6), 0.0)
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
    """And the round: whoever said it has not said what is due."""
    (closed, told, *rest) = linked().receive_from(peer, said, 0.0)
    assert isinstance(closed, do.Close)
    assert complaint_ in closed.reason
    assert told == complaint(0 if peer == "in" else 2, closed.reason)
    assert rest == []


@pytest.mark.parametrize("said", [node(4, 0, 0), average(3)])
def test_nothing_is_due_twice(said: Message) -> None:
    """A node or an average that came counts once."""
    machine = linked()
    assert machine.receive_from("in", said, 0.0) != []
    assert isinstance(machine.receive_from("in", said, 0.0)[0], do.Close)


EXCHANGED = (TreeNode, Average, Heartbeat)


@pytest.mark.parametrize("kind", [one for one in MESSAGES.values() if one not in EXCHANGED])
def test_workers_say_nothing_else_to_each_other(kind: type[Message]) -> None:
    """What the coordinator may say another worker may not."""
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
    """And with it all links: whoever comes back is told of everyone anew."""
    machine = linked()
    machine.phase = phase
    effects = machine.receive(SAMPLES[kind][0], 0.0)
    reason = f"{kind.__name__} to a worker that is {phase}"
    over = [do.Close(peer, "the stay is over") for peer in ("in", "out")]
    assert effects == [do.Close(PEER, reason), *over]
    assert machine.receive_from("in", Heartbeat(), 0.0) == []


# --- links ------------------------------------------------------------------------------------


def test_a_link_that_is_lost_is_complained_of() -> None:
    """So is one that can't be made; not that of a stranger, nor twice."""
    machine = linked()
    assert machine.lost_link("in", "cut") == [do.Close("in", "cut"), complaint(0, "cut")]
    assert machine.lost_link("in", "cut") == []
    assert machine.undialable(TO_2, "refused") == [complaint(2, "refused")]
    assert machine.undialable(Dial(2, "elsewhere:2"), "refused") == []
    machine.accepted("stranger", NONCE, 0.0)
    effects = machine.receive_from("stranger", Heartbeat(), 0.0)
    assert [type(one) for one in effects] == [do.Close]


def test_who_connects_again_is_complained_of() -> None:
    """What it had been told over the old link may be lost."""
    machine = linked()
    machine.accepted("in 2", NONCE, 0.0)
    effects = machine.receive_from("in 2", hello_of(0), 0.0)
    assert effects[0] == do.Close("in", AGAIN)
    assert effects[-1] == complaint(0, AGAIN)


def test_a_silent_worker_is_complained_of() -> None:
    """After `dead_after_s`; frames keep it alive, whatever they are part of."""
    machine = linked()
    machine.heard(20.0)
    machine.heard_from("in", 20.0)
    reason = "silent for 30.0 s"
    assert do.Close("out", reason) not in machine.tick(29.9)
    assert machine.tick(30.0)[-2:] == [do.Close("out", reason), complaint(2, reason)]


def test_there_is_nobody_to_complain_to_between_stays() -> None:
    """Links that break while it is away are of no round."""
    machine = linked()
    over = [do.Close(peer, "the stay is over") for peer in ("in", "out")]
    assert machine.lost("cut") == [do.Close(PEER, "cut"), *over]
    assert machine.lost_link("in", "cut") == []
    assert machine.undialable(TO_2, "refused") == []
