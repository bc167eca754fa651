"""The tree's additions on a GPU: rows that came from the ranks, added in one pass over memory.

The same bits as `exchange.add_tree`, which is what to read: the kernel loads an element of each
row, adds along the tree, rounds to the rows' dtype after every addition, scales, and stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # of one program, a row: eight or sixteen bytes a thread


def add_tree(rows: Tensor, *, scale: float, out: Tensor) -> None:
    """Puts `scale` times the tree's sum of `rows` [num_rows, n] into `out` [n], both contiguous.

    `num_rows` is a power of two. Runs on the current stream; the host does not wait.
    """
    num_rows, num_columns = rows.shape
    grid = (triton.cdiv(num_columns, _ELEMENTS),)
    with torch.cuda.device_of(rows):
        _add_tree[grid](rows, out, num_columns, scale, num_rows, _ELEMENTS)


@triton.jit
def _add_tree(
    rows,  # [NUM_ROWS, num_columns]
    out,  # [num_columns]
    num_columns,
    scale,
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = columns < num_columns
    stride = tl.cast(num_columns, tl.int64)
    root = _node(rows, columns, inside, stride, 0, NUM_ROWS)
    scaled = (root.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + columns, scaled, mask=inside)


@triton.jit
def _node(rows, columns, inside, stride, FIRST: tl.constexpr, SPAN: tl.constexpr):  # noqa: N803
    """The node over rows FIRST to FIRST + SPAN - 1: its left child plus its right child."""
    if SPAN == 1:
        node = tl.load(rows + FIRST * stride + columns, mask=inside, other=0.0)
    else:
        left = _node(rows, columns, inside, stride, FIRST, SPAN // 2)
        right = _node(rows, columns, inside, stride, FIRST + SPAN // 2, SPAN // 2)
        node = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    return node


def add_tree_of_peers(
    peers: Tensor, *, local: Tensor, start: int, stop: int, scale: float, num_programs: int
) -> None:
    """Puts the scaled tree's sum of elements `start` to `stop` of all peers' memory into all of it.

    `peers` are the addresses, int64 [num_ranks], of what is `local` on each rank, in the order of
    ranks, itself included; all mapped on this device, all aligned to 16 bytes.
    """
    with torch.cuda.device_of(local):
        _add_tree_of_peers[(num_programs,)](
            peers, local, start, stop, scale, len(peers), 2 * _ELEMENTS, num_warps=8
        )


@triton.jit
def _add_tree_of_peers(
    peers,  # addresses [NUM_RANKS]
    local,  # of the dtype of all
    start,
    stop,
    scale,
    NUM_RANKS: tl.constexpr,  # noqa: N803
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    first = start + tl.program_id(0).to(tl.int64) * ELEMENTS
    for block in range(first, stop, tl.num_programs(0).to(tl.int64) * ELEMENTS):
        columns = block + tl.arange(0, ELEMENTS)
        inside = columns < stop
        root = _node_of_peers(peers, local, columns, inside, 0, NUM_RANKS)
        scaled = (root.to(tl.float32) * scale).to(local.dtype.element_ty)
        for rank in tl.static_range(NUM_RANKS):
            tl.store(_memory(peers, local, rank) + columns, scaled, mask=inside)


@triton.jit
def _node_of_peers(
    peers,
    local,
    columns,
    inside,
    FIRST: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
):
    """The node over ranks FIRST to FIRST + SPAN - 1."""
    if SPAN == 1:
        node = tl.load(_memory(peers, local, FIRST) + columns, mask=inside, other=0.0)
    else:
        left = _node_of_peers(peers, local, columns, inside, FIRST, SPAN // 2)
        right = _node_of_peers(peers, local, columns, inside, FIRST + SPAN // 2, SPAN // 2)
        node = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    return node


@triton.jit
def _memory(peers, local, rank):
    """Where a rank's memory begins; said to be aligned, or it would be read word by word."""
    return tl.multiple_of(tl.load(peers + rank).to(local.dtype), 16)
