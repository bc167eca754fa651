"""The cost of the fixed tree against the obvious order of summation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entrenar_py.train.arithmetic import reduction

NUM_SHARDS = 8
SHARD_BYTES = 64 * 2**20


def test_tree_against_rank_order(beside: Callable[..., list[float]]) -> None:
    """Eight shards of 64 MB along the tree, and by numpy one after the other, both in place."""
    vectors = [np.ones(SHARD_BYTES // 4, np.float32) for _ in range(NUM_SHARDS)]
    nodes = [reduction.Node(0, index, vector, 0.0, 1.0) for index, vector in enumerate(vectors)]

    def rank_order() -> None:
        for vector in vectors[1:]:
            vectors[0] += vector

    beside(
        "tree reduction / numpy rank order (goal 1.20x)",
        ours=lambda: reduction.root(nodes, NUM_SHARDS),
        peer=rank_order,
        rounds=9,
    )
