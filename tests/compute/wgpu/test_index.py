"""Simplified index arithmetic gives the same values as plain division and remainder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.values import reshaped_strides

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def variables(shape: Sequence[int]) -> Indices:
    """Return a loop variable for each dim: v0, v1, ..."""
    return tuple(at.variable(f"v{dim}", size) for dim, size in enumerate(shape))


def value(index: Index, place: Sequence[int]) -> int:
    """Return the value of a rendered index for these variables, with WGSL's `/` on i32."""
    names = {f"v{dim}": one for dim, one in enumerate(place)}
    return int(eval(at.render(index).replace("/", "//"), {}, names))


def places(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all indices into a tensor of `shape`, in C order."""
    return list(itertools.product(*(range(size) for size in shape)))


@given(SHAPES, st.data())
def test_reshapes_of_reshapes(shape: list[int], data: st.DataObject) -> None:
    """A chain of reshapes keeps each element's position in C order."""
    to = data.draw(st.permutations([one for one in shape if one > 1] or [1]))
    back = at.reshape(at.reshape(variables(shape), shape, to), to, [math.prod(shape)])
    for position, place in enumerate(places(shape)):
        assert value(back[0], place) == position


@given(SHAPES, st.integers(1, 7), st.integers(0, 9), st.integers(1, 5))
def test_quotient_and_remainder(shape: list[int], by: int, offset: int, factor: int) -> None:
    """An index's quotient and remainder have the right values, and are within their bounds."""
    index = at.place(variables(shape), at.strides_of(shape)) * factor + Index(offset)
    quotient, remainder = index.divide(by), index.modulo(by)
    for place in places(shape):
        whole = value(index, place)
        assert value(quotient, place) == whole // by
        assert value(remainder, place) == whole % by
        for one, expected in ((quotient, whole // by), (remainder, whole % by)):
            low, high = one.bounds
            assert low <= expected <= high


def test_a_view_of_a_view_costs_nothing() -> None:
    """Splitting a dim and joining it again leaves no division in the index."""
    (index,) = variables([12])
    split = at.reshape((index,), [12], [3, 4])
    assert at.render(at.reshape(split, [3, 4], [12])[0]) != at.render(index)  # two atoms, unjoined
    joined = at.reshape(variables([3, 4]), [3, 4], [12])
    assert at.reshape(joined, [12], [3, 4]) == variables([3, 4])


@given(SHAPES, st.data())
def test_strides_of_a_reshaped_view(shape: list[int], data: st.DataObject) -> None:
    """A reshape has strides exactly where torch can make a view, and they give its elements."""
    order = data.draw(st.permutations(range(len(shape))))
    factors = [one for one in shape if one > 1] or [1]
    to = data.draw(st.permutations(factors))
    if data.draw(st.booleans()):
        to = [math.prod(to[:2]), *to[2:]]
    tensor = torch.arange(math.prod(shape)).reshape(shape).permute(order)
    found = reshaped_strides(tensor.shape, tensor.stride(), to)
    try:
        expected = tensor.view(to)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert torch.equal(tensor.as_strided(to, found), expected)
