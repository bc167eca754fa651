"""The one binary tree along which gradients are added.

Node (level j, index i) covers the logical shards [i*2^j, min((i+1)*2^j, S)). It equals its left
child plus its right child, or the left child alone at the ragged edge. Float addition is not
associative. Because the tree is fixed, the sum has the same bits no matter which worker computed a
leaf, in which order nodes arrive, and how often a leaf is computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: the sums of `vector` (float32), `loss` and `weight` over its shards."""

    level: int
    index: int
    vector: Vector
    loss: float
    weight: float


def height(num_shards: int) -> int:
    """Return the level of the root: ceil(log2(num_shards))."""
    return (num_shards - 1).bit_length()


def span(node: Node, num_shards: int) -> range:
    """Return the logical shards under `node`."""
    return shards_under(node.level, node.index, num_shards)


def shards_under(level: int, index: int, num_shards: int) -> range:
    """Return the logical shards under node (`level`, `index`); empty if the node doesn't exist."""
    if level > height(num_shards):
        return range(0)
    return range(index << level, min((index + 1) << level, num_shards))


def fold(
    nodes: Iterable[Node], num_shards: int, plus: Callable[[Node, Node], Node] | None = None
) -> list[Node]:
    """Add siblings until none are left; return the remaining nodes in shard order.

    `nodes` are disjoint, in any order, and consumed one at a time. For n consecutive leaves in
    order, at most log2(n) + 1 vectors are alive if the first leaf is shard 0, otherwise 2 log2(n) +
    1. `add` adds writable vectors in place; `plus` replaces it for vectors on a device. Raises
    ValueError for a node that doesn't belong to a tree over `num_shards` leaves, or that covers a
    shard of an earlier node.
    """
    waiting: dict[tuple[int, int], Node] = {}
    top = height(num_shards)
    covered: set[int] = set()
    for node in nodes:
        _cover(covered, node, num_shards)
        while node.level < top:
            sibling = waiting.pop((node.level, node.index ^ 1), None)
            if sibling is not None:
                node = (plus or add)(node, sibling)
            elif _at_ragged_edge(node, num_shards):
                node = Node(node.level + 1, node.index // 2, node.vector, node.loss, node.weight)
            else:
                break
        waiting[node.level, node.index] = node
    return sorted(waiting.values(), key=lambda node: span(node, num_shards).start)


def add(node: Node, sibling: Node) -> Node:
    """Return the parent of two siblings, left plus right, in place if one is writable."""
    left, right = (node, sibling) if node.index < sibling.index else (sibling, node)
    writable = (child.vector for child in (left, right) if child.vector.flags.writeable)
    assert left.vector.size == right.vector.size, "siblings are sums of the same elements"
    total = next(writable, None)
    if total is None:
        total = np.empty_like(left.vector)

    def of(parts: Sequence[slice]) -> None:
        for part in parts:
            np.add(left.vector[part], right.vector[part], out=total[part])

    share_out(cut(len(total)), of)
    loss, weight = left.loss + right.loss, left.weight + right.weight
    return Node(left.level + 1, left.index // 2, total, loss, weight)


_PART = 2**20  # elements that a thread processes at a time
_ALONE = 2**22  # up to this many elements, one thread is as fast


def cut(length: int) -> list[slice]:
    """Return slices that cover `length` elements, for `share_out`; one slice if they are few."""
    size = _PART if length > _ALONE else max(length, 1)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def root(nodes: Iterable[Node], num_shards: int) -> Node:
    """Return the sum of all leaves.

    Raises ValueError, which names the shards, if any are missing.
    """
    folded = fold(nodes, num_shards)
    if len(folded) != 1 or folded[0].level != height(num_shards):
        present = {shard for node in folded for shard in span(node, num_shards)}
        missing = sorted(set(range(num_shards)) - present)
        raise ValueError(f"shards {missing} of {num_shards} are missing from the reduction")
    return folded[0]


def _cover(covered: set[int], node: Node, num_shards: int) -> None:
    """Add the shards under `node` to `covered`, or raise the ValueError that `fold` describes."""
    shards = span(node, num_shards)
    if node.index < 0 or not shards:
        raise ValueError(f"{_name(node)} does not belong to a tree over {num_shards} shards")
    if not covered.isdisjoint(shards):
        twice = sorted(covered.intersection(shards))
        raise ValueError(f"{_name(node)} was given twice: shards {twice} were already given")
    covered.update(shards)


def _name(node: Node) -> str:
    return f"node (level {node.level}, index {node.index})"


def _at_ragged_edge(node: Node, num_shards: int) -> bool:
    return node.index % 2 == 0 and (node.index + 1) << node.level >= num_shards


def num_nodes(start: int, end: int) -> int:
    """Return the smallest number of tree nodes that cover shards `start` to `end - 1`."""
    count = 0
    while start < end:
        longest = 1 << ((end - start).bit_length() - 1)
        start += min(start & -start or longest, longest)  # a node starts at a multiple of its width
        count += 1
    return count


T = TypeVar("T")


class Aside:
    """A background thread that runs functions in the order of the calls."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin `work`; return a function that waits for its result or raises its exception."""
        return self._pool.submit(work).result


def at_once(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work` in this thread.

    Return a function that returns its result, as `Aside.start` does.
    """
    result = work()
    return lambda: result


def share_out(
    items: Sequence[T], work: Callable[[Sequence[T]], None], *, threads_max: int = 8
) -> None:
    """Call `work` with a part of `items` in each of several threads, and wait for all.

    Beyond `threads_max` threads, work on small items would only wait for the interpreter.
    """
    threads = min(threads_max, os.cpu_count() or 1, len(items))
    if threads < 2:
        work(items)
        return
    with ThreadPoolExecutor(threads) as pool:  # not kept: a process may fork
        for done in [pool.submit(work, items[number::threads]) for number in range(threads)]:
            done.result()


# The weighted mean of vectors, along the fixed tree.
#
# A float32 times a weight below 2**29 is exact in float64, and a sum of such products can't
# overflow there. So the mean is rounded to float32 only once, and the mean of a single vector is
# that vector.

ELEMENTS = 2**16  # elements averaged at a time; each takes 8 bytes per vector


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[int]) -> Vector:
    """Return sum(weight * vector) / sum(weights), float32 [num_elements].

    `vectors` are finite and of equal length. They are added along the tree in their order, so the
    same order gives the same bits. Raises ValueError if all weights are 0.
    """
    total = sum(weights)
    if not total:
        raise ValueError("all weights are 0: their mean is not defined")
    mean = np.empty_like(vectors[0])
    for begin in range(0, len(mean), ELEMENTS):
        part = slice(begin, begin + ELEMENTS)
        leaves = (
            _leaf(index, vector[part], weight)
            for index, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
        )
        mean[part] = root(leaves, len(vectors)).vector / float(total)
    return mean


def _leaf(index: int, vector: Vector, weight: int) -> Node:
    """Return a leaf of the tree in float64. The tree adds in the dtype of its leaves."""
    product = np.multiply(vector, float(weight), dtype=np.float64)
    return Node(0, index, cast("Vector", product), 0.0, float(weight))


def first_not_finite(vector: Vector) -> int | None:
    """Return the index of the first NaN or Inf in `vector`, or None."""
    for begin in range(0, len(vector), ELEMENTS):
        finite = np.isfinite(vector[begin : begin + ELEMENTS])
        if not finite.all():
            return begin + int(finite.argmin())
    return None
