"""A server and its members without protocol machines: the test passes their messages on."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.compute import Stepping
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.effects import Joined
from entrenar_py.train.wire.messages import (
    Applied,
    Average,
    Computed,
    Loaded,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)

PROOF = "0" * 64


@dataclass
class Hands:
    """A server, and its members by rank."""

    server: Server
    members: dict[int, Member]


def met(scenario: Scenario, backend: Stepping | None = None) -> Hands:
    """Return a server and members on `backend` that all have the initial state."""
    hands = Hands(Server(scenario), {})
    for rank in range(scenario.world_size):
        join(hands, rank, step=0, backend=backend)
    return hands


def join(hands: Hands, rank: int, step: int, backend: Stepping | None = None) -> None:
    """Have worker `rank` take the server's state before `step`."""
    plan = hands.server.plan
    faults = plan.faults if isinstance(plan, Scenario) else ()
    backend_of = None if backend is None else lambda _: backend
    member = hands.members[rank] = Member(plan, backend_of, faults=faults)
    welcome = welcome_of(hands.server, rank, step)
    member.load(welcome, bytearray(hands.server.payload(welcome)))
    hands.server.joined(Joined(rank, step, late=step > 0))
    tell(hands, rank, Loaded(step=step))


def welcome_of(server: Server, rank: int, step: int, *, resumed: bool = False) -> Welcome:
    """Return the welcome that the coordinator would send to worker `rank` before `step`."""
    blocks = server.reduction.blocks.count
    return Welcome(rank=rank, step=step, blocks=blocks, resumed=resumed, proof=PROOF)


def average_of(step: int, block: int, loss: float = 1.0, weight: float = 1.0) -> Average:
    """Return the message that the coordinator would send for an averaged block."""
    return Average(step=step, round=0, block=block, loss=loss, weight=weight)


def tell(hands: Hands, rank: int, message: Message) -> None:
    """Have the server take the payload of worker `rank`'s message."""
    payload = bytearray(hands.members[rank].payload(message))
    hands.server.require(rank, message, payload)
    hands.server.keep(rank, message, payload)


def begin(hands: Hands, rank: int, step: int, shards: tuple[int, ...]) -> list[TreeNode]:
    """Have worker `rank` compute and report `shards`; return the blocks that it must send."""
    outcome = hands.members[rank].work(step, shards)
    assert not isinstance(outcome, NonFinite)
    tell(hands, rank, Computed(step=step, shards=shards))
    return outcome


def deliver(hands: Hands, rank: int, step: int, shards: tuple[int, ...]) -> None:
    """Have worker `rank` compute `shards` and deliver them to the server."""
    for node in begin(hands, rank, step, shards):
        tell(hands, rank, node)
    hands.server.deliver(rank)


def shards_of(hands: Hands) -> dict[int, tuple[int, ...]]:
    """Return the shards that each member computes."""
    shards = range(hands.server.plan.num_shards)
    return {rank: tuple(run) for rank, run in sharding.runs(shards, hands.members).items()}


def make(hands: Hands, step: int) -> None:
    """Have all members make `step`, whose shards are all delivered."""
    for block in hands.server.reduction.blocks.order():
        average(hands, step, block)
    commit(hands, step)


def average(hands: Hands, step: int, block: int) -> None:
    """Have the server average `block`, and all members hold the average."""
    reduced = hands.server.reduce(block)
    assert not isinstance(reduced, str), reduced
    said = average_of(step, block, *reduced)
    for member in hands.members.values():
        payload = bytearray(hands.server.payload(said))
        member.require(said, payload)
        member.hold(said, payload)


def commit(hands: Hands, step: int) -> None:
    """Have all members make `step`, of which they hold all blocks."""
    for rank, member in hands.members.items():
        member.make_held(step)
        if rank == min(hands.members):
            hands.server.apply_average(step)
        tell(hands, rank, Applied(step=step))
    hands.server.gather(step + 1)
