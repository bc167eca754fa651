"""The work of a worker: it keeps what it receives, and sends each result once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.faults import Fault
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Average,
    Commit,
    Computed,
    Heartbeat,
    Loaded,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)
from tests.systems import by_hand, stars


def _alone(**changes: object) -> Member:
    hands = by_hand.met(stars.subject("parameter_server", world_size=1, **changes))
    return hands.members[0]


def _in_blocks(block_bytes: int) -> Member:
    return by_hand.met(stars.in_blocks("parameter_server", block_bytes, world_size=1)).members[0]


def _average(loss: float = 1.0, weight: float = 8.0) -> Average:
    """Return the whole gradient of a step, in one block."""
    return Average(step=0, round=0, block=0, loss=loss, weight=weight)


def _nodes(member: Member, *shards: int) -> list[tuple[TreeNode, np.ndarray[Any, Any]]]:
    """Return the nodes that `member` would send for `shards` of step 0."""
    outcome = member.work(0, shards)
    assert not isinstance(outcome, NonFinite)
    return [(node, np.frombuffer(member.payload(node), "<f4")) for node in outcome]


def test_its_nodes_are_the_tree_s() -> None:
    """The nodes are the fewest that cover the shards, each added in the tree's order."""
    member = _alone()
    together = _nodes(member, 2, 3, 4)
    assert [(node.level, node.index) for node, _ in together] == [(1, 1), (0, 4)]
    assert [vector.nbytes for _, vector in together] == [member.replicas.vector_bytes] * 2
    leaves = [_nodes(member, shard)[0] for shard in (2, 3)]
    total, loss = leaves[0][1] + leaves[1][1], leaves[0][0].loss + leaves[1][0].loss
    assert together[0][1].tobytes() == total.tobytes()
    assert together[0][0].loss == loss


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Assign(step=0, shards=(7, 8)), r"Assign shards=\(7, 8\): use each once, of 0 to 7"),
        (Assign(step=0, shards=(2, 2)), "use each once"),
        (_average(weight=0.0), r"Average weight=0\.0 loss=1\.0: use finite numbers"),
        (_average(weight=float("inf")), "a weight > 0"),
        (_average(loss=float("nan")), "loss=nan: use finite numbers"),
    ],
)
def test_what_is_of_no_such_run_is_refused(message: Message, complaint: str) -> None:
    """Unknown shards and impossible numbers are refused."""
    member = _alone()
    vector = bytes(member.replicas.vector_bytes)
    member.require(Assign(step=0, shards=(0, 7)), b"")
    member.require(_average(loss=-1.0), vector)
    with pytest.raises(ProtocolError, match=complaint):
        member.require(message, b"" if isinstance(message, Assign) else vector)


