"""The weighted mean along the fixed tree."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import weighted_average
from entrenar_py.train.arithmetic.weighted_average import ELEMENTS, first_not_finite, weighted_mean

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    values=st.lists(st.tuples(FLOATS, st.integers(0, 2**40)), min_size=1, max_size=9).filter(
        lambda drawn: any(weight for _, weight in drawn)
    )
)
def test_the_mean_is_that_of_exact_arithmetic(values: list[tuple[float, int]]) -> None:
    """One rounding to float32, and one in float64 for each product, sum and quotient."""
    vectors = [np.array([value], np.float32) for value, _ in values]
    weights = [weight for _, weight in values]
    terms = [Fraction(value) * weight for value, weight in values]
    exact = sum(terms, Fraction()) / sum(weights)
    size = sum(map(abs, terms), Fraction()) / sum(weights)
    got = Fraction(float(weighted_mean(vectors, weights)[0]))
    in_float64 = (len(values).bit_length() + 4) * size / 2**53
    assert abs(got - exact) <= (abs(exact) + in_float64) / 2**24 + in_float64 + Fraction(1, 2**150)


@given(value=FLOATS, weight=st.integers(1, 2**63))
def test_the_mean_of_one_vector_is_that_vector(value: float, weight: int) -> None:
    """Bit for bit, for any weight."""
    vector = np.array([value], np.float32)
    assert weighted_mean([vector], [weight]).tobytes() == vector.tobytes()


def test_nothing_overflows() -> None:
    """The largest numbers with the largest weights have a finite mean."""
    largest = np.full(3, np.finfo(np.float32).max)
    assert weighted_mean([largest] * 5, [2**64 - 1] * 5).tobytes() == largest.tobytes()


def test_long_vectors_are_averaged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces do not show, and the vectors do not change."""
    drawn = np.random.default_rng(0).standard_normal((3, 2 * ELEMENTS + 5), np.float32)
    before = drawn.tobytes()
    in_pieces = weighted_mean(list(drawn), [1, 2, 3])
    assert drawn.tobytes() == before
    monkeypatch.setattr(weighted_average, "ELEMENTS", 10**9)
    assert weighted_mean(list(drawn), [1, 2, 3]).tobytes() == in_pieces.tobytes()


def test_an_empty_vector_has_a_mean() -> None:
    """It is empty."""
    assert weighted_mean([np.empty(0, np.float32)] * 2, [1, 2]).shape == (0,)


def test_no_weight() -> None:
    """The mean of nothing is an error."""
    with pytest.raises(ValueError, match="all weights are 0"):
        weighted_mean([np.ones(2, np.float32)], [0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, ELEMENTS - 1, ELEMENTS, 2 * ELEMENTS + 3])
def test_the_first_that_is_not_finite(value: float, place: int) -> None:
    """It is found in any piece."""
    vector = np.zeros(2 * ELEMENTS + 5, np.float32)
    assert first_not_finite(vector) is None
    vector[place:] = value
    assert first_not_finite(vector) == place
