"""The work of the server: it has the reference's sums, and refuses invalid messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Halt, Membership, Saved, Update
from entrenar_py.train.arithmetic import blocks
from entrenar_py.train.coordinator import server
from entrenar_py.train.coordinator.replicas import Replicas, Worker
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.effects import Left, Stop
from entrenar_py.train.wire.messages import (
    Applied,
    Average,
    Commit,
    Computed,
    Loaded,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)
from tests.systems import by_hand, stars


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread, as `systems.run` and workers do: threads change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _subject(**changes: Any) -> Scenario:
    return stars.subject("parameter_server", **changes)


def _held(hands: by_hand.Hands) -> list[trace.Tensors]:
    """Return the weights after each step, as worker 0 recorded them."""
    events = hands.server.recorder.drain()
    return [one.weights for one in events if isinstance(one, Update) and one.rank == 0]


@pytest.mark.parametrize("block_bytes", [64, 2**20])
@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_steps_by_hand_are_the_reference(workload: str, block_bytes: int) -> None:
    """Steps equal the reference's for any order of deliveries and any size of blocks."""
    scenario = _subject(workload=workload, num_steps=3, options={"block_bytes": block_bytes})
    hands = by_hand.met(scenario)
    for step in range(3):
        for rank, shards in reversed(by_hand.shards_of(hands).items()):
            by_hand.deliver(hands, rank, step, shards)
        by_hand.make(hands, step)
        held, member = hands.server, hands.members[2]
        assert held.replicas.state(held.replica) == member.replicas.state(member.worker)
    assert _held(hands) == stars.expected(scenario)


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_a_step_made_aside_is_the_same(
    monkeypatch: pytest.MonkeyPatch, clip_norm: float | None
) -> None:
    """The next average waits for it, for it overwrites the gradient. So does who reads the state.

    The server's own step begins late here.
    """
    monkeypatch.setattr(server, "_LARGE", 0)
    begun: list[float] = []
    move = Replicas.move

    def late(self: Replicas, worker: Worker, *average: Any) -> None:
        if worker.rank < 0:
            time.sleep(0.05)
            begun.append(time.monotonic())
        move(self, worker, *average)

    monkeypatch.setattr(Replicas, "move", late)
    scenario = _subject(num_steps=3, clip_norm=clip_norm, options={"block_bytes": 64})
    hands = by_hand.met(scenario)
    for step in range(3):
        for rank, shards in by_hand.shards_of(hands).items():
            by_hand.deliver(hands, rank, step, shards)
        by_hand.make(hands, step)
        assert len(begun) == step, "it isn't waited for"
    member = hands.members[2]
    held = hands.server.replicas.state(hands.server.replica)
    assert held == member.replicas.state(member.worker)
    assert _held(hands) == stars.expected(scenario)


