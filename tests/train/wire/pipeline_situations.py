"""Pipelines in the state in which a test begins: two stages, of which the last may have two places.

Blocks 0 and 1 belong to the first stage, 2 and 3 to the last one. There are two shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    VERSION,
    Accept,
    Challenge,
    Group,
    Hello,
    Loaded,
    Message,
    Staged,
    Summed,
    TreeNode,
    Welcome,
)
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.pipeline_peers import PipelineCoordinator, PipelineWorker
from entrenar_py.train.wire.terms import Run
from tests.train.wire.mesh_situations import CHALLENGE, NONCE, PEER, hello_of
from tests.train.wire.star import SECRET, TERMS, TIMING

BLOCKS = (range(2), range(2, 4))
TWO = Places(((0,), (1,)), BLOCKS)
THREE = Places(((0,), (1, 2)), BLOCKS)


def run_of(places: Places, **changes: Any) -> Run:
    """Return a run of two steps."""
    usual: dict[str, Any] = {
        "world_size": places.num_ranks,
        "num_awaited": places.num_ranks,
        "num_shards": 2,
        "num_steps": 2,
        "num_blocks": 4,
        "server_updates": True,
    }
    return Run(terms=TERMS, places=places, **{**usual, **changes})


def node(block: int, *, level: int = 1, index: int = 0, **about: int) -> TreeNode:
    """Return a node, by default the root of both shards in step 0, round 1."""
    told = {"step": 0, "round": 1, **about}
    return TreeNode(**told, block=block, level=level, index=index, loss=1.0, weight=2.0)


def summed(*shards: int, **about: Any) -> Summed:
    """Return the announcement of nodes, by default of both shards in step 0, round 1."""
    return Summed(**{"step": 0, "round": 1, **about}, shards=shards or (0, 1))


def staged(**about: int) -> Staged:
    """Return the report that all weights are held, by default those of step 0, round 1."""
    return Staged(**{"step": 0, "round": 1, **about})


def sent(effects: Sequence[Effect], kind: type[Message]) -> list[Any]:
    """Return the messages of that kind."""
    messages = [one.message for one in effects if isinstance(one, do.Send)]
    return [one for one in messages if isinstance(one, kind)]


def closed(effects: Sequence[Effect]) -> dict[Any, str]:
    """Return the connections that are closed, and why."""
    return {one.peer: one.reason for one in effects if isinstance(one, do.Close)}


@dataclass
class Bench:
    """A coordinator, whose peers are called by numbers; its own work is done at once."""

    places: Places = TWO
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = run_of(self.places, **self.changes)
        self.machine = PipelineCoordinator(run, secret=SECRET, timing=TIMING, now=0.0)
        self.num_peers = 0

    def hello(
        self, rank: int | None, *, backend: str = "cpu", secret: bytes = SECRET
    ) -> tuple[int, list[Effect]]:
        """Connect a worker that says hello; return its peer, and the effects."""
        peer = self.num_peers
        self.num_peers += 1
        self.machine.connected(peer, NONCE, 0.0, "host")
        greeting = terms.greet(
            *(Challenge(version=VERSION, nonce=NONCE), TERMS),
            secret=secret,
            backend=backend,
            nonce=NONCE,
            rank=rank,
            port=9,
        )
        return peer, self.say(peer, greeting.hello)

    def join(self, rank: int | None) -> tuple[int, list[Effect]]:
        """Add a worker that has loaded its stage; return its peer, and the last effects."""
        peer, effects = self.hello(rank)
        (welcome,) = sent(effects, Welcome)
        return peer, self.say(peer, Loaded(step=welcome.step))

    def say(self, peer: int, *messages: Message) -> list[Effect]:
        """Return the effects of a worker's messages, and of the work that these ask for."""
        effects: list[Effect] = []
        for message in messages:
            waiting = deque(self.machine.receive(peer, message, 0.0))
            while waiting:
                effect = waiting.popleft()
                effects.append(effect)
                match effect:
                    case do.Reduce(step, block):
                        waiting += self.machine.reduced(step, block, 1.0, 2.0, 0.0)
                    case do.Prepare(step):
                        waiting += self.machine.prepared(step, 1.0, 2.0, 0.0)
        return effects

    def deliver(self, peer: int, *shards: int, **about: int) -> list[Effect]:
        """Let a worker deliver `shards` of its stage, by default both."""
        rank = self.machine.peers[peer].in_rank()
        blocks = reversed(self.places.blocks[self.places.stage_of(rank)])
        level, index = (0, shards[0]) if len(shards) == 1 else (1, 0)
        nodes = [node(block, level=level, index=index, **about) for block in blocks]
        return self.say(peer, summed(*shards, **about), *nodes)

    def phases(self) -> list[str]:
        """Return the phases of all peers."""
        return [str(member.phase) for member in self.machine.peers.values()]


def computing(places: Places = TWO) -> Bench:
    """Return a coordinator that has handed out the first step; peers are called by ranks."""
    bench = Bench(places)
    for rank in range(places.num_ranks):
        bench.join(rank)
    return bench


def staging(places: Places = TWO) -> Bench:
    """Return one that has sent the new weights."""
    bench = computing(places)
    bench.deliver(0)
    if places is TWO:
        bench.deliver(1)
    else:
        bench.deliver(1, 0)
        bench.deliver(2, 1)
    return bench


def applying() -> Bench:
    """Return one that has told two workers to make the first step."""
    bench = staging()
    bench.say(0, staged())
    bench.say(1, staged())
    return bench


# --- a worker ---------------------------------------------------------------------------------

# Three stages of a worker each; this one has the middle, rank 1. There are two shards.
MIDDLE = Places(((0,), (1,), (2,)), (range(2), range(2, 4), range(4, 6)))
GROUP = Group(
    step=5,
    round=1,
    holders=(0, 0, 1, 1, 2, 2),
    ranks=(0, 1, 2),
    addresses=("a:0", "b:1", "c:2"),
)
TO_2 = do.Dial(2, "c:2")


def welcomed(places: Places = MIDDLE, rank: int = 1) -> tuple[PipelineWorker, do.Load]:
    """Return a worker that is told to load the state before step 5."""
    machine = PipelineWorker(
        TERMS, places=places, secret=SECRET, backend="cpu", port=1, timing=TIMING
    )
    machine.connected(PEER, NONCE, 0.0)
    (hello, _) = machine.receive(CHALLENGE, 0.0)
    assert isinstance(hello, do.Send)
    assert isinstance(hello.message, Hello)
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, hello.message)
    welcome = Welcome(rank=rank, step=5, blocks=6, resumed=False, proof=proof)
    (load,) = machine.receive(welcome, 0.0)
    assert isinstance(load, do.Load)
    return machine, load


def entered(places: Places = MIDDLE, rank: int = 1) -> PipelineWorker:
    """Return a worker that has loaded the state before step 5."""
    machine, load = welcomed(places, rank)
    assert machine.loaded(load) == [do.Send(PEER, Loaded(step=5))]
    return machine


def linked() -> PipelineWorker:
    """Return the middle worker in round 1, linked with rank 0 as "in" and with 2 as "out"."""
    machine = entered()
    machine.receive(GROUP, 0.0)
    machine.links.accepted("in", NONCE, 0.0)
    machine.receive_from("in", hello_of(0), 0.0)
    machine.links.dialed("out", TO_2, NONCE, 0.0)
    (hello, _) = machine.receive_from("out", CHALLENGE, 0.0)
    assert isinstance(hello, do.Send)
    assert isinstance(hello.message, Hello)
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, hello.message)
    machine.receive_from("out", Accept(proof=proof), 0.0)
    return machine
