"""The Triton kernels give the bits of the plain path (TRITON_INTERPRET=1: without a GPU)."""

from __future__ import annotations

import os

import pytest
import torch

from entrenar_py.train.canonical import exchange

pytestmark = pytest.mark.cuda

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
kernels = pytest.importorskip(
    "entrenar_py.train.canonical.kernels", reason="triton is not installed"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
if DEVICE == "cpu":
    del WORDS[torch.bfloat16]  # the interpreter cuts bits off where a GPU rounds


def rows_of(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different size, with zeros of both signs, subnormal and huge ones."""
    draws = torch.Generator().manual_seed(num_rows * num_columns)
    exponents = torch.randint(-12, 12, (num_rows, num_columns), generator=draws)
    rows = torch.ldexp(torch.randn(num_rows, num_columns, generator=draws), exponents)
    rows[:, 0::7], rows[:, 1::7] = 0.0, -0.0
    rows[:, 2::11] *= 2.0**-130
    rows[:, 3::13] *= 2.0**100
    return rows.to(dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", list(WORDS))
@pytest.mark.parametrize("num_rows", [2, 4, 8, 16])
@pytest.mark.parametrize("num_columns", [1, 48, 1024, 4099])
def test_bits_of_the_plain_path(dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
    """All elements have the plain path's bits, for all numbers of rows, also in a partial block."""
    rows = rows_of(num_rows, num_columns, dtype)
    expected, got = torch.empty_like(rows[0]), torch.full_like(rows[0], torch.nan)
    exchange.add_tree(rows, scale=1 / 32, out=expected)
    kernels.add_tree(rows, scale=1 / 32, out=got)
    assert torch.equal(got.view(WORDS[dtype]), expected.view(WORDS[dtype]))


@pytest.mark.parametrize("dtype", list(WORDS))
@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_row_of_ones_own(dtype: torch.dtype, index: int) -> None:
    """A rank's own row is read from where it is, and its row of `rows` is not read."""
    rows = rows_of(4, 4099, dtype)
    expected, got = torch.empty_like(rows[0]), torch.full_like(rows[0], torch.nan)
    exchange.add_tree(rows, scale=1 / 32, out=expected)
    own, rows = rows[index].clone(), rows.clone()
    rows[index] = float("nan")
    kernels.add_tree(rows, scale=1 / 32, out=got, own=(index, own))
    assert torch.equal(got.view(WORDS[dtype]), expected.view(WORDS[dtype]))


@pytest.mark.parametrize("dtype", list(WORDS))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_columns", [1, 48, 4099])
def test_rows_anywhere_in_memory(dtype: torch.dtype, num_ranks: int, num_columns: int) -> None:
    """Rows are read from their addresses, as those of other GPUs are, and one may be the result."""
    rows = rows_of(num_ranks, num_columns, dtype)
    expected = torch.empty_like(rows[0])
    exchange.add_tree(rows, scale=1 / 32, out=expected)
    apart = [one.clone() for one in rows]
    addresses = torch.tensor([one.data_ptr() for one in apart], device=DEVICE)
    kernels.add_tree_of_all(addresses, scale=1 / 32, out=apart[1])
    assert torch.equal(apart[1].view(WORDS[dtype]), expected.view(WORDS[dtype]))


@pytest.mark.parametrize("dtype", list(WORDS))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_was_put_is_added_with_ones_own(dtype: torch.dtype, num_ranks: int) -> None:
    """The rank's own row is read from `mine`, and its row of `put` is not read."""
    rows = rows_of(num_ranks, 5000, dtype)
    expected = torch.empty_like(rows[0])
    exchange.add_tree(rows, scale=1 / 32, out=expected)
    for rank in range(num_ranks):
        put = torch.full((num_ranks, 6000), float("nan"), dtype=dtype, device=DEVICE)
        put[:, :5000] = rows
        put[rank] = float("nan")
        mine, sums = rows[rank].clone(), torch.empty_like(rows[rank])
        kernels.add_tree_of_put(
            put.view(torch.uint8), mine=mine, rank=rank, scale=1 / 32, sums=sums
        )
        for one in (mine, sums):
            assert torch.equal(one.view(WORDS[dtype]), expected.view(WORDS[dtype]))
