"""The blocks of a step that a worker has, and the addition of those that other workers send.

They are added by the tree, or around a ring.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Average, Message, Partial, TreeNode, Weights
from entrenar_py.training import blocks, reduction
from entrenar_py.training.blocks import Blocks
from entrenar_py.training.reduction import Node, Vector

# Level and index in the tree -> what this worker computed in the step in work.
Nodes = Mapping[tuple[int, int], Node]
_THIS_WORKER = -1


class Held:
    """The averaged gradient, or the new weights, of the step in work: the blocks that are there.

    They are never in the memory that training uses.

    `vector` is float32 [num_elements] in the parts that `blocks` cuts, `there` the blocks that are
    in it, `total` the step's summed loss and its weight. `round` is that of a mesh.
    """

    def __init__(self, num_elements: int) -> None:
        self.vector: Vector = np.empty(num_elements, np.float32)
        self.blocks = Blocks(num_elements, 1)
        self.there: set[int] = set()
        self.total = (0.0, 0.0)
        self.round = 0

    def begin(self, num_blocks: int) -> None:
        """Start a stay in which the vector travels in `num_blocks` parts."""
        self.blocks = Blocks(self.vector.size, num_blocks)
        self.there.clear()
        self.round = 0

    def part(self, block: int) -> Vector:
        """Return the view of `vector` that is `block`, float32."""
        return self.vector[self.blocks.part(block)]

    def lacks(self, message: Average | Weights) -> bool:
        """Return whether the block is still to come, in this round: another's may come alongside.

        Blocks of weights belong to no round.
        """
        is_open = message.block < self.blocks.count and message.block not in self.there
        return is_open and (isinstance(message, Weights) or message.round == self.round)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keep a block; it's copied unless `payload` lies where it stays already."""
        place, block = self.part(message.block), blocks.vector_of(payload)
        if not np.may_share_memory(place, block):
            place[:] = block
        self.there.add(message.block)
        self.total = message.loss, message.weight

    def regroup(self, number: int) -> None:
        """Forget what came; round `number` goes on, or begins."""
        self.there.clear()
        if number != self.round:
            # The rest of what is void may be on its way still, into memory that was lent to it.
            self.round, self.vector = number, np.empty_like(self.vector)


class TreeExchange:
    """A mesh's: nodes of the blocks that are this worker's, added along the one tree.

    `nodes` and `held` are the worker's own; averages go to `held`. Sums are at `scale`.
    """

    carriers: tuple[type[Message], ...] = (TreeNode,)

    def __init__(self, held: Held, nodes: Nodes, *, num_shards: int, scale: float) -> None:
        self.held, self.nodes, self.scale = held, nodes, scale
        self._sums = blocks.Sums(num_shards)

    def room(self, num_bytes: int) -> memoryview:
        """Return memory for a node's block, which may never be whole."""
        return self._sums.room(num_bytes)

    def keep(self, rank: int, node: TreeNode, payload: Buffer) -> None:
        """Take over a node's block that `rank` sent, with its memory."""
        self._take(rank, node, blocks.vector_of(payload), payload)

    def contribute(self, node: TreeNode) -> None:
        """Count a block of a node of this worker; the node itself may be asked for again."""
        vector = self.nodes[node.level, node.index].vector[self.held.blocks.part(node.block)]
        vector.flags.writeable = False
        self._take(_THIS_WORKER, node, vector, None)

    def complete(self, block: int) -> None:
        """Note that all of `block` is there: `reduce` may be called, in any thread."""
        self._sums.complete(block)
        self.held.there.add(block)  # nobody else's average takes its place

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Add and average: return the summed loss and its weight; None if not finite."""
        averaged = self._sums.average(block, self.scale, out=self.held.part(block))
        if averaged is not None:
            self.held.total = averaged
        return averaged

    def clear(self) -> None:
        """Forget what came: another round begins, or another stay."""
        self._sums.clear()

    def _take(self, rank: int, node: TreeNode, vector: Vector, payload: Buffer | None) -> None:
        part = Node(node.level, node.index, vector, node.loss, node.weight)
        self._sums.take(rank, node.block, part, payload)


class RingExchange:
    """A ring's: every block that passes, with what was computed here added to it.

    `nodes`, `held` and `scale` are as in a mesh.
    """

    carriers: tuple[type[Message], ...] = (Partial,)

    def __init__(self, held: Held, nodes: Nodes, *, num_shards: int, scale: float) -> None:
        self.held, self.nodes, self.scale = held, nodes, scale
        self.passing: dict[int, Node] = {}  # block -> its sum up to here
        self._num_shards = num_shards

    def combine(self, block: int, message: Partial | None, payload: Buffer) -> tuple[float, float]:
        """Add what was computed here to `block` in `payload`, in its memory; loss and weight.

        Without a message the block begins here.
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
        """Note that `block` has been everywhere: `reduce` may be called, in any thread."""
        self.held.there.add(block)  # nobody else's average takes its place

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Average a block that has been everywhere: return the summed loss and its weight."""
        total = self.passing[block]
        self.held.total = total.loss, total.weight
        is_finite = blocks.average(total, self.scale, out=self.held.part(block))
        return self.held.total if is_finite else None

    def clear(self) -> None:
        """Forget what came: another round begins, or another stay."""
        self.passing.clear()

    def _own(self, block: int) -> Vector:
        """Return the sum of what was computed here of `block`, in shard order; not to be written.

        float32, of the block's length.
        """
        part = self.held.blocks.part(block)
        first, *others = sorted(
            self.nodes.values(), key=lambda node: reduction.span(node, self._num_shards).start
        )
        total: Vector = first.vector[part]
        for node in others:
            total = total + node.vector[part]
        return total
