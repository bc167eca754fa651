"""The reduced vector: the place of each tensor, and its blocks."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import blocks, reduction
from entrenar_py.train.arithmetic.blocks import Blocks, Layout, Sums
from entrenar_py.train.arithmetic.reduction import Node, Vector
from entrenar_py.train.arithmetic.tensors import TensorSpec

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
all_specs = st.lists(
    st.tuples(shapes, st.sampled_from(["trainable", "frozen", "buffer"]), st.booleans()),
    max_size=6,
).map(
    lambda drawn: tuple(
        TensorSpec(f"t{i}", shape, role, decayed)  # type: ignore[arg-type]
        for i, (shape, role, decayed) in enumerate(drawn)
    )
)


@given(all_specs)
def test_slices_tile_the_vector(specs: tuple[TensorSpec, ...]) -> None:
    """Trainable tensors come first, then buffers, in order, without gaps or frozen tensors."""
    layout = Layout(specs)
    parts = {**layout.trainable, **layout.buffers}
    expected = [
        *(spec for spec in specs if spec.role == "trainable"),
        *(spec for spec in specs if spec.role == "buffer"),
    ]
    assert list(parts) == [spec.name for spec in expected]
    end = 0
    for spec in expected:
        assert parts[spec.name] == slice(end, end + prod(spec.shape))
        end += prod(spec.shape)
    assert layout.num_trainable == sum(p.stop - p.start for p in layout.trainable.values())


@given(all_specs)
def test_locate_finds_every_position(specs: tuple[TensorSpec, ...]) -> None:
    """`locate` inverts the slices, and raises outside the vector."""
    layout = Layout(specs)
    found = []
    for name, part in {**layout.trainable, **layout.buffers}.items():
        found += [(name, element) for element in range(part.stop - part.start)]
    assert [layout.locate(position) for position in range(len(found))] == found
    for outside in (-1, len(found)):
        with pytest.raises(IndexError, match=f"position {outside} lies outside"):
            layout.locate(outside)


@given(all_specs)
def test_decayed_marks_decayed_trainable_tensors(specs: tuple[TensorSpec, ...]) -> None:
    """The mask is 1 on decayed tensors and 0 elsewhere, or None if none decays."""
    layout = Layout(specs)
    marks = [
        float(spec.decayed)
        for spec in specs
        if spec.role == "trainable"
        for _ in range(prod(spec.shape))
    ]
    if not any(marks):
        assert layout.decayed is None
        return
    assert layout.decayed is not None
    assert layout.decayed.dtype == np.float32
    assert layout.decayed.tolist() == marks


NUM_ELEMENTS = 11


def leaves(num_shards: int) -> list[Node]:
    """Return a leaf for each shard, of all magnitudes, so that the order of additions shows."""
    rng = np.random.default_rng(num_shards)
    magnitudes = 10.0 ** rng.integers(-6, 6, (num_shards, 1))
    vectors = rng.standard_normal((num_shards, NUM_ELEMENTS)) * magnitudes
    return [
        Node(0, shard, vector.astype(np.float32), float(shard), shard + 1.0)
        for shard, vector in enumerate(vectors)
    ]


def cut(node: Node, part: slice) -> Node:
    """Return `node` with only `part` of its vector, in memory of its own."""
    return Node(node.level, node.index, node.vector[part].copy(), node.loss, node.weight)


# --- the parts ----------------------------------------------------------------------------------


@given(st.integers(1, 10**9), st.data())
def test_parts_cover_the_vector(num_elements: int, data: st.DataObject) -> None:
    """The blocks are contiguous and not empty, and their sizes differ by at most one."""
    count = data.draw(st.integers(1, min(num_elements, 300)))
    cutting = Blocks(num_elements, count)
    parts = [cutting.part(block) for block in range(count)]
    ends = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == ends[:-1]
    assert ends[-1] == num_elements
    sizes = [cutting.num_bytes(block) for block in range(count)]
    assert sizes == [4 * (part.stop - part.start) for part in parts]
    assert min(sizes) >= max(4, max(sizes) - 4)
    assert max(sizes) == cutting.num_bytes_max


def test_the_end_of_the_vector_goes_first() -> None:
    """Every block is sent once, last block first, as gradients arrive from the last layer on."""
    assert list(Blocks(NUM_ELEMENTS, 4).order()) == [3, 2, 1, 0]


@pytest.mark.parametrize("count", [0, NUM_ELEMENTS + 1])
def test_no_part_is_empty(count: int) -> None:
    """Fewer than one block, or more blocks than elements, are an assertion error."""
    with pytest.raises(AssertionError, match="no part is empty"):
        Blocks(NUM_ELEMENTS, count)


# --- the sums -----------------------------------------------------------------------------------


@given(num_shards=st.integers(1, 9), count=st.integers(1, NUM_ELEMENTS), order=st.randoms())
def test_blocks_sum_to_the_whole_vector_s_bits(
    num_shards: int, count: int, order: random.Random
) -> None:
    """The sum has the same bits whichever worker delivers which shards, in any order."""
    cutting, sums = Blocks(NUM_ELEMENTS, count), Sums(num_shards)
    deliveries = [
        (leaf.index % 3, block, leaf) for leaf in leaves(num_shards) for block in range(count)
    ]
    order.shuffle(deliveries)
    for rank, block, leaf in deliveries:
        sums.take(rank, block, cut(leaf, cutting.part(block)))
    sums.deliver(0)
    roots = [sums.root(block) for block in range(count)]
    whole = reduction.root(leaves(num_shards), num_shards)
    assert np.concatenate([one.vector for one in roots]).tobytes() == whole.vector.tobytes()
    assert {(one.loss, one.weight) for one in roots} == {(whole.loss, whole.weight)}


def two_workers() -> tuple[Sums, list[Node]]:
    """Four shards: worker 0 has sent all blocks of the first two, worker 1 of the others."""
    sums, nodes = Sums(4), leaves(4)
    for leaf in nodes:
        for block in (0, 1):
            sums.take(leaf.index // 2, block, cut(leaf, slice(None)))
    return sums, nodes


def expected() -> bytes:
    """Return the sum of all four shards."""
    return reduction.root(leaves(4), 4).vector.tobytes()


def test_a_block_counts_before_its_delivery_is_whole() -> None:
    """A block that was averaged stays when its sender is lost. The sender's other blocks go."""
    sums, _ = two_workers()
    assert sums.root(1).vector.tobytes() == expected()
    sums.forget(1)
    with pytest.raises(ValueError, match=r"shards \[2, 3\] of 4 are missing"):
        sums.root(0)


