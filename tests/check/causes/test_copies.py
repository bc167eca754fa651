"""Tensors of one name that are pieces on some ranks."""

from __future__ import annotations

import pytest

from entrenar_py.check.causes import copies
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.trace import Start
from tests import traces
from tests.traces import scenario


@pytest.mark.parametrize(
    ("shapes", "piece", "whole"),
    [
        pytest.param([(1, 100), (2, 9)], (2, 9), (1, 100), id="fewer elements, longer first axis"),
        pytest.param([(4, 2), (4, 8)], (4, 2), (4, 8), id="a row's part"),
        pytest.param([(2, 6), (3, 4)], (2, 6), (3, 4), id="as many elements"),
    ],
)
def test_the_largest_shape_stands_for_the_whole(
    shapes: list[tuple[int, ...]], piece: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    """Without a run on one worker, the rank with the most elements shows what a tensor may be."""
    starts = [
        Start(step=0, rank=rank, weights={}, trainable=("w",), shapes={"w": shape})
        for rank, shape in enumerate(shapes)
    ]
    trace = traces.hand_written(*starts, subject=scenario(world_size=2))
    compared = Compared(runs=Runs(trace), model=trace, trace=trace)
    assert copies.pieces(compared) == {"w": (piece, whole)}
