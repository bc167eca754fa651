"""A server and its members without machines: what each carries is handed over by the test."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.protocol.effects import Joined
from entrenar_py.protocol.messages import (
    Applied,
    Average,
    Computed,
    Loaded,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)
from entrenar_py.scenario import Scenario
from entrenar_py.systems.member import Member
from entrenar_py.systems.server import Server
from entrenar_py.training import sharding

PROOF = "0" * 64


@dataclass
class Hands:
    """A server, and its members by rank."""

    server: Server
    members: dict[int, Member]


def met(scenario: Scenario) -> Hands:
    """Everyone with the initial state."""
    hands = Hands(Server(scenario), {})
    for rank in range(scenario.world_size):
        join(hands, rank, step=0)
    return hands


def join(hands: Hands, rank: int, step: int) -> None:
    """Worker `rank` takes the server's state before `step`."""
    member = hands.members[rank] = Member(hands.server.scenario)
    welcome = Welcome(rank=rank, step=step, resumed=False, proof=PROOF)
    member.load(welcome, bytearray(hands.server.payload(welcome)))
    hands.server.joined(Joined(rank, step, late=step > 0))
    tell(hands, rank, Loaded(step=step))


def tell(hands: Hands, rank: int, message: Message) -> None:
    """The server takes what worker `rank` carries."""
    payload = bytearray(hands.members[rank].payload(message))
    hands.server.require(rank, message, payload)
    hands.server.keep(rank, message, payload)


def deliver(hands: Hands, rank: int, step: int, shards: tuple[int, ...]) -> None:
    """Worker `rank` computes `shards`, and the server has them."""
    outcome = hands.members[rank].work(step, shards)
    assert not isinstance(outcome, NonFinite)
    for node in outcome:
        tell(hands, rank, node)
    tell(hands, rank, Computed(step=step, shards=shards))


def shards_of(hands: Hands) -> dict[int, tuple[int, ...]]:
    """Which shards each member computes."""
    shards = range(hands.server.scenario.num_shards)
    return {rank: tuple(run) for rank, run in sharding.runs(shards, hands.members).items()}


def make(hands: Hands, step: int) -> None:
    """Everyone makes `step`, whose shards are all delivered."""
    reduced = hands.server.reduce()
    assert not isinstance(reduced, str)
    average = Average(step=step, loss=reduced[0], weight=reduced[1])
    for rank, member in hands.members.items():
        member.hold(average, bytearray(hands.server.payload(average)))
        member.make_held(step)
        if rank == min(hands.members):
            hands.server.apply_average(step)
        tell(hands, rank, Applied(step=step))
    hands.server.gather(step + 1)


def nodes(hands: Hands, rank: int, step: int, shards: tuple[int, ...]) -> list[TreeNode]:
    """What worker `rank` would send for `shards`."""
    outcome = hands.members[rank].work(step, shards)
    assert not isinstance(outcome, NonFinite)
    return outcome
