"""The topologies of a run (star, mesh, ring): their classes, and the exchange of blocks.

In a mesh, blocks are added along the tree, in a ring one worker after the other. Only this module
derives a topology from a trainer's name, for the harness and for the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import blocks, reduction
from entrenar_py.train.arithmetic.blocks import Blocks
from entrenar_py.train.arithmetic.reduction import Node, Vector
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker, RingWorker
from entrenar_py.train.wire.messages import (
    Assign,
    Average,
    Commit,
    Message,
    Partial,
    TreeNode,
    Weights,
)
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.tcp import MeshClient, WorkerClient

# (level, index) in the tree -> the node that this worker computed in the current step
Nodes = Mapping[tuple[int, int], Node]
_THIS_WORKER = -1


class Held:
    """The blocks of the step's averaged gradient, or of its new weights, that have arrived.

    Their memory is separate from the memory that training uses. `vector` is float32 [num_elements],
    divided into parts by `blocks`. `there` has the numbers of the filled blocks. `total` is the
    step's summed loss and its weight. `round` is the current round of a mesh.
    """

    def __init__(self, num_elements: int, planned: Blocks | None = None) -> None:
        """Start empty. `planned` has the blocks of every session, if these are fixed."""
        self.vector: Vector = np.empty(num_elements, np.float32)
        self._planned = planned
        self.blocks = planned or Blocks(num_elements, 1)
        self.there: set[int] = set()
        self.total = (0.0, 0.0)
        self.round = 0

    def begin(self, num_blocks: int) -> None:
        """Start a session in which the vector is sent in `num_blocks` parts."""
        self.blocks = self._planned or Blocks(self.vector.size, num_blocks)
        self.there.clear()
        self.round = 0

    def part(self, block: int) -> Vector:
        """Return the part of `vector` for `block`, as a float32 view."""
        return self.vector[self.blocks.part(block)]

    def lacks(self, message: Average | Weights) -> bool:
        """Return whether `message` carries a missing block of the current round.

        Blocks of an earlier round may still arrive; blocks of weights belong to no round.
        """
        is_open = message.block < self.blocks.count and message.block not in self.there
        return is_open and (isinstance(message, Weights) or message.round == self.round)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keep a block; copy it unless `payload` already lies in its part of `vector`."""
        place, block = self.part(message.block), blocks.vector_of(payload)
        if not np.may_share_memory(place, block):
            place[:] = block
        self.there.add(message.block)
        self.total = message.loss, message.weight

    def regroup(self, number: int) -> None:
        """Forget all blocks; round `number` begins or restarts."""
        self.there.clear()
        if number != self.round:
            # A block of the old round may still be arriving in the memory of the old vector.
            self.round, self.vector = number, np.empty_like(self.vector)


