"""The reduction tree, and the weighted mean along it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.reduction import (
    ELEMENTS,
    Node,
    Vector,
    first_not_finite,
    weighted_mean,
)

SIZE = 7
shard_counts = st.integers(1, 40)


def _leaf(shard: int, seed: int = 0) -> Node:
    """Return a leaf whose numbers cancel badly: sixteen decades of magnitudes, both signs."""
    rng = np.random.default_rng([seed, shard])
    scale = 10.0 ** rng.uniform(-8, 8, SIZE)
    vector = (rng.standard_normal(SIZE) * scale).astype(np.float32)
    return Node(0, shard, vector, float(rng.standard_normal() * 1e8), float(rng.integers(1, 9)))


def _defined(level: int, index: int, num_shards: int, seed: int = 0) -> Node:
    """Return node (level, index) by the definition: left plus right child, or left alone."""
    if level == 0:
        return _leaf(index, seed)
    left = _defined(level - 1, 2 * index, num_shards, seed)
    if (2 * index + 1) * 2 ** (level - 1) >= num_shards:
        return Node(level, index, left.vector, left.loss, left.weight)
    right = _defined(level - 1, 2 * index + 1, num_shards, seed)
    return Node(
        level,
        index,
        left.vector + right.vector,
        left.loss + right.loss,
        left.weight + right.weight,
    )


def _expected(num_shards: int, seed: int = 0) -> Node:
    return _defined(math.ceil(math.log2(num_shards)), 0, num_shards, seed)


def _bits(node: Node) -> tuple[int, int, bytes, str, float]:
    return node.level, node.index, node.vector.tobytes(), node.loss.hex(), node.weight


@given(shard_counts, st.integers(0, 9), st.data())
def test_any_partition_and_any_arrival_give_the_same_bits(
    num_shards: int, seed: int, data: st.DataObject
) -> None:
    """Shards are dealt to workers at random, folded there, and their nodes reduced in any order."""
    owners = data.draw(st.lists(st.integers(0, 7), min_size=num_shards, max_size=num_shards))
    nodes: list[Node] = []
    for worker in data.draw(st.permutations(range(8))):
        owned = [shard for shard in range(num_shards) if owners[shard] == worker]
        order = data.draw(st.permutations(owned))
        nodes += reduction.fold((_leaf(shard, seed) for shard in order), num_shards)
    total = reduction.root(data.draw(st.permutations(nodes)), num_shards)
    assert _bits(total) == _bits(_expected(num_shards, seed))


@given(shard_counts, st.integers(1, 9), st.data())
def test_recomputation_gives_the_same_bits(
    num_shards: int, num_workers: int, data: st.DataObject
) -> None:
    """A dead worker's nodes are discarded, and others compute its shards again in pieces."""
    cuts = sorted(data.draw(st.sets(st.integers(0, num_shards), max_size=num_workers)))
    runs = [range(a, b) for a, b in pairwise([0, *cuts, num_shards])]
    lost = data.draw(st.integers(0, len(runs) - 1))
    nodes = []
    for number, run in enumerate(runs):
        folded = reduction.fold(map(_leaf, run), num_shards)
        nodes += folded if number != lost else []
    for shard in data.draw(st.permutations(runs[lost])):
        nodes += reduction.fold([_leaf(shard)], num_shards)
    assert _bits(reduction.root(nodes, num_shards)) == _bits(_expected(num_shards))


@given(shard_counts, st.data())
def test_aggregators_can_be_stacked(num_shards: int, data: st.DataObject) -> None:
    """Folding nodes that are folded already changes nothing."""
    nodes = [_leaf(shard) for shard in range(num_shards)]
    for _ in range(data.draw(st.integers(0, 3))):
        nodes = data.draw(st.permutations(nodes))
        cut = data.draw(st.integers(0, len(nodes)))
        nodes = reduction.fold(nodes[:cut], num_shards) + reduction.fold(nodes[cut:], num_shards)
    assert _bits(reduction.root(nodes, num_shards)) == _bits(_expected(num_shards))


