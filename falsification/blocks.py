"""Bugs in the blocks that are added, averaged and held, mostly when a worker is lost in between."""

from __future__ import annotations

from functools import reduce
from weakref import WeakKeyDictionary

import numpy as np

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.blocks import Sums
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Hold, Peer
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import Average, Message, Stage, TreeNode, Welcome
from entrenar_py.train.wire.worker import Worker

from .protocol import any_number
from .subjects import COORDINATOR, FRAMES, MEMBER, SERVER, TRAINING, WORKER, star, visit

SUMS = f"{TRAINING}.blocks.Sums"
_take, _forget, _root = Sums.take, Sums.forget, Sums.root
_receive, _drop, _count = Coordinator.receive, Coordinator._drop, Coordinator._count
_reduce, _load = Server.reduce, Member.load
_enter, _hold = Worker._enter, Worker._hold

# block -> nodes of deliveries that a worker's death cut short
_partial: WeakKeyDictionary[Sums, dict[int, list[reduction.Node]]] = WeakKeyDictionary()
# worker -> the blocks that it held when its connection was lost
_stale: WeakKeyDictionary[Worker, set[int]] = WeakKeyDictionary()


# --- what is added ----------------------------------------------------------------------------


def _plus(one: reduction.Node, other: reduction.Node) -> reduction.Node:
    total = np.add(one.vector, other.vector, dtype=np.float32)
    loss, weight = one.loss + other.loss, one.weight + other.weight
    return reduction.Node(one.level, one.index, total, loss, weight)


def all_that_came(self: Sums, block: int) -> reduction.Node:
    """Adds all nodes that came, in order of arrival, whether shards are missing or not."""
    if block not in self._complete:
        self.complete(block)
    return reduce(_plus, self._complete.pop(block))


def nobody_takes_over(self: Coordinator, peer: Peer, reason: str, now: float) -> list[Effect]:
    """Neither reassigns the shards of a lost worker nor waits for them."""
    lost = self.peers[peer]
    orphaned = {shard for shards in lost.assigned for shard in shards}
    lost.assigned.clear()
    lost.covered.clear()
    effects = _drop(self, peer, reason, now)
    if self.stage is not Stage.COMPUTING:
        return effects
    for missing in self._missing.values():
        missing -= orphaned
    blocks = sorted(self._missing, reverse=True)
    return [*effects, *(one for block in blocks for one in self._reduce(block))]


def partial_stays(self: Sums, rank: int) -> None:
    """Keeps the blocks of a delivery that the worker's death cut short, for `partial_counts`."""
    for block, nodes in self._open.get(rank, {}).items():
        _partial.setdefault(self, {}).setdefault(block, []).extend(nodes)
    _forget(self, rank)


def partial_counts(self: Sums, block: int) -> reduction.Node:
    """Adds the blocks of `partial_stays` to those that others delivered for the same shards."""
    return reduce(_plus, _partial.get(self, {}).pop(block, []), _root(self, block))


def received_again(self: Coordinator, peer: Peer, message: Message, now: float) -> list[Effect]:
    """Accepts a node even if it has come before."""
    if isinstance(message, TreeNode) and peer in self.peers:
        came = self.peers[peer].covered.get(message.block, set())
        num_shards = self.run.num_shards
        came.difference_update(reduction.shards_under(message.level, message.index, num_shards))
    return _receive(self, peer, message, now)


def added_again(
    self: Sums, rank: int, block: int, node: reduction.Node, payload: Buffer | None = None
) -> None:
    """Adds a node to an earlier copy of the same node."""
    nodes = self._open.get(rank, {}).get(block, [])
    for place, earlier in enumerate(nodes):
        if (earlier.level, earlier.index) == (node.level, node.index):
            nodes[place] = _plus(earlier, node)
            return
    _take(self, rank, block, node, payload)


# --- when it is averaged, and by what it is divided -------------------------------------------


def counted_with_the_first(
    self: Coordinator, member: Seen, node: TreeNode, under: range
) -> list[Effect]:
    """Takes a worker's first node of a block for its whole delivery of that block.

    Block 0, which comes last, is excepted.
    """
    effects = _count(self, member, node, under)
    if node.block > 0 and node.block in self._missing:
        self._missing[node.block].difference_update(member.assigned[0])
    return effects


def divided_by_the_last_weight(self: Server, block: int) -> tuple[float, float] | str:
    """Divides a block by the weight of the block that was averaged before it."""
    before = self.reduction.total[1]
    reduced = _reduce(self, block)
    if before and not isinstance(reduced, str):
        self.reduction.part(block)[:] *= np.float32(reduced[1] / before)
    return reduced


# --- what a worker holds ----------------------------------------------------------------------


def room_apart(self: Member, message: Message, num_bytes: int) -> memoryview:
    """Receives every payload in new memory, not in its place in the vector."""
    return new_room(message, num_bytes)


def cleared(self: Member, welcome: Welcome, payload: Buffer) -> None:
    """Starts a session with an average of zeros."""
    _load(self, welcome, payload)
    self.held.vector[:] = 0


def staged_without_the_last(self: Worker, average: Average) -> list[Effect]:
    """Drops the last block that comes, but reports that it holds every block."""
    effects = _hold(self, average)
    if self._num_blocks > 1 and len(self._held) == self._num_blocks:
        return [effect for effect in effects if not isinstance(effect, Hold)]
    return effects