def test_what_fails_aside_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by whoever needs the state next."""
    monkeypatch.setattr(server, "_LARGE", 0)
    hands = by_hand.met(_subject(num_steps=1))
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)

    def fails(self: Replicas, worker: Worker, *average: Any) -> None:
        if worker.rank < 0:
            raise MemoryError

    monkeypatch.setattr(Replicas, "move", fails)
    by_hand.make(hands, 0)
    with pytest.raises(MemoryError):
        _ = hands.server.replica


def test_a_shard_at_a_time_is_the_same() -> None:
    """The distribution of shards, and the number of deliveries, change no bit."""
    scenario = _subject(num_steps=1)
    hands = by_hand.met(scenario)
    for shard in (7, 0, 3, 1, 2, 6, 5, 4):
        by_hand.deliver(hands, shard % 3, 0, (shard,))
    by_hand.make(hands, 0)
    assert _held(hands) == stars.expected(scenario)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(1.0, -4.0), (1.0, 17.0), (1.0, float("nan")), (float("nan"), 4.0), (float("inf"), 4.0)],
)
def test_a_node_weighs_what_a_batch_can(loss: float, weight: float) -> None:
    """A node with a weight below 0, or above 16 samples, is refused."""
    server = Server(_subject(batch_size=16))
    right = TreeNode(step=0, round=0, block=0, level=0, index=0, loss=1.0, weight=16.0)
    payload = bytearray(server.replicas.vector_bytes)
    server.require(0, right, payload)
    server.require(0, replace(right, weight=0.0), payload)
    with pytest.raises(ProtocolError, match="use 0 to 16, and a finite loss"):
        server.require(0, replace(right, loss=loss, weight=weight), payload)


def test_half_a_delivery_does_not_count() -> None:
    """A worker that is lost before its delivery is complete has delivered nothing."""
    scenario = _subject(num_steps=1)
    hands = by_hand.met(scenario)
    (node, *_) = by_hand.begin(hands, 1, 0, (3, 4, 5))
    by_hand.tell(hands, 1, node)
    hands.server.left(Left(1, 0, "gone"))
    del hands.members[1]
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    by_hand.make(hands, 0)
    assert hands.server.present == {0, 2}
    events = hands.server.recorder.drain()
    assert [one for one in events if isinstance(one, Membership)] == [
        Membership(step=0, rank=1, change="left", reason="gone")
    ]
    told = [one for one in events if isinstance(one, trace.Shard)]
    assert sorted(one.shard for one in told) == list(range(8)), "each by who delivered it"
    assert {one.rank for one in told} == {0, 2}


@pytest.mark.parametrize("num_averaged", [1, 2, 3])
def test_who_is_lost_between_blocks_leaves_the_right_bits(num_averaged: int) -> None:
    """Averaged blocks stay; for all others the results of other workers are used."""
    scenario = stars.in_blocks("parameter_server", 160, num_steps=1)
    hands = by_hand.met(scenario)
    assert hands.server.reduction.blocks.count == 4
    order = list(hands.server.reduction.blocks.order())
    sent = {rank: by_hand.begin(hands, rank, 0, run) for rank, run in _THIRDS.items()}
    _send(hands, sent, order[:num_averaged])
    for block in order[:num_averaged]:
        by_hand.average(hands, 0, block)
    # The lost worker has delivered a part of the next block, too.
    _send(hands, {1: sent.pop(1)}, order[num_averaged : num_averaged + 1])
    hands.server.left(Left(1, 0, "gone"))
    del hands.members[1]
    _send(hands, sent, order[num_averaged:])
    for rank in sent:
        hands.server.deliver(rank)
    _send(hands, {0: by_hand.begin(hands, 0, 0, _THIRDS[1])}, order[num_averaged:])
    hands.server.deliver(0)
    for block in order[num_averaged:]:
        by_hand.average(hands, 0, block)
    by_hand.commit(hands, 0)
    assert _held(hands) == stars.expected(scenario)


_THIRDS = {0: (0, 1, 2), 1: (3, 4, 5), 2: (6, 7)}


def _send(hands: by_hand.Hands, sent: dict[int, list[TreeNode]], blocks: list[int]) -> None:
    """Have the server take `blocks` of the nodes that workers must send."""
    for rank, nodes in sent.items():
        for node in nodes:
            if node.block in blocks:
                by_hand.tell(hands, rank, node)


def test_a_step_that_did_not_happen_is_forgotten() -> None:
    """The whole step is computed again, with the same bits."""
    scenario = _subject(num_steps=1)
    hands = by_hand.met(scenario)
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    hands.server.gather(0)
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    by_hand.make(hands, 0)
    assert _held(hands) == stars.expected(scenario)


def test_who_joins_late_has_everything(tmp_path: Path) -> None:
    """A late worker, and a server that restores a checkpoint, have the whole state."""
    scenario = _subject(world_size=2, optimizer="adamw", num_steps=4)
    hands = by_hand.met(scenario.with_(world_size=1))
    hands.server.plan = scenario
    hands.server.checkpoint_path = tmp_path / "checkpoint"
    for step in range(2):
        by_hand.deliver(hands, 0, step, tuple(range(8)))
        by_hand.make(hands, step)
    hands.server.save(2)()()
    by_hand.join(hands, 1, step=2)
    other = Server(scenario)
    other.checkpoint_path = hands.server.checkpoint_path
    assert other.restore() == 2
    assert other.replicas.stands == hands.server.replicas.stands
    assert other.replicas.schedule_step == 2
    states = [one.replicas.state(one.replica) for one in (other, hands.server)]
    states += [one.replicas.state(one.worker) for one in hands.members.values()]
    assert all(one == states[0] for one in states)
    (saved,) = [one for one in hands.server.recorder.drain() if isinstance(one, Saved)]
    assert (saved.step, saved.rank, saved.weights) == (2, 0, states[0]["weights"])


def test_what_overflows_is_not_averaged() -> None:
    """Finite nodes whose sum overflows give a reason to halt, and no step."""
    scenario = _subject(world_size=1, num_shards=2)
    server = Server(scenario)
    huge = np.full(server.replicas.vector_bytes // 4, 3e38, "<f4").tobytes()
    with np.errstate(over="ignore"):
        for index in (0, 1):
            node = _node(step=0, index=index)
            server.require(0, node, bytearray(huge))
            server.keep(0, node, bytearray(huge))
        reason = server.reduce(0)
    assert reason == "the average gradient or loss is not finite, though each worker's is"
    server.stop(Stop(0, None, "because"))
    assert server.recorder.drain() == [Halt(step=0, reason="because")]


def test_a_culprit_is_recorded() -> None:
    """The halt has all that the worker reported of its non-finite value."""
    server = Server(_subject())
    said = NonFinite(step=1, shard=3, tensor="weight", element=0, loss=1.0, ids=(4, 5))
    server.stop(Stop(1, 2, "because", said))
    halt = Halt(step=1, reason="because", rank=2, shard=3, tensor="weight", ids=(4, 5))
    assert server.recorder.drain() == [halt]


def test_what_messages_carry() -> None:
    """A state has its announced size, an average is a vector, and other payloads are empty."""
    hands = by_hand.met(_subject())
    server, member = hands.server, hands.members[0]
    welcome = by_hand.welcome_of(server, 0, 0)
    assert len(server.payload(welcome)) == member.sizes()[Welcome]
    assert server.payload(Commit(step=0)) == b""
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    assert server.reduce(0)
    average = server.payload(by_hand.average_of(0, 0))
    assert len(average) == member.sizes()[Average] == server.sizes()[TreeNode]


@pytest.mark.parametrize("block_bytes", [4, 7, 8, 160, 603, 604, 605, 2**20])
def test_no_block_is_longer_than_asked(block_bytes: int) -> None:
    """Blocks have as many whole elements as fit, and the longest is the limit of payloads."""
    server = Server(stars.in_blocks("parameter_server", block_bytes))
    parts = server.reduction.blocks
    sizes = [parts.num_bytes(block) for block in range(parts.count)]
    assert sum(sizes) == server.replicas.vector_bytes == 604
    assert max(sizes) == server.sizes()[TreeNode] <= block_bytes
    assert min(sizes) >= 4
    assert server.reduction.blocks.count == -(-604 // (block_bytes // 4 * 4))


@pytest.mark.parametrize("block_bytes", [0, 3, -4, 4.0, "8", True, None])
def test_a_block_holds_an_element_at_least(block_bytes: Any) -> None:
    """A smaller block size is refused with the value and what is allowed."""
    with pytest.raises(UsageError, match=r"block_bytes=.*: use a whole number of bytes >= 4"):
        Server(_subject(options={"block_bytes": block_bytes}))


# --- lies ---------------------------------------------------------------------------------------


def _events(*events: trace.Event) -> bytearray:
    return bytearray(trace.dump_events(events))


def _node(step: int, index: int = 0, block: int = 0) -> TreeNode:
    return TreeNode(step=step, round=0, block=block, level=0, index=index, loss=1.0, weight=8.0)


SHARD = trace.Shard(
    step=2, epoch=0, rank=1, shard=0, ids=(1,), loss_sum=1.0, weight=1.0, finite=True
)
UPDATE = trace.Update(
    step=2, rank=1, loss=1.0, weight=1.0, learning_rate=0.1, finite=True, weights={}
)
START = trace.Start(step=2, rank=1, weights={})
FAULT = Fault(kind="non_finite_loss", step=2, value="nan").to_dict()
NODE = _node(step=2)
COMPUTED = Computed(step=2, shards=(0,))
PROBLEM = NonFinite(step=2, shard=0, tensor=None, element=None, loss=1.0, ids=())


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Loaded(step=2), _events(START)),
        (COMPUTED, _events(SHARD, trace.Injected(fault=FAULT, step=2, rank=1))),
        (PROBLEM, _events(SHARD)),
        (Applied(step=2), _events(UPDATE)),
        (Applied(step=2), _events()),
        (Commit(step=2), bytearray()),
    ],
)
def test_the_truth_is_taken(message: Message, payload: bytearray) -> None:
    """The correct messages are accepted, so that the refusals below have the planted reason."""
    Server(_subject()).require(1, message, payload)


@pytest.mark.parametrize(
    ("message", "payload", "reason"),
    [
        (NODE, bytearray(), "TreeNode block=0 with 0 bytes: the manifest requires 8"),
        (NODE, bytearray(7), "TreeNode block=0 with 7 bytes: the manifest requires 8"),
        (NODE, bytearray(9), "TreeNode block=0 with 9 bytes: the manifest requires 8"),
        (NODE, bytearray(10**5), "TreeNode block=0 with 100000 bytes: the manifest requires 8"),
        (COMPUTED, bytearray(b"\xff"), "Computed: event 1 can't be read"),
        (COMPUTED, _events(UPDATE), "Computed with an event update"),
        (COMPUTED, _events(SHARD, START), "Computed with an event start"),
        (COMPUTED, _events(trace.End(status="completed")), "Computed with an event end"),
        (Loaded(step=2), _events(SHARD), "Loaded with an event shard"),
        (Applied(step=2), _events(SHARD), "Applied with an event shard"),
        (PROBLEM, _events(UPDATE), "NonFinite with an event update"),
        (
            PROBLEM,
            _events(trace.Halt(step=2, reason="because")),
            "NonFinite with an event halt",
        ),
    ],
)
def test_what_is_no_part_of_a_message_is_refused(
    message: Message, payload: bytearray, reason: str
) -> None:
    """Another size, another kind of event, and garbage are refused by name."""
    with pytest.raises(ProtocolError) as caught:
        Server(_subject()).require(1, message, payload)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(("block", "due"), [(0, 4 * 37), (1, 4 * 38), (3, 4 * 38)])
def test_a_block_of_another_size_is_refused(block: int, due: int) -> None:
    """Blocks that are one byte too short or long, or have another block's size, are refused."""
    server = Server(stars.in_blocks("parameter_server", 160))
    node = _node(step=2, block=block)
    server.require(1, node, bytes(due))
    for num_bytes in {due - 1, due + 1, 4 * 37, 4 * 38} - {due}:
        reason = f"TreeNode block={block} with {num_bytes} bytes: the manifest requires {due}"
        with pytest.raises(ProtocolError, match=reason):
            server.require(1, node, bytes(num_bytes))