@given(shard_counts, st.data())
def test_folded_nodes_are_few_and_in_order(num_shards: int, data: st.DataObject) -> None:
    """A run of n shards becomes at most max(1, 2 log2 n) nodes that cover it in order."""
    start = data.draw(st.integers(0, num_shards - 1))
    run = range(start, data.draw(st.integers(start + 1, num_shards)))
    nodes = reduction.fold(map(_leaf, run), num_shards)
    assert [s for node in nodes for s in reduction.span(node, num_shards)] == list(run)
    assert len(nodes) <= max(1, 2 * math.log2(len(run)))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 8, 13, 16, 37])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_few_vectors_are_alive(num_shards: int, start: int) -> None:
    """At most floor(log2 n) + 1 vectors are alive from the first shard on, else 2 log2(n) + 1."""
    run = range(min(start, num_shards - 1), num_shards)
    vectors: list[weakref.ref[Vector]] = []
    alive: list[int] = []

    def leaves() -> Iterator[Node]:
        for shard in run:
            leaf = _leaf(shard)
            vectors.append(weakref.ref(leaf.vector))
            alive.append(sum(vector() is not None for vector in vectors))
            yield leaf
            del leaf

    reduction.fold(leaves(), num_shards)
    levels = math.log2(len(run))
    assert max(alive) <= (math.floor(levels) + 1 if run.start == 0 else 2 * levels + 1)


@given(shard_counts, st.data())
def test_a_shard_given_twice_is_refused(num_shards: int, data: st.DataObject) -> None:
    """A repeated leaf, or a node above it, is refused at any place among the others."""
    leaves = [_leaf(shard) for shard in range(num_shards)]
    again = _defined(data.draw(st.integers(0, reduction.height(num_shards))), 0, num_shards)
    leaves.insert(data.draw(st.integers(0, num_shards)), again)
    with pytest.raises(ValueError, match=r"was given twice: shards .* were already given"):
        reduction.root(leaves, num_shards)


@given(shard_counts, st.data())
def test_missing_shards_are_named(num_shards: int, data: st.DataObject) -> None:
    """The error names all missing shards and no others."""
    missing = sorted(data.draw(st.sets(st.integers(0, num_shards - 1), min_size=1)))
    leaves = [_leaf(shard) for shard in range(num_shards) if shard not in missing]
    with pytest.raises(ValueError) as caught:
        reduction.root(leaves, num_shards)
    assert str(caught.value) == f"shards {missing} of {num_shards} are missing from the reduction"


@pytest.mark.parametrize(
    ("level", "index", "num_shards"), [(0, 5, 5), (0, 6, 5), (0, -1, 5), (4, 0, 5), (1, 3, 5)]
)
def test_nodes_of_another_tree_are_refused(level: int, index: int, num_shards: int) -> None:
    """Nodes beyond the last shard, before the first and above the root are refused."""
    node = Node(level, index, np.zeros(1, np.float32), 0.0, 0.0)
    with pytest.raises(
        ValueError, match=f"index {index}.* does not belong to a tree over {num_shards}"
    ):
        reduction.fold([node], num_shards)


@pytest.mark.parametrize(
    ("num_shards", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (40, 6)]
)
def test_height(num_shards: int, level: int) -> None:
    """The height is ceil(log2 S)."""
    assert reduction.height(num_shards) == level


def test_the_ragged_edge_climbs_alone() -> None:
    """With five shards the last is a whole subtree by itself: ((0+1)+(2+3))+4."""
    values = [np.float32(v) for v in (1e8, 1.0, -1e8, 1.0, 0.5)]
    leaves = [
        Node(0, shard, np.array([value]), float(value), 1.0) for shard, value in enumerate(values)
    ]
    total = reduction.root(leaves, 5)
    a, b, c, d, e = values
    assert total.vector[0] == ((a + b) + (c + d)) + e
    assert (total.level, total.index, total.weight) == (3, 0, 5.0)
    assert reduction.span(Node(1, 2, total.vector, 0, 0), 5) == range(4, 5)


