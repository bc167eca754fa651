"""The bytes that each rank must send, by hand and by the trainers' own block and node counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.clauses import reductions
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Shard, Traffic
from entrenar_py.train.arithmetic import blocks, reduction
from tests.check.clauses import traces


def subject(system: str, **changes: object) -> Scenario:
    """Return a run of one step: vectors of 10 elements, in blocks of 12, 12 and 16 bytes."""
    usual = {"workload": "vectors", "world_size": 3, "num_shards": 4, "num_steps": 1, "width": 10}
    options = {"options": {"block_bytes": 16}}
    return traces.scenario(system=system, **{**usual, **options, **changes})


def expected(system: str, ranks: tuple[int, ...] = (0, 0, 1, 2)) -> reductions.Bytes | None:
    """Return the expected bytes if `ranks` computed a shard each."""
    shards = [
        Shard(
            step=0, epoch=0, rank=rank, shard=shard, ids=(), loss_sum=0.0, weight=1.0, finite=True
        )
        for shard, rank in enumerate(ranks)
    ]
    return reductions.expected_bytes(traces.hand_written(*shards, subject=subject(system)))


def test_around_a_ring() -> None:
    """Rank 0 owns the first 12 bytes: it does not send their sum, nor does rank 2 their average."""
    assert expected("ring") == {
        (0, "worker", "sent"): 80 - 12 - 12,
        (0, "worker", "got"): 80 - 12 - 16,
        (1, "worker", "sent"): 80 - 12 - 16,
        (1, "worker", "got"): 80 - 12 - 12,
        (2, "worker", "sent"): 80 - 16 - 12,
        (2, "worker", "got"): 80 - 16 - 12,
        **NOTHING,
    }


def test_in_a_mesh() -> None:
    """Each rank sends a node of each other block to its owner, and its average to two ranks."""
    assert expected("mesh_simulated") == {
        (0, "worker", "sent"): 28 + 2 * 12,
        (0, "worker", "got"): 2 * 12 + 28,
        (1, "worker", "sent"): 28 + 2 * 12,
        (1, "worker", "got"): 2 * 12 + 28,
        (2, "worker", "sent"): 24 + 2 * 16,
        (2, "worker", "got"): 2 * 16 + 24,
        **NOTHING,
    }


def test_more_nodes_than_workers() -> None:
    """Shards 0 and 2 of rank 0 are no common node, so it sends both."""
    found = expected("mesh", (0, 1, 0, 2))
    assert found is not None
    assert found[0, "worker", "sent"] == 2 * 28 + 2 * 12
    assert found[2, "worker", "got"] == 3 * 16 + 24


def test_what_can_not_be_counted() -> None:
    """None is returned for a shard of no rank, or without the blocks' size."""
    assert expected("mesh", (0, 1, 2)) is None
    bare = subject("ring", options={})
    assert reductions.expected_bytes(traces.hand_written(subject=bare)) is None


def test_in_a_star() -> None:
    """The coordinator carries everything."""
    found = expected("parameter_server")
    assert found is not None
    assert found.pop((None, "worker", "sent")) == found.pop((None, "worker", "got")) == 120
    assert set(found.values()) == {40}
    assert len(found) == 6


NOTHING = {
    (rank, peer, direction): 0
    for rank, peer in ((None, "worker"), *((rank, "coordinator") for rank in range(3)))
    for direction in ("sent", "got")
}


@given(st.integers(2, 8), st.integers(1, 500), st.integers(4, 600))
def test_a_ring_sends_what_the_formula_says(world_size: int, length: int, block_bytes: int) -> None:
    """All ranks together send and get 2 (N - 1) times the vector, in any blocks."""
    sizes = reductions.block_bytes(
        subject("ring", width=length, options={"block_bytes": block_bytes})
    )
    assert sizes is not None
    found = reductions._ring(sizes, [1] * world_size)
    for direction in ("sent", "got"):
        total = sum(n for (_, _, way), n in found.items() if way == direction)
        assert total == 2 * (world_size - 1) * 4 * length


@given(st.integers(1, 500), st.integers(4, 600))
def test_blocks_are_cut_as_the_trainers_cut_them(length: int, block_bytes: int) -> None:
    """The check's sizes of blocks equal the trainers'."""
    sizes = reductions.block_bytes(
        subject("ring", width=length, options={"block_bytes": block_bytes})
    )
    assert sizes is not None
    cut = blocks.Blocks(length, len(sizes))
    assert sizes == [cut.num_bytes(block) for block in range(cut.count)]
    assert max(sizes) <= block_bytes


@given(st.integers(1, 40), st.data())
def test_nodes_are_folded_as_the_trainers_fold_them(num_shards: int, data: st.DataObject) -> None:
    """The check's number of nodes equals the trainers', for any shards of any tree."""
    held = data.draw(st.sets(st.integers(0, num_shards - 1), min_size=1))
    leaves = [reduction.Node(0, shard, blocks.vector_of(bytes(4)), 0.0, 0.0) for shard in held]
    assert reductions.num_nodes(held, num_shards) == len(reduction.fold(leaves, num_shards))


@pytest.mark.parametrize(
    ("messages", "payload_bytes", "most"), [(0, 0, 0), (1, 4, 304), (3, 2**23 + 4, 3 * 304 + 96)]
)
def test_what_may_come_beside_payloads(messages: int, payload_bytes: int, most: int) -> None:
    """Each message may have a header, and each frame a prefix."""
    one = Traffic(
        rank=0,
        peer="worker",
        direction="sent",
        message="Average",
        messages=messages,
        payload_bytes=payload_bytes,
        bytes=0,
    )
    assert reductions.beside_bytes_max(one) == most