def test_what_is_lost_is_sent_again_by_another() -> None:
    """Shards that another worker computes again are not added to the forgotten ones."""
    sums, nodes = two_workers()
    sums.deliver(0)
    sums.forget(1)
    for leaf in nodes[2:]:
        sums.take(0, 0, cut(leaf, slice(None)))
    assert sums.root(0).vector.tobytes() == expected()


def test_a_whole_delivery_outlives_its_worker() -> None:
    """A delivered sum no longer depends on its worker."""
    sums, _ = two_workers()
    for rank in (0, 1):
        sums.deliver(rank)
        sums.forget(rank)
    assert sums.root(0).vector.tobytes() == sums.root(1).vector.tobytes() == expected()


def test_what_came_twice_is_no_sum() -> None:
    """A shard that two workers delivered raises an error that names it."""
    sums, nodes = two_workers()
    sums.deliver(1)
    sums.take(0, 1, cut(nodes[3], slice(None)))
    with pytest.raises(ValueError, match=r"given twice: shards \[3\]"):
        sums.root(1)


def test_a_step_begins_with_nothing() -> None:
    """Clearing discards the whole and the unfinished deliveries of the step before."""
    sums, _ = two_workers()
    sums.deliver(0)
    sums.clear()
    with pytest.raises(ValueError, match=r"shards \[0, 1, 2, 3\] of 4 are missing"):
        sums.root(0)


@pytest.mark.parametrize("first", [0, 3])
def test_memory_is_used_again(first: int) -> None:
    """Memory is reused although blocks have two sizes and all may arrive before any is averaged."""
    cutting, sums = Blocks(NUM_ELEMENTS, 4), Sums(2)
    order = [first, *(block for block in cutting.order() if block != first)]
    places: list[set[int]] = []
    for _ in range(10):
        rooms = []
        for block in order:
            for leaf in leaves(2):
                room = sums.room(cutting.num_bytes(block))
                vector = blocks.vector_of(room)
                vector[:] = leaf.vector[cutting.part(block)]
                node = Node(0, leaf.index, vector, leaf.loss, leaf.weight)
                sums.take(leaf.index, block, node, room)
                rooms.append(room)
        out = np.empty(NUM_ELEMENTS, np.float32)
        for block in order:
            sums.average(block, 1.0, out=out[cutting.part(block)])
        whole = reduction.root(leaves(2), 2)
        assert out.tobytes() == (whole.vector / np.float32(whole.weight)).tobytes()
        places.append({np.frombuffer(room, np.uint8).ctypes.data for room in rooms})
        sums.clear()
    assert all(place == places[1] for place in places[1:])


# --- how it travels, and its average --------------------------------------------------------------


def test_a_vector_travels_as_it_is() -> None:
    """The bytes are little-endian and exact, and a view where that is the native order."""
    bits = np.array([0x80000000, 0x7FC00123, 0x00000001, 0xFF800000], "<u4")
    vector: Vector = bits.view("<f4").astype(np.float32, copy=False)
    payload = blocks.payload_of(vector[1:])
    assert bytes(payload) == bits.tobytes()[4:]
    assert blocks.vector_of(bits.tobytes()).tobytes() == vector.tobytes()
    assert np.shares_memory(np.frombuffer(payload, "<f4"), vector)


@pytest.mark.parametrize(
    ("value", "loss", "finite"),
    [(6.0, 1.0, True), (np.inf, 1.0, False), (np.nan, 1.0, False), (6.0, float("nan"), False)],
)
def test_an_average_says_whether_it_is_finite(value: float, loss: float, finite: bool) -> None:
    """The average is the sum over weight and scale. The loss is only checked to be finite."""
    out = np.empty(2, np.float32)
    vector = np.array([value, 3.0], np.float32)
    sums = blocks.Sums(1)
    sums.take(0, 4, Node(0, 0, vector, loss, 1.5))
    assert sums.average(4, 2.0, out=out) == ((loss, 1.5) if finite else None)
    assert out.tobytes() == (vector / np.float32(3.0)).tobytes()
