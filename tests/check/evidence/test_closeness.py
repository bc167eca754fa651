"""Tensors that are compared within a bound, by values or projections."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.evidence import closeness
from entrenar_py.shared.trace import Sketch, TensorRecord, record_sketch
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES
from entrenar_py.shared.verdict import Counterexample, Tally
from tests.traces import values

FINITE = st.floats(-1e3, 1e3, width=32)


def close(expected: dict[str, TensorRecord], got: dict[str, TensorRecord], **bound: Any) -> Tally:
    """Return the tally after one `compare_close`, which must have compared."""
    tally = Tally("F-XX-001")
    assert closeness.compare_close(tally, expected, got, message="off", **bound)
    return tally


def found(tally: Tally) -> Counterexample:
    """Return the counterexample that was kept."""
    assert tally.broken is not None
    return tally.broken


def sketched(*numbers: float, size: int = 10**6) -> TensorRecord:
    """Return a record whose projection begins with `numbers`; its norm is that of these."""
    kept = np.zeros(1 + PROJECTIONS + SAMPLES)
    kept[0], kept[1 : 1 + len(numbers)] = np.square(numbers).sum(), numbers
    return record_sketch(Sketch(size, kept), "float32")


@given(st.lists(FINITE, min_size=1, max_size=6), st.floats(1e-6, 1e-2), st.booleans())
def test_the_bound_is_relative_to_the_norm(
    numbers: list[float], bound: float, within: bool
) -> None:
    """A vector scaled by 1 +- bound/2 is close; by 1 +- 2 bound it isn't, unless it is zero."""
    expected = {"w": values(*numbers, dtype="float64")}
    factor = 1 + bound * (0.5 if within else 2.0)
    got = {"w": values(*(number * factor for number in numbers), dtype="float64")}
    assert (close(expected, got, bound=bound).broken is None) == (within or not any(numbers))


def test_the_scale_is_that_of_all_tensors() -> None:
    """Rounding noise next to a larger tensor is close; the floor adds to the bound."""
    expected, got = ({"big": values(1.0), "small": values(small)} for small in (1e-9, -1e-9))
    assert close(expected, got, bound=1e-6).broken is None
    assert close({"w": values(0.0)}, {"w": values(1e-9)}, bound=1e-3).broken is not None
    assert close({"w": values(0.0)}, {"w": values(1e-9)}, bound=1e-3, floor=1e-8).broken is None


def test_a_small_tensor_is_judged_by_its_own_norm() -> None:
    """A small tensor that is off by 1 % is found next to one ten times as large."""
    expected, got = ({"big": values(1.0), "small": values(small)} for small in (0.1, 0.101))
    assert found(close(expected, got, bound=5e-3)).tensor == "small"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_close(bad: float) -> None:
    """A NaN or an infinity is a difference, at its element."""
    tally = close({"w": values(1, 1, 1)}, {"w": values(1, bad, 1)}, bound=1e-3)
    assert found(tally).element == 1


def test_empty_tensors_are_compared_by_shape_alone() -> None:
    """A tensor without elements is compared by its shape; one that is missing is a difference."""
    expected = {"none": values(), "w": values(1.0)}
    assert close(expected, expected, bound=0.0).compared == 1
    assert found(close(expected, {"none": values()}, bound=1.0)).tensor == "w"


def test_unknown_values_are_not_close_and_not_far() -> None:
    """Digests without values allow no comparison, and none is counted."""
    tally = Tally("F-XX-001")
    for pair in (({}, {}), ({"w": values(1)}, {"w": TensorRecord("x")})):
        assert not closeness.compare_close(tally, *pair, bound=1.0, message="off")
    assert tally.compared == 0
    assert closeness.norm_l2({"w": TensorRecord("x")}) is None
    assert closeness.norm_l2({"v": values(3), "w": values(4)}) == 5.0


def test_projections_are_compared_as_tensors_are() -> None:
    """Their distance may be PROJECTED times as large, and a finding shows norms, not elements."""
    expected = {"w": sketched(3, 4)}
    assert close(expected, {"w": sketched(3, 4.9)}, bound=0.1).broken is None
    far = found(close(expected, {"w": sketched(3, 5.1)}, bound=0.1))
    assert (far.tensor, far.element, far.expected, far.got) == (
        *("w", None, "norm 5"),
        "norm 5.91692488",
    )
    reshaped = found(close(expected, {"w": sketched(3, 4, size=10**5)}, bound=1.0))
    assert reshaped.message == "off: w is missing, or has a different shape"
    assert closeness.norm_l2(expected) == 5


def test_a_projection_is_not_compared_with_values() -> None:
    """One side with a sketch and one with values allow no comparison."""
    pair = {"w": sketched(3, 4)}, {"w": values(3, 4)}
    for expected, got in (pair, pair[::-1]):
        tally = Tally("F-XX-001")
        assert not closeness.compare_close(tally, expected, got, bound=1.0, message="off")


@pytest.mark.parametrize(
    ("size", "allowed"),
    [(2**10, 2**-18), (2**19, 2**-9), (2**24, 0.02), (2**26, 0.02), (2**28, 0.16)],
)
def test_the_rounding_of_a_norm(size: int, allowed: float) -> None:
    """It is what so many roundings can make, and no more than is seen of large tensors."""
    assert closeness.norm_rounding({"w": sketched(1.0, size=size)}) == allowed


@pytest.mark.parametrize("size", [2**19, 2**22])
@pytest.mark.parametrize("small", [1.0, 2.0**-10, 2.0**-11])
def test_a_norm_in_float32_is_off_by_no_more(size: int, small: float) -> None:
    """Squares are added up in eight sums; a few elements are large, and hide the others."""
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    values[256:] *= np.float32(small)
    norm = math.sqrt(np.square(values).reshape(-1, 8).sum(axis=0, dtype=np.float32).sum())
    off = norm / float(np.linalg.norm(values.astype(np.float64))) - 1
    assert -closeness.norm_rounding({"w": sketched(1.0, size=size)}) < off < 0


@pytest.mark.parametrize(
    ("got", "is_near"),
    [
        ([-np.inf, 0.0, 2.0], True),
        ([np.inf, 0.0, 2.0], False),
        ([-np.inf, 0.0, 2.1], False),
        ([-np.inf, -np.inf, 2.0], False),
        ([0.0, 0.0, 2.0], False),
        ([-np.inf, np.nan, 2.0], False),
    ],
)
def test_infinities_that_are_equal_are_no_distance(got: list[float], is_near: bool) -> None:
    """An additive mask holds -inf. It is compared, and hides no difference in other elements."""
    mask = {"mask": values(-np.inf, 0.0, 2.0), "w": values(1.0)}
    tally = Tally("", observed=True)
    made = {"mask": values(*got), "w": values(1.0)}
    assert closeness.compare_close(tally, mask, made, 1e-5, "other")
    assert (tally.broken is None) is is_near
    wrong = {"mask": values(-np.inf, 0.0, 2.0), "w": values(1.01)}
    tally = Tally("", observed=True)
    closeness.compare_close(tally, mask, wrong, 1e-5, "other")
    assert tally.broken is not None