def remembers_its_blocks(self: Worker, welcome: Welcome) -> list[Effect]:
    """Reconnects with the blocks that it held when the connection was lost."""
    _stale[self] = set(self._held)
    return _enter(self, welcome)


def held_already(self: Worker, average: Average) -> list[Effect]:
    """Ignores a block if it already holds one of that number, even from another step."""
    effects = _hold(self, average)
    stale = _stale.get(self, set())
    if average.block in stale:
        stale.discard(average.block)
        return [effect for effect in effects if not isinstance(effect, Hold)]
    return effects


def _at(kind: str, place: str) -> Fault:
    return Fault(kind=kind, rank=1, step=1, at=place)


_LEAVING = star(faults=(Fault(kind="leave", rank=1, step=1),))
_IN_BLOCKS = {"block_bytes": 400}
_TWICE = Fault(kind="lie", step=1, rank=1, at="TreeNode", value="twice")

VARIANTS = (
    Variant(
        name="server-arrival-order",
        summary="the server adds deliveries in the order of arrival",
        source="classic (parameter server)",
        plants={f"{SUMS}.root": all_that_came},
        scenario=star(num_samples=40, batch_size=40, num_shards=8),
        invariants=("F-TI-006", "F-DP-005", "F-RED-002"),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="orphans-dropped",
        summary="a dead worker's shards are not reassigned, and the step is taken without them",
        source="Horovod #3144",
        plants={
            f"{COORDINATOR}.Coordinator._drop": nobody_takes_over,
            f"{SUMS}.root": all_that_came,
        },
        scenario=_LEAVING,
        invariants=("F-DP-006",),
        # Step 1 is samples 8-15 of the order; worker 1 has shards 2 and 3, the 5th to 7th of them.
        place={"step": 1, "rank": 1, "sample_ids": tuple(sorted(visit(_LEAVING)[12:15]))},
    ),
    Variant(
        name="partial-delivery-kept",
        summary="blocks that a worker sent before it died are added to their recomputation",
        source="classic (parameter server)",
        plants={f"{SUMS}.forget": partial_stays, f"{SUMS}.root": partial_counts},
        scenario=star(faults=(_at("duplicate", "TreeNode"),), options=_IN_BLOCKS),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0, "tensor": "output.weight"},
    ),
    Variant(
        name="duplicate-counted",
        summary="a delivery that arrives twice is added twice",
        source="classic (at-least-once delivery)",
        plants={
            f"{FRAMES}.Decoder._end_prefix": any_number,
            f"{COORDINATOR}.Coordinator.receive": received_again,
            f"{SUMS}.take": added_again,
        },
        scenario=star(faults=(_at("duplicate", "TreeNode"),), options=_IN_BLOCKS),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0, "tensor": "output.weight"},
    ),
    Variant(
        name="told-twice-counted",
        summary="a delivery that a worker makes twice is added twice",
        source="classic (at-least-once delivery)",
        plants={
            f"{COORDINATOR}.Coordinator.receive": received_again,
            f"{SUMS}.take": added_again,
        },
        scenario=star(faults=(_TWICE,), options=_IN_BLOCKS),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0, "tensor": "output.weight"},
    ),
    Variant(
        name="block-counted-early",
        summary="a block is averaged as soon as every worker has sent a part of it",
        source="classic (counting senders instead of what they send)",
        plants={
            f"{COORDINATOR}.Coordinator._count": counted_with_the_first,
            f"{SUMS}.root": all_that_came,
        },
        # Two workers with two nodes each: shards 0-1 and 2, 3 and 4.
        scenario=star(world_size=2, options=_IN_BLOCKS),
        invariants=("F-DP-005",),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="block-divided-by-another-s-weight",
        summary="a block is divided by the weight of the block that was averaged before it",
        source="classic (state of one bucket used for the next)",
        plants={f"{SERVER}.Server.reduce": divided_by_the_last_weight},
        scenario=star(options=_IN_BLOCKS),
        invariants=("F-DP-005",),
        # Steps 0 and 1 have 8 samples each, step 2 has 5; the last block goes first.
        place={"step": 2, "tensor": "output.weight"},
    ),
    Variant(
        name="staged-without-the-last-block",
        summary="a worker reports all blocks as held before it has the last one",
        source="classic (off by one in a countdown)",
        plants={
            f"{WORKER}.Worker._hold": staged_without_the_last,
            f"{MEMBER}.Member.room": room_apart,
            f"{MEMBER}.Member.load": cleared,
        },
        scenario=star(options=_IN_BLOCKS),
        invariants=("F-DP-005",),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="stale-block-held",
        summary="a worker that rejoins uses old blocks as those of the next step",
        source="classic (elastic training)",
        plants={
            f"{WORKER}.Worker._enter": remembers_its_blocks,
            f"{WORKER}.Worker._hold": held_already,
            f"{MEMBER}.Member.room": room_apart,
        },
        scenario=star(faults=(_at("cut", "Staged"),), options=_IN_BLOCKS),
        invariants=("F-DP-001", "F-WP-005"),
        place={"step": 2, "rank": 1},
    ),
)