@pytest.mark.parametrize("name", ["rank", "step"])
@pytest.mark.parametrize(
    ("message", "event"),
    [(Loaded(step=2), START), (COMPUTED, SHARD), (Applied(step=2), UPDATE), (PROBLEM, SHARD)],
)
def test_nobody_tells_of_another(message: Message, event: trace.Event, name: str) -> None:
    """Events of another worker or of another step are refused."""
    record = json.loads(trace.dump_events([event]))
    record[name] += 1
    with pytest.raises(ProtocolError, match="of rank 1 in step 2 has an event of another rank"):
        Server(_subject()).require(1, message, bytearray(json.dumps(record).encode()))


@pytest.mark.parametrize("place", [{"rank": None}, {"step": None}])
def test_nobody_tells_of_nobody(place: dict[str, None]) -> None:
    """A fault that struck must have a place."""
    record = {"kind": "injected", "fault": FAULT, "step": 2, "rank": 1, **place}
    with pytest.raises(ProtocolError, match="has an event of another"):
        Server(_subject()).require(1, COMPUTED, bytearray(json.dumps(record).encode()))


@pytest.mark.parametrize(
    ("system", "owners"), [("parameter_server", 1), ("mesh", 3), ("ring_simulated", 3)]
)
def test_the_shape_of_a_run(system: str, owners: int) -> None:
    """The run has the scenario's numbers, and the server's number of blocks."""
    scenario = Scenario(system=system, workload="mlp", world_size=3, seed=0, width=1200)
    server = Server(scenario)
    run = server.run_between(2, 5)
    assert run.num_blocks == server.reduction.blocks.count
    assert run.num_blocks == blocks.num_blocks(server.replicas.layout.num_elements, owners) > 1
    assert (run.first_step, run.num_steps, run.resumed) == (2, 5, True)
