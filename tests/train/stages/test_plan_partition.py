"""The cut of the dynamic program is the best of all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.plan import stage_plan
from entrenar_py.train.plan.stage_plan import Costs


@st.composite
def some_costs(draw: st.DrawFn) -> list[Costs]:
    """Draw costs of up to four stages and seven blocks, some of them infinite."""
    num_stages, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    cost = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.0, np.inf])
    size = num_blocks + 1
    table = st.lists(cost, min_size=size * size, max_size=size * size)
    return [np.array(draw(table)).reshape(size, size) for _ in range(num_stages)]


@given(some_costs())
def test_no_cut_is_better(costs: list[Costs]) -> None:
    """Brute force finds no cut with a smaller largest cost, or with as large a one and less sum."""
    num_blocks = len(costs[0]) - 1
    known = []
    for inner in combinations(range(1, num_blocks), len(costs) - 1):
        cut = tuple(range(a, b) for a, b in pairwise((0, *inner, num_blocks)))
        known.append((stage_plan.slowest(costs, cut), stage_plan.total(costs, cut)))
    known = [one for one in known if np.isfinite(one[0])]
    found = stage_plan.best_cut(costs)
    if found is None:
        assert not known
        return
    assert [block for own in found for block in own] == [*range(num_blocks)]
    assert all(found)
    assert (stage_plan.slowest(costs, found), stage_plan.total(costs, found)) == min(known)


def test_more_stages_than_blocks_have_no_cut() -> None:
    assert stage_plan.best_cut([np.ones((2, 2))] * 2) is None
