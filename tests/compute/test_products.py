"""Matrix products: the layer, and the error that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.compute import Pair, products
from entrenar_py.compute.products import bound, compare, gamma
from entrenar_py.compute.wgpu import WgpuBackend


class Counted:
    """Products on the CPU. Records the number of products of each call."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[Tensor]:
        self.batches.append(len(pairs))
        return [a @ b for a, b in pairs]


@pytest.mark.parametrize(
    ("trained", "batches"), [("xw", [1, 2]), ("x", [1, 1]), ("w", [1, 1]), ("b", [1])]
)
def test_only_the_products_needed(trained: str, batches: list[int]) -> None:
    """Backward computes only the gradients that autograd needs, in one call."""
    leaves = {"x": torch.ones(4, 3), "w": torch.ones(2, 3), "b": torch.ones(2)}
    for name in trained:
        leaves[name].requires_grad_()
    counted = Counted()
    products.apply(counted, *leaves.values()).sum().backward()  # type: ignore[no-untyped-call]
    assert counted.batches == batches
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(trained)


@pytest.mark.wgpu
def test_one_submission_each_way(wgpu_backend: WgpuBackend) -> None:
    """Forward takes one submission, and the two products of backward take one, too."""
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    before = wgpu_backend.submissions
    loss = wgpu_backend.linear(x, weight, None).sum()
    assert wgpu_backend.submissions == before + 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert wgpu_backend.submissions == before + 2


NEAREST = 2.0**-24


def drawn(m: int, k: int, n: int, *, seed: int, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-magnitude, magnitude, (m, k)), rng.uniform(-magnitude, magnitude, (k, n))
    return torch.from_numpy(a.astype(np.float32)), torch.from_numpy(b.astype(np.float32))


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 300), st.integers(1, 20)),
    exponent=st.integers(-44, 17),
    seed=st.integers(0, 10**6),
)
def test_right_products_are_explained(
    shape: tuple[int, int, int], exponent: int, seed: int
) -> None:
    """Any order of summation is within the bound, for numbers of any size down to subnormal."""
    a, b = drawn(*shape, seed=seed, magnitude=10.0**exponent)
    result = torch.zeros(shape[0], shape[2])
    for k in np.random.default_rng(seed).permutation(shape[1]):
        result += a[:, k : k + 1] * b[k : k + 1]
    assert compare(result, a, b, unit_roundoff=NEAREST).explained


def flushed(values: Tensor) -> Tensor:
    """Return `values` with subnormal numbers replaced by zero."""
    return torch.where(values.abs() < products.FLUSHED, torch.zeros(()), values)


@given(seed=st.integers(0, 10**6), exponent=st.integers(-44, -15))
def test_flushed_subnormals_are_explained(seed: int, exponent: int) -> None:
    """A device that flushes subnormal operands and results to zero is within the bound."""
    a, b = drawn(5, 9, 4, seed=seed, magnitude=10.0**exponent)
    result = torch.zeros(5, 4)
    for k in range(9):
        result = flushed(result + flushed(flushed(a[:, k : k + 1]) * flushed(b[k : k + 1])))
    assert compare(result, a, b, unit_roundoff=NEAREST).explained


@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_reduced_precision_is_not_explained(k: int) -> None:
    """Operands rounded to TF32's 11 bits fall outside the bound."""
    a, b = drawn(32, k, 32, seed=k)
    coarse = (a.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    assert not compare(coarse @ b, a, b, unit_roundoff=NEAREST).explained


@pytest.mark.parametrize("k", [2, 33, 1024])
def test_a_lost_term_is_not_explained(k: int) -> None:
    """Leaving out the last of k products falls outside the bound."""
    a, b = drawn(8, k, 8, seed=k)
    result = a[:, :-1] @ b[:-1]
    assert not compare(result, a, b, unit_roundoff=NEAREST).explained


def test_the_worst_element_is_named() -> None:
    """The comparison has index, error and bound of the element with the largest error / bound."""
    a, b = drawn(4, 5, 6, seed=3)
    result = a @ b
    result[2, 3] += 0.5
    found = compare(result, a, b, unit_roundoff=NEAREST)
    assert found.element == 2 * 6 + 3
    assert found.error == pytest.approx(0.5, abs=1e-5)
    assert found.bound == float(bound(a, b, unit_roundoff=NEAREST)[2, 3])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_is_not_explained(value: float) -> None:
    """A result with a non-finite element is not explained, and the element's index is given."""
    a, b = drawn(3, 4, 2, seed=1)
    result = a @ b
    result[1, 0] = value
    found = compare(result, a, b, unit_roundoff=NEAREST)
    assert (found.finite, found.element, found.explained) == (False, 2, False)
    assert math.isnan(found.error)


@given(k=st.integers(1, 10**5))
def test_gamma_grows_with_length(k: int) -> None:
    """gamma_k increases with k, and is between k u and 2 k u."""
    assert k * NEAREST < gamma(k, NEAREST) < 2 * k * NEAREST
    assert gamma(k, NEAREST) < gamma(k + 1, NEAREST)