@pytest.mark.parametrize("block_bytes", [4, 12, 160, 2**20])
def test_its_blocks_are_the_vector(block_bytes: int) -> None:
    """All blocks, sent from the last to the first, are the whole vector."""
    shards = (2, 3, 4)
    whole = {(one.level, one.index): vector for one, vector in _nodes(_in_blocks(604), *shards)}
    sent = _nodes(_in_blocks(block_bytes), *shards)
    num_blocks = -(-604 // block_bytes)
    assert [node.block for node, _ in sent[::2]] == list(reversed(range(num_blocks)))
    for place, vector in whole.items():
        mine = [part for node, part in reversed(sent) if (node.level, node.index) == place]
        assert max(part.nbytes for part in mine) <= block_bytes
        assert np.concatenate(mine).tobytes() == vector.tobytes()


def test_a_vector_is_kept_until_its_step_is_made() -> None:
    """A step's nodes are freed when the step is made."""
    hands = by_hand.met(stars.subject("parameter_server", world_size=1, num_shards=1))
    (node,) = by_hand.begin(hands, 0, 0, (0,))
    by_hand.tell(hands, 0, node)
    hands.server.deliver(0)
    by_hand.make(hands, 0)
    with pytest.raises(KeyError):
        hands.members[0].payload(node)


def test_it_tells_what_happened_once() -> None:
    """Each event is sent with the first message that can carry it, and not again."""
    member = _alone()
    member.work(0, (0, 1))
    told = trace.load_events(bytes(member.payload(Computed(step=0, shards=(0, 1)))))
    assert [event.kind for event in told] == ["shard", "shard"]
    assert member.payload(Applied(step=0)) == b""
    assert member.payload(Heartbeat()) == b""


def test_the_first_shard_that_is_not_finite_is_all() -> None:
    """The first non-finite shard is reported with its place and samples, and no node is sent."""
    fault = Fault(kind="non_finite_gradient", step=0, shard=1, value="nan")
    member = _alone(faults=(fault,))
    said = member.work(0, (0, 1, 2))
    assert isinstance(said, NonFinite)
    first = next(iter(member.replicas.layout.trainable))
    assert (said.step, said.shard, said.tensor, said.element) == (0, 1, first, 0)
    told = trace.load_events(bytes(member.payload(said)))
    assert [event.kind for event in told] == ["shard", "injected", "shard"]
    assert isinstance(told[-1], trace.Shard)
    assert said.ids == told[-1].ids


def test_what_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes no further shard."""
    member = _alone()
    compute, computed = member.replicas.compute, []

    def one(*arguments: Any) -> reduction.Node:
        computed.append(arguments)
        member.give_up()
        return compute(*arguments)

    monkeypatch.setattr(member.replicas, "compute", one)
    member.work(0, tuple(range(8)))
    assert len(computed) == 1


def test_a_loss_that_is_not_finite_has_no_place() -> None:
    """If only the loss is not finite, no tensor is named."""
    fault = Fault(kind="non_finite_loss", step=0, shard=0, value="inf")
    said = _alone(faults=(fault,)).work(0, (0,))
    assert isinstance(said, NonFinite)
    assert (said.tensor, said.element, said.loss) == (None, None, float("inf"))


def test_a_new_stay_begins_anew() -> None:
    """Results, blocks and events of an earlier session are forgotten."""
    hands = by_hand.met(stars.subject("parameter_server", world_size=1))
    member = hands.members[0]
    (node, *_) = by_hand.begin(hands, 0, 0, (0, 1, 2))
    welcome = by_hand.welcome_of(hands.server, 0, 0, resumed=True)
    member.load(welcome, bytearray(hands.server.payload(welcome)))
    with pytest.raises(KeyError):
        member.payload(node)
    (start,) = trace.load_events(bytes(member.payload(Loaded(step=0))))
    assert isinstance(start, trace.Start)
    assert (start.rank, start.step, start.resumed) == (0, 0, True)


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize(("block", "due"), [(0, 4 * 37), (1, 4 * 38), (2, 4 * 38), (3, 4 * 38)])
def test_a_block_of_another_size_is_refused(block: int, due: int, more: int) -> None:
    """A block that is one byte too long or too short is refused; blocks differ in size."""
    member = _in_blocks(160)
    average = by_hand.average_of(0, block)
    member.require(average, bytes(due))
    reason = f"Average with a payload of {due + more} bytes: expected {due}"
    with pytest.raises(ProtocolError, match=reason):
        member.require(average, bytes(due + more))


@pytest.mark.parametrize("num_bytes", [4, 148, 156, 604])
def test_room_of_another_size_is_elsewhere(num_bytes: int) -> None:
    """A block with a wrong size is received in other memory than the average's."""
    member = _in_blocks(160)
    average = by_hand.average_of(0, 3)
    right = member.room(average, 152)
    assert np.shares_memory(right, member.room(average, 152))
    other = member.room(average, num_bytes)
    assert other.nbytes == num_bytes
    assert not np.shares_memory(right, other)


def test_a_vector_has_no_more_blocks_than_elements() -> None:
    """A welcome with more blocks than elements is refused before anything is allocated."""
    hands = by_hand.met(stars.in_blocks("parameter_server", 160, world_size=1))
    welcome = by_hand.welcome_of(hands.server, 0, 0)
    payload = hands.server.payload(welcome)
    hands.members[0].require(replace(welcome, blocks=151), payload)
    with pytest.raises(ProtocolError, match="Welcome blocks=152: use 1 to 151"):
        hands.members[0].require(replace(welcome, blocks=152), payload)


@pytest.mark.parametrize("message", [Commit(step=0), Heartbeat()])
def test_most_messages_carry_nothing(message: Message) -> None:
    """A payload of a message without one is refused."""
    member = _alone()
    member.require(message, b"")
    with pytest.raises(ProtocolError, match="with a payload of 1 bytes: expected 0"):
        member.require(message, b"x")


def test_sizes_are_exact() -> None:
    """Only a state and a vector are sent down, and each has its exact size."""
    member = _alone(optimizer="adamw")
    assert set(member.sizes()) == {Welcome, Average}
    assert member.sizes()[Average] == member.replicas.vector_bytes
    assert TreeNode not in member.sizes()
