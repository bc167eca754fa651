"""A Triton kernel: the cross entropy of logits and its gradient, read twice and written once.

torch's compiler makes three passes, and divides for each element to find its row. Liger's kernel
reads the number of targets on the host, so a step with it can't be recorded, and rounds each row's
loss to the dtype of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS_MAX = 32768  # in registers at a time, by one program
_WARPS = 32


def loss_of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `objectives._loss_of_logits` does, up to rounding. Overwrites `logits`.

    Both tensors are contiguous, and targets are less than the number of columns. Runs
    asynchronously on the current stream.
    """
    num_rows, num_columns = logits.shape
    losses = torch.empty(num_rows, device=logits.device)
    columns = min(_COLUMNS_MAX, triton.next_power_of_2(num_columns))
    with torch.cuda.device_of(logits):
        _loss_of_row[(num_rows,)](
            *(logits, targets, losses, num_columns, logits.stride(0)),
            COLUMNS=columns,
            num_warps=_WARPS,
        )
    return losses.sum(), logits


@triton.jit
def _loss_of_row(
    logits,  # [num_rows, num_columns], replaced by their gradient
    targets,  # [num_rows]
    losses,  # [num_rows]
    num_columns,
    stride,
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, COLUMNS)
    largest, total = -float("inf"), 0.0  # of the shares, which are scaled by the largest
    for start in range(0, num_columns, COLUMNS):
        inside = start + columns < num_columns
        x = tl.load(logits + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x))
        by = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - by) + tl.sum(tl.exp(x - by))
        largest = new
    counts = (target >= 0).to(tl.float32)
    wanted = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, (largest + tl.log(total) - wanted) * counts)
    tl.debug_barrier()  # `wanted` is overwritten below
    for start in range(0, num_columns, COLUMNS):
        inside = start + columns < num_columns
        x = tl.load(logits + start + columns, mask=inside).to(tl.float32)
        share = tl.exp(x - largest) / total - (start + columns == target).to(tl.float32)
        tl.store(
            logits + start + columns, (share * counts).to(logits.dtype.element_ty), mask=inside
        )
