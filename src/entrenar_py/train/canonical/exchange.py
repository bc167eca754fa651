"""An all-reduce and a reduce-scatter that add the ranks' buffers along a fixed binary tree.

`all_reduce` is the plain, blocking algorithm. It runs on CPUs and is the reference for the two
classes in `on_gpus.py`, which compute the same on GPUs without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

# The length of a chunk is a multiple of this, so that a GPU can read it in words of 16 bytes.
ALIGNMENT = 16  # elements

# torch 2.13 renamed this function and warns on the old name.
all_gather: Callable[..., dist.Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


@dataclass(frozen=True)
class Cut:
    """A buffer's elements as pieces that divide evenly among ranks, and the remaining tail."""

    pieces: tuple[range, ...]
    tail: range


def cut(num_elements: int, *, world_size: int, piece_max: int) -> Cut:
    """Cut `num_elements` into the fewest pieces of up to `piece_max` elements, of similar lengths.

    The length of a piece is a positive multiple of `world_size * ALIGNMENT`. The tail is shorter
    than that.
    """
    unit = world_size * ALIGNMENT
    num_units = num_elements // unit
    num_pieces = -(-num_units // max(piece_max // unit, 1))
    starts = [unit * (num_units * one // num_pieces) for one in range(num_pieces)]
    whole = unit * num_units
    pieces = tuple(range(*edges) for edges in pairwise([*starts, whole]))
    return Cut(pieces=pieces, tail=range(whole, num_elements))


def add_tree(rows: Tensor, *, scale: float, out: Tensor) -> None:
    """Write `scale` times the sum of `rows` [num_rows, n] along the tree to `out` [n].

    `num_rows` is a power of two. Every addition rounds to the dtype of `rows`, so the bits of a
    node don't depend on which rank computes it.
    """
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    torch.mul(rows[0], scale, out=out)


def all_reduce(buffer: Tensor, *, scale: float, piece_max: int, group: dist.ProcessGroup) -> None:
    """Replace `buffer` [n] on every rank with `scale` times the tree's sum of all ranks' buffers.

    Rank r adds the r-th chunk of each piece for all ranks. Every rank adds the whole tail itself.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        buffer.mul_(scale)
        return
    plan = cut(len(buffer), world_size=world_size, piece_max=piece_max)
    for span in plan.pieces:
        piece = buffer[span.start : span.stop]
        rows = torch.empty_like(piece)
        dist.all_to_all_single(rows, piece, group=group)
        mine = piece.view(world_size, -1)[rank]
        add_tree(rows.view(world_size, -1), scale=scale, out=mine)
        all_gather(piece, mine.clone(), group=group)
    if plan.tail:
        tail = buffer[plan.tail.start :]
        rows = tail.new_empty(world_size * len(tail))
        all_gather(rows, tail, group=group)
        add_tree(rows.view(world_size, -1), scale=scale, out=tail)


def scatter(buffer: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' r-th chunks of `buffer` [world size * n], r being this rank.

    They are [world size, n], in the order of the ranks.
    """
    rows = torch.empty_like(buffer)
    dist.all_to_all_single(rows, buffer, group=group)
    return rows.view(dist.get_world_size(group), -1)


def reduce_scatter(buffer: Tensor, *, scale: float, out: Tensor, group: dist.ProcessGroup) -> None:
    """Write `scale` times the tree's sum of all ranks' r-th chunks of `buffer` to `out` [n].

    `buffer` is [world size * n], and r is this rank. On GPUs it runs asynchronously on the current
    stream.
    """
    if not buffer.is_cuda:
        add_tree(scatter(buffer, group=group), scale=scale, out=out)
        return
    from entrenar_py.train.canonical import kernels  # needs triton

    rank, chunks = dist.get_rank(group), buffer.view(-1, len(out))
    gathered = torch.empty_like(chunks)
    sent, received = list(chunks), list(gathered)
    sent[rank] = received[rank] = out.new_empty(0)  # NCCL would copy it
    dist.all_to_all(received, sent, group=group)
    kernels.add_tree(gathered, scale=scale, out=out, own=(rank, chunks[rank]))
