"""Triton kernels that add the ranks' rows along the tree, in one pass over memory.

They give the same bits as `exchange.add_tree`, the readable version. A kernel loads one element
from each row, adds these along the tree, rounds to the rows' dtype after each addition, scales the
sum, and stores it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # of each row, for one program: 8 or 16 bytes a thread


def add_tree(
    rows: Tensor, *, scale: float, out: Tensor, own: tuple[int, Tensor] | None = None
) -> None:
    """Write `scale` times the sum of `rows` [num_rows, n] along the tree to `out` [n].

    All tensors are contiguous, and `num_rows` is a power of two. `own` is the index of a row that
    isn't in `rows`, and this row [n]. Runs asynchronously on the current stream.
    """
    num_rows, num_columns = rows.shape
    index, row = own or (num_rows, rows)
    grid = (triton.cdiv(num_columns, _ELEMENTS),)
    with torch.cuda.device_of(rows):
        _add_tree[grid](rows, row, out, num_columns, scale, index, num_rows, _ELEMENTS)


@triton.jit
def _add_tree(
    rows,  # [NUM_ROWS, num_columns]; row INDEX is not read
    row,  # [num_columns]
    out,  # [num_columns]
    num_columns,
    scale,
    INDEX: tl.constexpr,  # noqa: N803
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = columns < num_columns
    stride = tl.cast(num_columns, tl.int64)
    root = _node(rows, row, columns, inside, stride, INDEX, 0, NUM_ROWS)
    scaled = (root.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + columns, scaled, mask=inside)


def add_tree_of_put(put: Tensor, *, mine: Tensor, rank: int, scale: float, sums: Tensor) -> None:
    """Write `scale` times the sum of all ranks' rows along the tree to `mine` and `sums`, [n] each.

    The row of `rank` is `mine`. Each other rank's row is the first n elements of its row in `put`,
    uint8 [num_ranks, row_bytes]. All tensors are aligned to 16 bytes.
    """
    rows = put.view(mine.dtype)
    grid = (triton.cdiv(len(mine), _ELEMENTS),)
    with torch.cuda.device_of(mine):
        _add_tree_of_put[grid](
            rows, mine, sums, rows.stride(0), len(mine), scale, rank, len(rows), _ELEMENTS
        )


@triton.jit
def _add_tree_of_put(
    rows,  # [NUM_ROWS, stride]; row RANK is not read
    mine,  # [num_columns], read and written
    sums,  # [num_columns]
    stride,
    num_columns,
    scale,
    RANK: tl.constexpr,  # noqa: N803
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = columns < num_columns
    root = _node(rows, mine, columns, inside, stride, RANK, 0, NUM_ROWS)
    scaled = (root.to(tl.float32) * scale).to(mine.dtype.element_ty)
    tl.store(mine + columns, scaled, mask=inside)
    tl.store(sums + columns, scaled, mask=inside)


def add_tree_of_all(addresses: Tensor, *, scale: float, out: Tensor) -> None:
    """Write `scale` times the sum of all ranks' rows along the tree to `out` [n].

    `addresses` [num_ranks], int64, are where the rows begin, in memory that this GPU can access,
    aligned to 16 bytes. The rows have the length and dtype of `out`.
    """
    grid = (triton.cdiv(len(out), _ELEMENTS),)
    with torch.cuda.device_of(out):
        _add_tree_of_all[grid](addresses, out, len(out), scale, len(addresses), _ELEMENTS)


@triton.jit
def _add_tree_of_all(
    addresses,  # [NUM_ROWS]
    out,  # [num_columns]
    num_columns,
    scale,
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = columns < num_columns
    root = _node_of_all(addresses, out.dtype, columns, inside, 0, NUM_ROWS)
    scaled = (root.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + columns, scaled, mask=inside)


@triton.jit
def _node_of_all(
    addresses,
    POINTER: tl.constexpr,  # noqa: N803
    columns,
    inside,
    FIRST: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
):
    """Return the sum of rows FIRST to FIRST + SPAN - 1 along the tree: left child + right child."""
    if SPAN == 1:
        row = tl.multiple_of(tl.load(addresses + FIRST).to(POINTER), 16)
        node = tl.load(row + columns, mask=inside, other=0.0)
    else:
        left = _node_of_all(addresses, POINTER, columns, inside, FIRST, SPAN // 2)
        middle: tl.constexpr = FIRST + SPAN // 2
        right = _node_of_all(addresses, POINTER, columns, inside, middle, SPAN // 2)
        node = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    return node


@triton.jit
def _node(
    rows,
    mine,
    columns,
    inside,
    stride,
    RANK: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
):
    """Return the sum of rows FIRST to FIRST + SPAN - 1 along the tree: left child + right child.

    Row RANK is read from `mine`, the other rows from `rows`. If RANK is NUM_ROWS, all rows are read
    from `rows`.
    """
    if SPAN == 1:
        if FIRST == RANK:
            node = tl.load(mine + columns, mask=inside, other=0.0)
        else:
            node = tl.load(rows + FIRST * stride + columns, mask=inside, other=0.0)
    else:
        left = _node(rows, mine, columns, inside, stride, RANK, FIRST, SPAN // 2)
        middle: tl.constexpr = FIRST + SPAN // 2
        right = _node(rows, mine, columns, inside, stride, RANK, middle, SPAN // 2)
        node = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    return node
