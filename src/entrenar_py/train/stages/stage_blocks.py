"""The blocks of the reduced vector in a layer pipeline: each belongs to one stage."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.train.arithmetic import blocks
from entrenar_py.train.arithmetic.blocks import Blocks


class StageBlocks:
    """All blocks of a vector in which stage after stage has so many elements.

    It has the interface of `Blocks`.
    """

    def __init__(self, num_elements: Sequence[int]) -> None:
        self._stages = [Blocks(number, blocks.num_blocks(number, 1)) for number in num_elements]
        self.of_stage: list[range] = []
        self._starts: list[int] = []
        self.count = start = 0
        for number, part in zip(num_elements, self._stages, strict=True):
            self.of_stage.append(range(self.count, self.count + part.count))
            self._starts.append(start)
            self.count += part.count
            start += number

    def part(self, block: int) -> slice:
        """Return the slice of the vector that `block` covers."""
        stage, own = self._place(block)
        part = self._stages[stage].part(own)
        return slice(part.start + self._starts[stage], part.stop + self._starts[stage])

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on the wire, in bytes."""
        stage, own = self._place(block)
        return self._stages[stage].num_bytes(own)

    @property
    def num_bytes_max(self) -> int:
        """The length of the longest block on the wire, in bytes."""
        return max(stage.num_bytes_max for stage in self._stages)

    def order(self) -> range:
        """Return the blocks in sending order: from the vector's end."""
        return range(self.count - 1, -1, -1)

    def stage_of(self, block: int) -> int:
        """Return the stage that `block` belongs to."""
        return self._place(block)[0]

    def _place(self, block: int) -> tuple[int, int]:
        for stage, own in enumerate(self.of_stage):
            if block in own:
                return stage, block - own.start
        raise IndexError(f"block {block} of {self.count}")


class OwnBlocks:
    """The blocks of one stage, under their numbers among all; `part` is of the stage's vector."""

    def __init__(self, every: StageBlocks, stage: int) -> None:
        self._every, self._own = every, every.of_stage[stage]
        self._start = every.part(self._own.start).start
        self.count = self._own.stop

    def part(self, block: int) -> slice:
        """Return the slice of the stage's vector that `block` covers."""
        part = self._every.part(block)
        return slice(part.start - self._start, part.stop - self._start)

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on the wire, in bytes; 0 if it is another stage's."""
        return self._every.num_bytes(block) if block in self._own else 0

    def order(self) -> range:
        """Return the blocks in sending order: from the vector's end."""
        return self._own[::-1]
