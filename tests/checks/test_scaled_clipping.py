"""Gradients that were clipped while they were multiplied by the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from entrenar_py.checks import scaled_clipping
from entrenar_py.trace import Trace
from tests.checks.micro_batch_traces import Vectors, summed, times, trace_of


def run(*norms: float) -> Trace:
    """Return a run whose applied gradients have these norms."""
    return trace_of([_of_norm(norm, summed(step)) for step, norm in enumerate(norms)])


def _of_norm(norm: float, vectors: Vectors) -> Vectors:
    return times(norm / np.sqrt(sum(np.square(v).sum() for v in vectors.values())), vectors)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([2.0**-16] * 3, "1 divided by 65536"),
        ([0.25 * 2.0**-16] * 3, "0.25 divided by 65536"),
        ([0.5 * 2.0**-17] * 3, "0.25 divided by 65536"),
        ([2.0**-15, 2.0**-16, 2.0**-16], "2 divided by 65536"),  # the scale grew
    ],
)
def test_a_limit_over_a_power_of_two_is_recognised(norms: Sequence[float], words: str) -> None:
    """The first step is named; the scale may double or halve."""
    found = scaled_clipping.first(run(*norms))
    assert found is not None
    assert found[0] == 0
    assert words in found[1]


@pytest.mark.parametrize(
    "norms",
    [
        [1.0, 1.0, 1.0],  # clipped at a limit that people write
        [1e-5, 1e-5, 1e-5],
        [0.3, 2.0**-16, 0.7],
        [0.001234567] * 3,
        [2.0**-16] * 2,
    ],
)
def test_other_norms_are_left_alone(norms: Sequence[float]) -> None:
    """A limit without a scale, no limit, or too few steps."""
    assert scaled_clipping.first(run(*norms)) is None
