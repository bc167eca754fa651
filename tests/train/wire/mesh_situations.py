"""Workers of a mesh in the state in which a test begins."""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Dial, Effect
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import (
    VERSION,
    Accept,
    Assign,
    Average,
    Challenge,
    Group,
    Hello,
    TreeNode,
    Unreachable,
    Welcome,
)
from tests.train.wire.star import SECRET, TERMS, TIMING

PEER, NONCE = "coordinator", "0" * 32
CHALLENGE = Challenge(version=VERSION, nonce=NONCE)
# Worker 1 of three, which averages blocks 1 and 4 of 5; shards 0 to 3 are with 0, 1, 1 and 2.
GROUP = Group(
    step=5, round=1, holders=(0, 1, 1, 2), ranks=(0, 1, 2), addresses=("a:0", "b:1", "c:2")
)
TO_2 = Dial(2, "c:2")
NEXT = replace(GROUP, round=2)


def node(block: int, level: int, index: int, *, round_: int = 1, step: int = 5) -> TreeNode:
    """Return a node of a tree over four shards."""
    return TreeNode(
        step=step, round=round_, block=block, level=level, index=index, loss=1.0, weight=1.0
    )


def average(block: int, *, round_: int = 1, step: int = 5) -> Average:
    """Return a block of the average."""
    return Average(step=step, round=round_, block=block, loss=1.0, weight=4.0)


def hello_of(rank: int) -> Hello:
    """Return another worker's answer to CHALLENGE, with its proof."""
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
    return replace(hello, proof=terms.proof_of_worker(SECRET, CHALLENGE, hello))


def entered() -> MeshWorker:
    """Return worker 1 with the state before step 5, of a vector in five blocks."""
    machine = MeshWorker(TERMS, secret=SECRET, backend="cpu", port=1, timing=TIMING)
    machine.connected(PEER, NONCE, 0.0)
    (sent, _) = machine.receive(CHALLENGE, 0.0)
    assert isinstance(sent, do.Send)
    assert isinstance(sent.message, Hello)
    assert sent.message.port == 1
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, sent.message)
    machine.receive(Welcome(rank=1, step=5, blocks=5, resumed=False, proof=proof), 0.0)
    return machine


def linked() -> MeshWorker:
    """Return worker 1 in round 1, linked with worker 0 as "in" and with worker 2 as "out"."""
    machine = entered()
    machine.receive(GROUP, 0.0)
    machine.links.accepted("in", NONCE, 0.0)
    machine.receive_from("in", hello_of(0), 0.0)
    machine.links.dialed("out", TO_2, NONCE, 0.0)
    (sent, _) = machine.receive_from("out", CHALLENGE, 0.0)
    assert isinstance(sent, do.Send)
    assert isinstance(sent.message, Hello)
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, sent.message)
    machine.receive_from("out", Accept(proof=proof), 0.0)
    assert [machine.links.rank_of(peer) for peer in ("in", "out")] == [0, 2]
    return machine


def computes(machine: MeshWorker) -> list[Effect]:
    """Return the effects of computing shards 1 and 2, which have no node in common."""
    (asked,) = machine.receive(Assign(step=5, shards=(1, 2)), 0.0)
    assert isinstance(asked, do.Compute)
    return machine.computed(asked, OWN)


OWN = [node(block, 0, index, round_=0) for block in (4, 3, 2, 1, 0) for index in (1, 2)]


def complaint(rank: int, reason: str, *, round_: int = 1) -> do.Send:
    """Return the report to the coordinator of a worker that can't be reached."""
    return do.Send(PEER, Unreachable(round=round_, rank=rank, reason=reason))
