"""Literals of WGSL."""

from __future__ import annotations

import pytest

from entrenar_py.compute.wgpu.codegen import literal


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (5, "i32", "5"),
        (-5, "i32", "(-5)"),
        (-(2**31), "i32", "(-2147483647 - 1)"),
        (0.5, "f32", "0.5f"),
        (-0.5, "f32", "(-0.5f)"),
        (-0.0, "f32", "(-0.0f)"),
    ],
)
def test_a_minus_is_in_brackets(value: float, dtype: str, text: str) -> None:
    """Negative literals are in brackets: a minus before them would make the decrement `--`."""
    assert literal(value, dtype) == text