@given(shard_counts, st.integers(0, 99))
def test_the_sum_is_the_sum(num_shards: int, seed: int) -> None:
    """The sum is within height * u * sum|x| of the exact one: one rounding a level."""
    leaves = [_leaf(shard, seed) for shard in range(num_shards)]
    vectors: list[Vector] = [leaf.vector.copy() for leaf in leaves]
    total = reduction.root(leaves, num_shards)
    for element in range(SIZE):
        column = [float(vector[element]) for vector in vectors]
        bound = reduction.height(num_shards) * 2.0**-24 * 1.01 * math.fsum(map(abs, column))
        assert abs(float(total.vector[element]) - math.fsum(column)) <= bound


def test_negative_zero_and_nan_stay() -> None:
    """A single shard passes through bit by bit, and a NaN is never lost."""
    vector = np.array([-0.0, np.nan, np.inf], np.float32)
    bits = vector.tobytes()
    assert reduction.root([Node(0, 0, vector, 0.0, 0.0)], 1).vector.tobytes() == bits
    leaves = [Node(0, s, np.full(1, [1, np.nan, 1][s], np.float32), 0.0, 1.0) for s in range(3)]
    assert np.isnan(reduction.root(leaves, 3).vector).all()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    values=st.lists(st.tuples(FLOATS, st.integers(0, 2**40)), min_size=1, max_size=9).filter(
        lambda drawn: any(weight for _, weight in drawn)
    )
)
def test_the_mean_is_that_of_exact_arithmetic(values: list[tuple[float, int]]) -> None:
    """One rounding to float32, and one in float64 for each product, sum and quotient."""
    vectors = [np.array([value], np.float32) for value, _ in values]
    weights = [weight for _, weight in values]
    terms = [Fraction(value) * weight for value, weight in values]
    exact = sum(terms, Fraction()) / sum(weights)
    size = sum(map(abs, terms), Fraction()) / sum(weights)
    got = Fraction(float(weighted_mean(vectors, weights)[0]))
    in_float64 = (len(values).bit_length() + 4) * size / 2**53
    assert abs(got - exact) <= (abs(exact) + in_float64) / 2**24 + in_float64 + Fraction(1, 2**150)


@given(value=FLOATS, weight=st.integers(1, 2**63))
def test_the_mean_of_one_vector_is_that_vector(value: float, weight: int) -> None:
    """Bit for bit, for any weight."""
    vector = np.array([value], np.float32)
    assert weighted_mean([vector], [weight]).tobytes() == vector.tobytes()


def test_nothing_overflows() -> None:
    """The largest numbers with the largest weights have a finite mean."""
    largest = np.full(3, np.finfo(np.float32).max)
    assert weighted_mean([largest] * 5, [2**64 - 1] * 5).tobytes() == largest.tobytes()


def test_long_vectors_are_averaged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces do not show, and the vectors do not change."""
    drawn = np.random.default_rng(0).standard_normal((3, 2 * ELEMENTS + 5), np.float32)
    before = drawn.tobytes()
    in_pieces = weighted_mean(list(drawn), [1, 2, 3])
    assert drawn.tobytes() == before
    monkeypatch.setattr(reduction, "ELEMENTS", 10**9)
    assert weighted_mean(list(drawn), [1, 2, 3]).tobytes() == in_pieces.tobytes()


def test_an_empty_vector_has_a_mean() -> None:
    """It is empty."""
    assert weighted_mean([np.empty(0, np.float32)] * 2, [1, 2]).shape == (0,)


def test_no_weight() -> None:
    """The mean of nothing is an error."""
    with pytest.raises(ValueError, match="all weights are 0"):
        weighted_mean([np.ones(2, np.float32)], [0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, ELEMENTS - 1, ELEMENTS, 2 * ELEMENTS + 3])
def test_the_first_that_is_not_finite(value: float, place: int) -> None:
    """It is found in any piece."""
    vector = np.zeros(2 * ELEMENTS + 5, np.float32)
    assert first_not_finite(vector) is None
    vector[place:] = value
    assert first_not_finite(vector) == place
