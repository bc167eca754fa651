"""Batches, logical shards and runs are complete, disjoint and in order."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.sharding import Position

ids = st.lists(st.integers(), max_size=50)


@given(ids, st.integers(1, 60))
def test_cut_keeps_everything_in_order(given_ids: list[int], num_parts: int) -> None:
    """The parts, concatenated, are the ids that were cut."""
    parts = sharding.cut(given_ids, num_parts)
    assert len(parts) == num_parts
    assert list(chain.from_iterable(parts)) == given_ids


@given(ids, st.integers(1, 60))
def test_cut_is_even(given_ids: list[int], num_parts: int) -> None:
    """Sizes differ by at most one, and no part is larger than one before it."""
    sizes = [len(part) for part in sharding.cut(given_ids, num_parts)]
    assert max(sizes) - min(sizes) <= 1
    assert all(before >= after for before, after in pairwise(sizes))


@given(st.integers(1, 40), st.sets(st.integers(0, 99), min_size=1, max_size=12))
def test_runs_cover_every_shard_once(num_shards: int, ranks: set[int]) -> None:
    """Any set of ranks gets contiguous runs in rank order, each shard in exactly one."""
    run_of = sharding.runs(range(num_shards), ranks)
    assert list(run_of) == sorted(ranks)
    assert list(chain.from_iterable(run_of.values())) == list(range(num_shards))
    assert all(b == a + 1 for run in run_of.values() for a, b in pairwise(run))


@given(st.integers(1, 60), st.data(), st.integers(1, 4))
def test_epochs_visit_every_sample_once(
    num_samples: int, data: st.DataObject, num_epochs: int
) -> None:
    """Batches visit each sample once an epoch, and only an epoch's last batch is short."""
    batch_size = data.draw(st.integers(1, num_samples))
    orders = [
        sharding.order(num_samples, np.random.default_rng(epoch)) for epoch in range(num_epochs)
    ]
    position, drawn = Position(), [list[int]() for _ in range(num_epochs)]
    while position.epoch < num_epochs:
        batch = sharding.batch(orders[position.epoch], position, batch_size)
        drawn[position.epoch] += batch
        after = sharding.advance(position, len(batch), num_samples)
        assert len(batch) == batch_size or after == Position(position.epoch + 1, 0)
        position = after
    assert drawn == orders


@given(st.integers(0, 200), st.integers(0, 2**32))
def test_an_order_is_a_permutation(num_samples: int, seed: int) -> None:
    """An order holds plain ints, each id once, and is the same for the same stream."""
    visit = sharding.order(num_samples, np.random.default_rng(seed))
    assert sorted(visit) == list(range(num_samples))
    assert all(type(sample) is int for sample in visit)
    assert visit == sharding.order(num_samples, np.random.default_rng(seed))


def test_a_full_batch_at_the_end_starts_the_next_epoch() -> None:
    """No batch is empty if the batch size divides the number of samples."""
    assert sharding.advance(Position(3, 6), 2, 8) == Position(4, 0)
    assert sharding.advance(Position(3, 6), 1, 8) == Position(3, 7)
