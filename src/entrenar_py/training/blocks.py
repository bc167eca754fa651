"""The reduced vector in parts: they travel and are added one by one, the last layers' first.

A sum along the tree is elementwise, so its bits do not depend on where the vector is cut.
"""

from __future__ import annotations

import numpy as np

from entrenar_py.training import reduction
from entrenar_py.training.reduction import Node, Vector


class Blocks:
    """`num_elements` float32 in `count` parts whose sizes differ by at most one."""

    def __init__(self, num_elements: int, count: int) -> None:
        assert 1 <= count <= num_elements, "no part is empty"
        self.count = count
        self._num_elements = num_elements

    def part(self, block: int) -> slice:
        """Where `block` lies in the vector."""
        return slice(
            block * self._num_elements // self.count, (block + 1) * self._num_elements // self.count
        )

    def num_bytes(self, block: int) -> int:
        """How long `block` is on its way."""
        part = range(self._num_elements)[self.part(block)]
        return 4 * len(part)

    @property
    def num_bytes_max(self) -> int:
        """How long the longest one is."""
        return 4 * -(-self._num_elements // self.count)

    def order(self) -> range:
        """In which order they go: from the end of the vector, whose gradients come first."""
        return range(self.count - 1, -1, -1)


class Sums:
    """The nodes of one step as they come, block by block, from whoever delivers them.

    What came of a delivery counts when it is whole (`deliver`), or when its block is averaged
    before that: then it has the bits that anybody's would have.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._whole: dict[int, list[Node]] = {}
        self._open: dict[int, dict[int, list[Node]]] = {}  # rank -> block -> nodes

    def take(self, rank: int, block: int, node: Node) -> None:
        """A node of the delivery that `rank` has begun; its vector is only `block` of it."""
        self._open.setdefault(rank, {}).setdefault(block, []).append(node)

    def deliver(self, rank: int) -> None:
        """All that `rank` has begun to deliver is there."""
        for block, nodes in self._open.pop(rank, {}).items():
            self._whole.setdefault(block, []).extend(nodes)

    def forget(self, rank: int) -> None:
        """What `rank` has begun to deliver will never be whole."""
        self._open.pop(rank, None)

    def clear(self) -> None:
        """The next step, or the same one again."""
        self._whole.clear()
        self._open.clear()

    def root(self, block: int) -> Node:
        """The sum of all shards, in memory of one of the nodes; ValueError where some lack."""
        nodes = self._whole.pop(block, [])
        for delivered in self._open.values():
            nodes += delivered.pop(block, [])
        return reduction.root(nodes, self._num_shards)


def average(total: Node, scale: float, *, out: Vector) -> bool:
    """Divides `total` by what it counts and by `scale`, into `out`; whether it is finite."""
    np.divide(total.vector, np.float32(total.weight * scale), out=out)
    return bool(np.isfinite(out).all() and np.isfinite(total.loss))


def payload_of(vector: Vector) -> memoryview:
    """`vector` as it travels, little-endian; a view of it where that is native."""
    return vector.astype("<f4", copy=False).data.cast("B")


def vector_of(payload: bytes | bytearray | memoryview) -> Vector:
    """The float32 elements in `payload`, little-endian; a view of it where that is native."""
    return np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
