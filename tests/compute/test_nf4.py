"""NF4 as operations of torch: the bits of bitsandbytes, and gradients of a product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute import nf4

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def stored(rows: int, columns: int, place: str) -> list[Tensor]:
    """Return a random matrix as codes, scales and the table of scales."""
    draws, size = np.random.default_rng(0), rows * columns
    blocks = -(-size // nf4.BLOCK)
    table = [
        np.sort(draws.uniform(-1, 1, nf4.NUM_SECOND_LEVELS)),
        np.ones(1),
        draws.uniform(0, 0.5, -(-blocks // nf4.SECOND_BLOCK)),
    ]
    bytes_of = (draws.integers(0, 256, n, np.uint8) for n in (-(-size // 2), blocks))
    tensors = [*bytes_of, np.concatenate(table).astype(np.float32)]
    return [torch.from_numpy(one).to(place) for one in tensors]


def needs(place: str) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (3, 64), (128, 320), (2, 32)])
def test_the_formula_has_the_bits_of_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, place: str, rows: int, columns: int
) -> None:
    """Rows of whole blocks and of broken ones, and numbers in half the bits."""
    pytest.importorskip("bitsandbytes")
    needs(place)
    held = stored(rows, columns, place)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = nf4.decode(*held, [rows, columns], dtype)
        with monkeypatch.context() as without:
            without.setattr(nf4, "_bitsandbytes", lambda: None)
            ours = nf4.decode(*held, [rows, columns], dtype)
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("place", PLACES)
def test_a_product_and_its_gradients(place: str) -> None:
    """They are those of the decoded matrix, for inputs of any rank."""
    needs(place)
    held = stored(5, 12, place)
    weight = nf4.decode(*held, [5, 12], torch.float32)
    x = torch.randn(2, 3, 12, device=place, requires_grad=True)
    bias = torch.randn(5, device=place, requires_grad=True)
    products = nf4.linear(x, bias, held, 5), F.linear(x, weight, bias)
    gradients = (torch.autograd.grad(one.square().sum(), [x, bias]) for one in products)
    torch.testing.assert_close(*products)
    torch.testing.assert_close(*gradients)


def test_a_decoded_matrix_is_not_kept() -> None:
    """Between forward and backward only codes and tables are held."""
    held = stored(64, 64, "cpu")
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        nf4.linear(x, None, held, 64)
    assert kept
    assert all(one.numel() < 64 * 64 for one in kept)
