"""The cut of a buffer into pieces, and the plain tree sum."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.canonical.exchange import ALIGNMENT, add_tree, cut


@given(
    st.integers(0, 5_000), st.sampled_from([2, 4, 8, 16]), st.sampled_from([0, 1, 100, 512, 4096])
)
def test_pieces_and_tail_cover_everything_once(
    num_elements: int, world_size: int, piece_max: int
) -> None:
    """Pieces cover the buffer in order, divide evenly, keep to `piece_max`, and leave a tail."""
    unit = world_size * ALIGNMENT
    plan = cut(num_elements, world_size=world_size, piece_max=piece_max)
    assert [one for part in (*plan.pieces, plan.tail) for one in part] == list(range(num_elements))
    assert all(len(one) and len(one) % unit == 0 for one in plan.pieces)
    assert all(len(one) <= max(piece_max, unit) for one in plan.pieces)
    assert len(plan.tail) < unit
    assert all(abs(len(one) - len(other)) <= unit for one, other in pairwise(plan.pieces))


def test_the_tree_adds_neighbours_and_rounds_every_sum() -> None:
    """The sum of eight bfloat16 rows equals the same tree written out by hand."""
    rows = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    a, b, c, d, e, f, g, h = rows
    expected = (((a + b) + (c + d)) + ((e + f) + (g + h))) * 0.125
    out = torch.empty_like(a)
    add_tree(rows, scale=0.125, out=out)
    assert torch.equal(out, expected)
    assert not torch.equal(out, rows.sum(0) * 0.125)
