"""The limit to which gradients were clipped, element by element."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.checks import value_clipping
from entrenar_py.trace import Update
from tests.checks import traces


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
    trace = traces.hand_written(replace(update, gradient={"w": traces.values(*numbers)}))
    assert value_clipping.limit(trace) == pytest.approx(limit)
