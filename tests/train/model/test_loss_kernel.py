"""The kernel of the loss, compared with torch (TRITON_INTERPRET=1: without a GPU)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from entrenar_py.train.model.objectives import IGNORED

pytestmark = pytest.mark.cuda

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
loss_kernel = pytest.importorskip(
    "entrenar_py.train.model.loss_kernel", reason="triton is not installed"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(num_rows: int, num_columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets, of which some are ignored."""
    draws = torch.Generator().manual_seed(num_columns)
    logits = 5 * torch.randn(num_rows, num_columns, generator=draws)
    targets = torch.randint(num_columns, (num_rows,), generator=draws)
    targets[::3] = IGNORED
    return logits.to(dtype=dtype, device=DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 50, 32768, 70001])
def test_is_torchs(dtype: torch.dtype, num_columns: int) -> None:
    """Loss and gradient are torch's in float64, up to one rounding to the logits' dtype."""
    logits, targets = made(5, num_columns, dtype)
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="sum")
    (gradient,) = torch.autograd.grad(wanted, exact)
    loss, found = loss_kernel.loss_of_logits(logits.clone(), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert found.dtype == dtype
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), gradient, rtol=rounding, atol=1e-7)


def test_repeats_its_bits() -> None:
    logits, targets = made(64, 70001, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    first, again = (loss_kernel.loss_of_logits(logits.clone(), targets) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_show(bad: float) -> None:
    """Also at a place without a target: nothing hides them."""
    logits, targets = made(4, 40000, torch.float32)
    logits[1, 39000] = bad
    loss, _ = loss_kernel.loss_of_logits(logits, targets)
    assert loss.isnan()


def test_a_share_of_nothing_is_zero() -> None:
    """Logits of minus infinity, a whole block of them, get no share."""
    logits, targets = made(3, 70001, torch.float32)
    logits[:, :32768] = -torch.inf
    targets.fill_(70000)
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="sum")
    loss, gradient = loss_kernel.loss_of_logits(logits, targets)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert not gradient[:, :32768].any()
