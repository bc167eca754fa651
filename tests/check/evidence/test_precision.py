"""The precision of a run, inferred from its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.evidence import precision
from entrenar_py.shared.trace import record_tensor

NUMBERS = np.random.default_rng(0).normal(size=40).astype(np.float32)


def rounded(dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return the numbers as float32, after rounding to `dtype`."""
    return torch.from_numpy(NUMBERS).to(dtype).float().numpy()


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (NUMBERS, 2.0**-24),
        (NUMBERS.astype(np.float64), 2.0**-24),
        (rounded(torch.bfloat16), 2.0**-8),
        (rounded(torch.float16), 2.0**-11),
        (NUMBERS.astype(np.float16), 2.0**-11),
        (np.append(rounded(torch.bfloat16), np.nan).astype(np.float32), 2.0**-8),
        (np.append(rounded(torch.bfloat16), NUMBERS[0]), 2.0**-24),
    ],
)
def test_what_numbers_show(values: np.ndarray[Any, Any], unit: float) -> None:
    """Numbers that were rounded to 16 bits all end in zeros."""
    assert precision.unit_of_values(values) == unit


@given(st.lists(st.integers(-8, 8).map(lambda n: float(2**n)), max_size=20))
def test_powers_of_two_show_nothing(numbers: list[float]) -> None:
    """Powers of two are the same in any precision; few numbers, or none, show nothing either."""
    assert precision.unit_of_values(np.array([*numbers, 0.0], np.float32)) == 2.0**-24
    few = rounded(torch.bfloat16)[: precision._NUMBERS_MIN - 1]
    assert precision.unit_of_values(few) == 2.0**-24


def test_what_cancellation_leaves_is_no_precision() -> None:
    """A gradient that is zero but for float32's rounding has few bits, in any precision.

    That of a key's bias is: the softmax takes it away.
    """
    left = np.array([-41, -31, -17, -14, -13, -10, -7, -6, -5, -4, -2, 8, 12], np.float32)
    tensors = {
        "key.bias": record_tensor(left * np.float32(2.0**-38), values=True),
        "key.weight": record_tensor(NUMBERS, values=True),
    }
    assert precision.unit_of(tensors) == 2.0**-24


def test_the_coarsest_tensor_counts() -> None:
    """Under autocast norms stay in float32, so the coarsest tensor decides."""
    tensors = {
        "norm": record_tensor(NUMBERS, values=True),
        "layer": record_tensor(rounded(torch.bfloat16), values=True),
        "unknown": record_tensor(NUMBERS),
    }
    assert precision.unit_of(tensors) == 2.0**-8
    assert precision.unit_of({}) == 2.0**-24
