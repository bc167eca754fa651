"""What a worker of a mesh does besides talking: it also adds and averages the blocks it owns."""

from __future__ import annotations

import numpy as np

from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Average, Message, Partial, State, TreeNode, Welcome
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.member import Member
from entrenar_py.training import blocks, reduction


class MeshMember(Member):
    """One worker, and what the others sent it of the step in work."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._sums = blocks.Sums(scenario.num_shards)

    def sizes(self) -> dict[type[Message], int]:
        """The most payload bytes that a message of each kind may bring."""
        return {**super().sizes(), TreeNode: self.vector_bytes}

    def require(self, message: Message, payload: Buffer) -> None:
        """Returns if `message` can be done here and has its payload; ProtocolError if not."""
        super().require(message, payload)
        if isinstance(message, TreeNode | Partial):
            self.require_sum(message)

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Takes over the state before `welcome.step`."""
        super().load(welcome, payload)
        self._sums.clear()

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        """Takes over the block of a node that `message` carries, with its memory."""
        assert isinstance(message, TreeNode)
        self._take(rank, message, blocks.vector_of(payload), payload)

    def contribute(self, node: TreeNode) -> None:
        """Counts a block of a node of its own; the node itself may be asked for again."""
        vector = self._nodes[node.level, node.index].vector[self._blocks.part(node.block)]
        vector.flags.writeable = False
        self._take(self.rank, node, vector, None)

    def complete(self, block: int) -> None:
        """All of `block` is there: `reduce` may be called, in any thread."""
        self._sums.complete(block)
        self._held.add(block)  # nobody else's average takes its place

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Adds and averages: the summed loss and its weight; None where that is not finite."""
        mean = self._vector[self._blocks.part(block)]
        averaged = self._sums.average(block, self.scale, out=mean)
        if averaged is not None:
            self._total = averaged
        return averaged

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Memory for the payload of `message`, which may never be whole."""
        if isinstance(message, TreeNode):
            return self._sums.room(num_bytes)
        return super().room(message, num_bytes)

    def regroup(self, number: int) -> None:
        """Forgets what came of the step in work; round `number` goes on, or begins."""
        self._sums.clear()
        self._held.clear()
        if number != self._round:
            # The rest of what is void may be on its way still, into memory that was lent to it.
            self._round, self._vector = number, np.empty_like(self._vector)

    def payload(self, message: Message) -> Buffer:
        """What `message` carries: also an averaged block, or the state that is held."""
        if isinstance(message, Average):
            return blocks.payload_of(self._vector[self._blocks.part(message.block)])
        if isinstance(message, State):
            return self.dump(self.workers[self.rank])
        return super().payload(message)

    def _take(
        self, rank: int, node: TreeNode, vector: reduction.Vector, payload: Buffer | None
    ) -> None:
        taken = reduction.Node(node.level, node.index, vector, node.loss, node.weight)
        self._sums.take(rank, node.block, taken, payload)
