"""The averaged gradient, or the new weights, of the step in work: the blocks that a worker has."""

from __future__ import annotations

import numpy as np

from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Average, Weights
from entrenar_py.training import blocks
from entrenar_py.training.blocks import Blocks
from entrenar_py.training.reduction import Vector


class Held:
    """The part of one step that a worker holds, never in the memory that training uses.

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
