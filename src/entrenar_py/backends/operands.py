"""The check that every backend makes of the operands of a product."""

from __future__ import annotations

import torch
from torch import Tensor

from entrenar_py.errors import UsageError


def check_operands(a: Tensor, b: Tensor, *, backend: str) -> None:
    """Raises UsageError unless `a @ b` is a non-empty float32 product of matrices on the CPU."""
    given = f"product of {list(a.shape)} and {list(b.shape)} on backend {backend}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(f"{given}: use two matrices [m, k] and [k, n]")
    if not (a.numel() and b.numel()):
        raise UsageError(f"{given}: nothing to multiply; use sizes of at least 1")
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != torch.float32 or operand.device.type != "cpu":
            raise UsageError(
                f"{given}: {name} is {operand.dtype} on {operand.device}; use float32 on cpu"
            )
