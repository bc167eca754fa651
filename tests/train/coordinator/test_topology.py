"""The exchanges of a mesh's worker: it averages its own blocks, and hands on what it holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.coordinator.topology import TreeExchange
from entrenar_py.train.wire.messages import Average, NonFinite, Partial, State, TreeNode
from tests.systems import by_hand, stars

SCENARIO = stars.in_blocks(stars.MESH_SIMULATED, 160, world_size=2)  # four blocks
IN_RING = SCENARIO.with_(system="ring_simulated")


def members() -> tuple[Server, Member, Member]:
    """Return a server, and two workers with the initial state."""
    server, both = Server(SCENARIO), (Member(SCENARIO), Member(SCENARIO))
    for rank, member in enumerate(both):
        welcome = by_hand.welcome_of(server, rank, 0)
        member.load(welcome, bytearray(server.payload(welcome)))
    return server, *both


def tree_of(member: Member) -> TreeExchange:
    """Return the exchange of a mesh's worker."""
    assert isinstance(member.exchange, TreeExchange)
    return member.exchange


def computed(member: Member, *shards: int) -> list[TreeNode]:
    """Return the blocks of the nodes of `shards` in step 0."""
    outcome = member.work(0, shards)
    assert not isinstance(outcome, NonFinite)
    return outcome


def exchange(one: Member, other: Member, block: int) -> tuple[float, float] | None:
    """Have both compute their shards, and `one` receive all of `block` and average it."""
    half = SCENARIO.num_shards // 2
    for node in computed(one, *range(half)):
        if node.block == block:
            tree_of(one).contribute(node)
    for node in computed(other, *range(half, SCENARIO.num_shards)):
        if node.block == block:
            payload = one.room(node, len(bytes(other.payload(node))))
            payload[:] = other.payload(node)
            one.require(node, payload)
            tree_of(one).keep(other.rank, node, payload)
    one.exchange.complete(block)
    return one.exchange.reduce(block)


def average(block: int) -> Average:
    """Return the message of an averaged block."""
    return Average(step=0, round=1, block=block, loss=1.0, weight=1.0)


def test_an_own_block_has_the_bits_of_the_star_s() -> None:
    """A block has the star's bits, whichever worker owns it, and whichever computed what."""
    star = by_hand.met(SCENARIO.with_(system="parameter_server_simulated"))
    for rank, shards in by_hand.shards_of(star).items():
        by_hand.deliver(star, rank, 0, shards)
    for block in range(4):
        _, one, other = members()
        for owner, helper in ((one, other), (other, one)):
            owner.regroup(1)
            assert exchange(owner, helper, block) is not None
            reduced = owner.payload(average(block))
            if owner is one:
                star.server.reduce(block)
            assert bytes(reduced) == bytes(star.server.payload(average(block)))


def test_another_round_begins_from_nothing() -> None:
    """Received blocks are dropped and own nodes added again, with the same bits as a result."""
    _, one, other = members()
    exchange(one, other, 2)
    before = bytes(one.payload(average(2)))
    tree_of(one).contribute(computed(one, 0)[0])
    one.regroup(2)
    assert exchange(one, other, 2) is not None
    assert bytes(one.payload(average(2))) == before


@pytest.mark.parametrize("scenario", [SCENARIO, IN_RING])
@pytest.mark.parametrize("early", [False, True])
def test_what_is_void_is_written_elsewhere(scenario: Scenario, early: bool) -> None:
    """The rest of a block from an ended round does not overwrite the block of the new round.

    This holds even if the new block is complete before the worker has heard of its round.
    """
    server, _, _ = members()
    one, block, right = Member(scenario), 2, np.arange(38, dtype=np.float32).tobytes()
    welcome = by_hand.welcome_of(server, 0, 0)
    one.load(welcome, bytearray(server.payload(welcome)))
    one.regroup(1)
    new = replace(average(block), round=2)
    old = one.room(average(block), len(right))
    if not early:
        one.regroup(2)
    room = one.room(new, len(right))
    room[:] = right
    if early:
        old[:] = bytes(len(right))
        one.hold(average(block), old)
        one.regroup(2)
    one.hold(new, room)
    old[:] = bytes(len(right))
    assert bytes(one.payload(new)) == right


def test_a_round_s_blocks_come_where_they_stay() -> None:
    """Blocks are received in their final place in each step and round, without a copy."""
    _, one, _ = members()
    for number in (1, 1, 2):
        one.regroup(number)
        said = replace(average(1), round=number)
        room = one.room(said, 152)
        one.hold(said, room)
        assert np.shares_memory(room, np.frombuffer(one.payload(said), np.uint8))


def test_nobody_writes_over_an_own_block() -> None:
    """A block that claims to be an own block's average goes to other memory before its check."""
    _, one, other = members()
    exchange(one, other, 2)
    before = bytes(one.payload(average(2)))
    room = one.room(average(2), len(before))
    room[:] = bytes(len(before))
    assert bytes(one.payload(average(2))) == before


def test_a_block_that_overflows_is_no_average() -> None:
    """Finite nodes whose sum overflows give no average."""
    _, one, _ = members()
    for index in range(SCENARIO.num_shards):
        vector = np.full(38, 0.0 if index else 3e38, np.float32)
        node = TreeNode(step=0, round=1, block=3, level=0, index=index, loss=1.0, weight=0.1)
        tree_of(one).keep(1, node, bytearray(vector.tobytes()))
    assert one.exchange.reduce(3) is None


def test_the_state_that_it_hands_on_is_the_server_s() -> None:
    """The state that a worker hands on equals the server's bit by bit, moments included."""
    server, one, _ = members()
    welcome = by_hand.welcome_of(server, 0, 0)
    assert bytes(one.payload(State(step=0))) == bytes(server.payload(welcome))


@pytest.mark.parametrize(
    "right",
    [
        TreeNode(step=0, round=1, block=0, level=0, index=0, loss=1.0, weight=16.0),
        Partial(step=0, round=1, block=0, hops=0, loss=1.0, weight=16.0),
    ],
)
@pytest.mark.parametrize(
    ("loss", "weight"),
    [(1.0, -4.0), (1.0, 17.0), (1.0, float("nan")), (float("nan"), 4.0), (float("inf"), 4.0)],
)
def test_a_sum_weighs_what_a_batch_can(
    right: TreeNode | Partial, loss: float, weight: float
) -> None:
    """A sum with an impossible weight is refused, as in a star."""
    member = Member(IN_RING)
    payload = bytes(member.replicas.vector_bytes)  # one block, before a welcome with their number
    member.require(right, payload)
    member.require(replace(right, weight=0.0), payload)
    with pytest.raises(ProtocolError, match="use 0 to 16, and a finite loss"):
        member.require(replace(right, loss=loss, weight=weight), payload)


@pytest.mark.parametrize(("block", "num_bytes"), [(0, 148), (3, 0), (3, 152 + 4), (4, 152)])
def test_a_node_has_the_size_of_its_block(block: int, num_bytes: int) -> None:
    """Blocks have 37 and 38 elements; other lengths and block numbers are refused."""
    _, one, _ = members()
    node = TreeNode(step=0, round=1, block=block, level=0, index=0, loss=1.0, weight=1.0)
    if num_bytes == 148:
        one.require(node, bytes(num_bytes))
        return
    with pytest.raises(ProtocolError, match=f"TreeNode with a payload of {num_bytes} bytes"):
        one.require(node, bytes(num_bytes))