class TreeExchange:
    """Addition in a mesh: adds the nodes of the blocks that this worker averages, along the tree.

    `nodes` and `held` belong to the worker; averages go to `held`. Sums are multiplied by `scale`.
    """

    carriers: tuple[type[Message], ...] = (TreeNode,)

    def __init__(self, held: Held, nodes: Nodes, *, num_shards: int, scale: float) -> None:
        self.held, self.nodes, self.scale = held, nodes, scale
        self._sums = blocks.Sums(num_shards)

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for a node's block, which may never arrive completely."""
        return self._sums.room(num_bytes)

    def keep(self, rank: int, node: TreeNode, payload: Buffer) -> None:
        """Take over a node's block from `rank`, with its memory."""
        self._take(rank, node, blocks.vector_of(payload), payload)

    def contribute(self, node: TreeNode) -> None:
        """Add a block of this worker's own node, read-only: the node may have to be sent again."""
        vector = self.nodes[node.level, node.index].vector[self.held.blocks.part(node.block)]
        vector.flags.writeable = False
        self._take(_THIS_WORKER, node, vector, None)

    def complete(self, block: int) -> None:
        """Note that `block` is complete: `reduce` may then be called, in any thread."""
        self._sums.complete(block)
        self.held.there.add(block)  # an average from another worker must not replace it

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Add and average `block`; return the summed loss and its weight, None if not finite."""
        averaged = self._sums.average(block, self.scale, out=self.held.part(block))
        if averaged is not None:
            self.held.total = averaged
        return averaged

    def clear(self) -> None:
        """Forget all blocks: another round or session begins."""
        self._sums.clear()

    def _take(self, rank: int, node: TreeNode, vector: Vector, payload: Buffer | None) -> None:
        part = Node(node.level, node.index, vector, node.loss, node.weight)
        self._sums.take(rank, node.block, part, payload)


class RingExchange:
    """Addition in a ring: adds this worker's own part to every block that passes.

    `nodes`, `held` and `scale` are as in TreeExchange.
    """

    carriers: tuple[type[Message], ...] = (Partial,)

    def __init__(self, held: Held, nodes: Nodes, *, num_shards: int, scale: float) -> None:
        self.held, self.nodes, self.scale = held, nodes, scale
        self.passing: dict[int, Node] = {}  # block -> its sum up to here
        self._num_shards = num_shards

    def combine(self, block: int, message: Partial | None, payload: Buffer) -> tuple[float, float]:
        """Return summed loss and weight of `block`, after adding this worker's part to `payload`.

        Without a message, the block starts at this worker.
        """
        nodes = self.nodes.values()
        loss, weight = sum(node.loss for node in nodes), sum(node.weight for node in nodes)
        vector = self._own(block)
        if message is not None:
            came = blocks.vector_of(payload)
            vector = np.add(came, vector, out=came)
            loss, weight = message.loss + loss, message.weight + weight
        self.passing[block] = Node(0, 0, vector, loss, weight)
        return loss, weight

    def complete(self, block: int) -> None:
        """Note that `block` has passed every worker: `reduce` may be called, in any thread."""
        self.held.there.add(block)  # an average from another worker must not replace it

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Average a block that has passed every worker; the result is as in TreeExchange."""
        total = self.passing[block]
        self.held.total = total.loss, total.weight
        is_finite = blocks.average(total, self.scale, out=self.held.part(block))
        return self.held.total if is_finite else None

    def clear(self) -> None:
        """Forget all blocks: another round or session begins."""
        self.passing.clear()

    def _own(self, block: int) -> Vector:
        """Return the sum of this worker's nodes in `block`, in shard order; don't write to it.

        It is float32, of the block's length.
        """
        part = self.held.blocks.part(block)
        first, *others = sorted(
            self.nodes.values(), key=lambda node: reduction.span(node, self._num_shards).start
        )
        total: Vector = first.vector[part]
        for node in others:
            total = total + node.vector[part]
        return total


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One topology: the classes of its state machines, endpoints and clients.

    `trainer` is its name in a plan. `exchange` adds the blocks that a worker receives from other
    workers; it is None in a star, where everything goes to the coordinator. `down` lists the
    messages of a step that the coordinator sends. `promise` is the promise of the trace if all
    workers use the same backend.
    """

    trainer: str
    coordinator: type[Coordinator]
    worker: type[Worker]
    client: type[WorkerClient]
    exchange: type[TreeExchange] | type[RingExchange] | None
    down: tuple[type[Message], ...] = (Assign, Commit)
    promise: str = "bitwise"

    def num_owners(self, world_size: int) -> int:
        """Return the number of processes that average blocks: 1 in a star, else all workers."""
        return 1 if self is STAR else world_size


STAR = Topology(
    trainer="parameter_server",
    coordinator=Coordinator,
    worker=Worker,
    client=WorkerClient,
    exchange=None,
    down=(Assign, Average, Weights, Commit),
)
MESH = Topology(
    trainer="mesh",
    coordinator=MeshCoordinator,
    worker=MeshWorker,
    client=MeshClient,
    exchange=TreeExchange,
)
RING = Topology(
    trainer="ring",
    coordinator=MeshCoordinator,
    worker=RingWorker,
    client=MeshClient,
    exchange=RingExchange,
    promise="draws",
)
BY_NAME = {"star": STAR, "mesh": MESH, "ring": RING}
_BY_TRAINER = {topology.trainer: topology for topology in BY_NAME.values()}


def of(plan: TrainingPlan) -> Topology:
    """Return the topology of the plan's trainer; STAR if the trainer has no topology of its own."""
    return _BY_TRAINER.get(plan.trainer, STAR)


def num_blocks(plan: TrainingPlan, num_elements: int) -> int:
    """Return the number of blocks of a vector; option `block_bytes` limits their size.

    Raises UsageError if the option is not a valid size.
    """
    if "block_bytes" not in plan.options:
        return blocks.num_blocks(num_elements, of(plan).num_owners(plan.world_size))
    block_bytes = plan.options["block_bytes"]
    if type(block_bytes) is not int or block_bytes < 4:
        raise UsageError(f"options block_bytes={block_bytes!r}: use a whole number of bytes >= 4")
    return min(-(-4 * num_elements // (block_bytes // 4 * 4)), num_elements)
