"""The limit to which gradients were clipped, element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.causes import clipping
from entrenar_py.shared.trace import Update
from tests import traces


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        ((0.3, -2.3222134, 2.3222134), 2.3222134),
        ((0.3, -2.5, 1.0), 2.5),
        ((0.3, -2.3222134, 1.0), None),
        ((0.0, 0.0), None),
        ((0.3, float("inf")), None),
    ],
    ids=["two at it", "one, at a short number", "one, at any number", "zeros", "infinite"],
)
def test_the_largest_size_is_a_limit(numbers: tuple[float, ...], limit: float | None) -> None:
    """It is a limit if several elements have it, or if it has few digits."""
    update = traces.one(traces.run(traces.scenario(num_steps=1)), Update, step=0, rank=0)
    mine = replace(update, gradient={"w": traces.values(*numbers)})
    trace = traces.hand_written(mine, replace(mine, rank=1))
    assert clipping.limit_of_elements(trace) == pytest.approx(limit)


def test_a_tensor_that_no_micro_batch_used_is_cut_like_a_zero() -> None:
    """A gradient that the script set to zero, or made up, has a sum of zero."""
    total, unused = {"w": np.array([4.0, 6.0, 2.0])}, np.zeros(2)
    mean = {"w": np.array([2.0, 2.5, 1.0]), "unused": unused}
    assert clipping.explains_elements(total, mean, 2.5, 1e-4)
    assert not clipping.explains_elements(total, {**mean, "unused": unused + 1}, 2.5, 1e-4)
