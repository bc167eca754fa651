"""One suite for all backends: each is compared with float64 and with torch's own layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.compute import BACKENDS, Backend, Pair, open_backend, products
from entrenar_py.shared.errors import BackendUnavailable, UsageError


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def viewed(matrix: Tensor, view: str) -> Tensor:
    """Return the same values in another memory layout."""
    if view == "transposed":
        return matrix.t().contiguous().t()
    if view == "strided":
        return torch.stack([matrix, torch.full_like(matrix, torch.nan)], dim=2)[:, :, 0]
    return matrix


def assert_explained(backend: Backend, result: Tensor, pair: Pair) -> None:
    found = products.compare(result, *pair, unit_roundoff=backend.unit_roundoff)
    assert found.explained, found


VIEWS = st.sampled_from(["plain", "transposed", "strided"])


@settings(deadline=None, max_examples=15)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 70),
    n=st.integers(1, 40),
    views=st.tuples(VIEWS, VIEWS),
    seed=st.integers(0, 999),
)
def test_any_shape_and_view(
    backend: Backend, m: int, k: int, n: int, views: tuple[str, str], seed: int
) -> None:
    """A product of any shape and strides is within its rounding bound around float64."""
    a = viewed(uniform(m, k, seed=seed), views[0])
    b = viewed(uniform(k, n, seed=seed + 1), views[1])
    result = backend.matmul(a, b)
    assert result.shape == (m, n)
    assert_explained(backend, result, (a, b))


@pytest.mark.parametrize("k", [512, 1024])
def test_long_sums(backend: Backend, k: int) -> None:
    """A long inner dimension stays within its bound."""
    pair = uniform(33, k, seed=1), uniform(k, 17, seed=2)
    assert_explained(backend, backend.matmul(*pair), pair)


def test_products_are_the_single_products(backend: Backend) -> None:
    """Several products in one call give the same results as one call each."""
    pairs = [
        (uniform(3, 5, seed=1), uniform(5, 2, seed=2)),
        (uniform(65, 33, seed=3), uniform(33, 70, seed=4)),
        (uniform(1, 1, seed=5), uniform(1, 1, seed=6)),
    ]
    together = backend.products(pairs)
    assert all(
        torch.equal(result, backend.matmul(*pair))
        for pair, result in zip(pairs, together, strict=True)
    )
    assert backend.products([]) == []


def test_same_bits_again(backend: Backend) -> None:
    """Computing a product twice gives the same bits."""
    pair = uniform(40, 100, seed=1), uniform(100, 30, seed=2)
    assert torch.equal(backend.matmul(*pair), backend.matmul(*pair))


def test_operands_are_left_alone(backend: Backend) -> None:
    """A result shares no memory with the operands and has no autograd graph."""
    a = uniform(4, 4, seed=1).requires_grad_()
    kept = a.detach().clone()
    result = backend.matmul(a, torch.eye(4))
    result += 1
    assert torch.equal(a.detach(), kept)
    assert not result.requires_grad


@pytest.mark.parametrize("shape", [(6, 7), (2, 5, 7), (7,)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_torch_linear(backend: Backend, shape: tuple[int, ...], biased: bool) -> None:
    """A linear layer's value and gradients equal torch's within float32 rounding."""
    x, weight = uniform(*shape, seed=1), uniform(3, 7, seed=2)
    bias = uniform(3, seed=3) if biased else None
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    ours, theirs = backend.linear(x, weight, bias), F.linear(x, weight, bias)
    assert ours.device.type == "cpu"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(ours.square().sum(), leaves)
    expected = torch.autograd.grad(theirs.square().sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 2), "use two matrices"),
        (torch.ones(3), torch.ones(3, 2), "use two matrices"),
        (torch.ones(0, 3), torch.ones(3, 2), "sizes of at least 1"),
        (torch.ones(2, 0), torch.ones(0, 2), "sizes of at least 1"),
        (torch.ones(2, 2).double(), torch.ones(2, 2), "a is torch.float64 on cpu"),
        (torch.ones(2, 2), torch.ones(2, 2, device="meta"), "b is torch.float32 on meta"),
    ],
)
def test_bad_operands_are_refused(backend: Backend, a: Tensor, b: Tensor, message: str) -> None:
    """Unsupported operands are refused with the backend and their shapes."""
    with pytest.raises(UsageError, match=message) as refused:
        backend.matmul(a, b)
    assert f"on backend {backend.name}" in str(refused.value)


def test_backend_is_the_one_asked_for(backend: Backend) -> None:
    """A backend selected by name has this name and the name of its device."""
    assert open_backend(backend.name).name == backend.name
    assert backend.device
    assert backend.name == "wgpu" or not backend.software


def test_unknown_backend() -> None:
    """An unknown name is refused with the allowed ones."""
    with pytest.raises(UsageError, match=r"backend='tpu': allowed are cuda, wgpu, cpu"):
        open_backend("tpu")
    assert tuple(BACKENDS) == ("cuda", "wgpu", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_absent_cuda_does_not_fall_back() -> None:
    """On a machine without CUDA, opening it fails with torch's message."""
    with pytest.raises(BackendUnavailable, match=r"backend cuda: .*(CUDA|NVIDIA)"):
        open_backend("cuda")
