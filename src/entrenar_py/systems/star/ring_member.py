"""What a worker of a ring does besides talking: it adds its own part to every block that passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Message, NonFinite, Partial, TreeNode, Welcome
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.mesh_member import MeshMember
from entrenar_py.training import blocks, reduction


class RingMember(MeshMember):
    """One worker, and the blocks that pass here."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._own: reduction.Vector | None = None  # all that was computed here, added
        self._passing: dict[int, reduction.Node] = {}  # block -> its sum up to here

    def sizes(self) -> dict[type[Message], int]:
        """The most payload bytes that a message of each kind may bring."""
        return {**super().sizes(), Partial: self.vector_bytes}

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Takes over the state before `welcome.step`."""
        super().load(welcome, payload)
        self._own = None
        self._passing.clear()

    def work(self, step: int, shards: Sequence[int]) -> list[TreeNode] | NonFinite:
        """Computes `shards` of `step`, as any worker."""
        self._own = None
        return super().work(step, shards)

    def combine(self, block: int, message: Partial | None, payload: Buffer) -> tuple[float, float]:
        """Adds what was computed here to `block` in `payload`, in its memory; loss and weight.

        Without a message the block begins here.
        """
        nodes = self._nodes.values()
        loss, weight = sum(node.loss for node in nodes), sum(node.weight for node in nodes)
        vector = self._added()[self._blocks.part(block)]
        if message is not None:
            came = blocks.vector_of(payload)
            vector = np.add(came, vector, out=came)
            loss, weight = message.loss + loss, message.weight + weight
        self._passing[block] = reduction.Node(0, 0, vector, loss, weight)
        return loss, weight

    def complete(self, block: int) -> None:
        """`block` has been everywhere: `reduce` may be called, in any thread."""
        self._held.add(block)  # nobody else's average takes its place

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Averages a block that has been everywhere: the summed loss and its weight."""
        total = self._passing[block]
        self._total = total.loss, total.weight
        mean = self._vector[self._blocks.part(block)]
        return self._total if blocks.average(total, self.scale, out=mean) else None

    def regroup(self, number: int) -> None:
        """Forgets what came of the step in work."""
        super().regroup(number)
        self._passing.clear()

    def make_held(self, step: int) -> None:
        """Makes `step` with the gradient held."""
        super().make_held(step)
        self._own = None

    def payload(self, message: Message) -> Buffer:
        """What `message` carries: also a block that goes on to the next worker."""
        if isinstance(message, Partial):
            return blocks.payload_of(self._passing[message.block].vector)
        return super().payload(message)

    def _added(self) -> reduction.Vector:
        """The sum of what was computed here, in shard order: not to be written to."""
        if self._own is None:
            num_shards = self.scenario.num_shards
            nodes = sorted(
                self._nodes.values(), key=lambda node: reduction.span(node, num_shards).start
            )
            self._own = nodes[0].vector
            for node in nodes[1:]:
                self._own = self._own + node.vector
        return self._own
