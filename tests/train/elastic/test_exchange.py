"""Ranks that share the tree unevenly compute the same sums as a tree over single micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.train.canonical.reducer import Counter
from entrenar_py.train.elastic.exchange import Exchange, add_nodes, nodes, share


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """Return the sum of a power of two of leaves, pair by pair."""
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


@given(exponent=st.integers(0, 6), data=st.data())
def test_shares_are_all_micro_batches_once(exponent: int, data: st.DataObject) -> None:
    """Any number of ranks share the micro-batches in blocks of sizes that differ by one at most."""
    world_size = data.draw(st.integers(1, 2**exponent))
    shares = [share(2**exponent, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [shard for one in shares for shard in one] == list(range(2**exponent))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (range(8), [range(8)]),
        (range(3), [range(2), range(2, 3)]),
        (range(3, 6), [range(3, 4), range(4, 6)]),
        (range(1, 8), [range(1, 2), range(2, 4), range(4, 8)]),
    ],
)
def test_a_share_is_covered_by_the_fewest_nodes(shards: range, expected: list[range]) -> None:
    """A node is a subtree whose leaves are all in the share."""
    assert nodes(shards) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(exponent=st.integers(0, 5), data=st.data())
def test_every_number_of_ranks_has_the_trees_sum(
    dtype: torch.dtype, exponent: int, data: st.DataObject
) -> None:
    """The ranks' counters and `add_nodes` together make the additions of the tree, bit for bit."""
    count = 2**exponent
    world_size = data.draw(st.integers(1, count))
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    leaves = [(torch.randn(7, generator=draws) * 3).to(dtype) for _ in range(count)]
    parameter = torch.zeros(7, dtype=dtype)
    rows, spans = [], []
    for rank in range(world_size):
        shards = share(count, rank=rank, world_size=world_size)
        counter = Counter(shards.start)
        for shard in shards[:-1]:
            counter.push({parameter: leaves[shard].clone()})
        last = leaves[shards[-1]].clone()
        others = counter.complete([parameter], [last])
        rows += [gradient for (gradient,) in others] + [last]
        spans += nodes(shards)
    assert torch.equal(add_nodes(torch.stack(rows), spans), tree_sum(leaves))


def test_a_single_rank_needs_no_group() -> None:
    """The mean of a single rank is its node, divided by the number of micro-batches."""
    exchange = Exchange(None, rank=0, world_size=1, micro_batches=4)
    assert (exchange.num_rows, exchange.padded(17), exchange.shards) == (1, 32, range(4))
    started = exchange.start(torch.full((1, 32), 8.0))
    started.gather(lambda _: None)
    started.wait(lambda _: None)
    assert started.is_over
    assert torch.equal(started.mean, torch.full((32,), 2.0))
