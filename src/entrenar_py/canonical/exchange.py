"""The exchange after which all ranks hold the tree's sum of their buffers.

`all_reduce` is the algorithm, readable and blocking: it is what runs on CPUs, and the reference for
`pipeline.py`, which does the same on GPUs without ever waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

# A chunk is a multiple of this, so that a GPU reads each in words of sixteen bytes.
ALIGNMENT = 16  # elements

# Renamed in torch 2.13, where the older name warns.
all_gather: Callable[..., dist.Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


@dataclass(frozen=True)
class Cut:
    """Pieces that divide evenly among ranks, in order, and the tail that is left: elements."""

    pieces: tuple[range, ...]
    tail: range


def cut(num_elements: int, *, world_size: int, piece_max: int) -> Cut:
    """`num_elements` in as few pieces as `piece_max` elements allow, each nearly as long.

    A piece is a multiple of `world_size * ALIGNMENT`, and never empty; the tail is shorter.
    """
    unit = world_size * ALIGNMENT
    num_units = num_elements // unit
    num_pieces = -(-num_units // max(piece_max // unit, 1))
    starts = [unit * (num_units * one // num_pieces) for one in range(num_pieces)]
    whole = unit * num_units
    pieces = tuple(range(*edges) for edges in pairwise([*starts, whole]))
    return Cut(pieces=pieces, tail=range(whole, num_elements))


def add_tree(rows: Tensor, *, scale: float, out: Tensor) -> None:
    """Puts `scale` times the tree's sum of `rows` [num_rows, n] into `out` [n].

    `num_rows` is a power of two. Every addition rounds to the dtype: a node is a tensor like any
    other, with the same bits whether it was added here or came from another rank.
    """
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    torch.mul(rows[0], scale, out=out)


def all_reduce(buffer: Tensor, *, scale: float, piece_max: int, group: dist.ProcessGroup) -> None:
    """Leaves in `buffer` [n] of every rank `scale` times the tree's sum of all ranks' buffers.

    Rank r adds up the r-th chunk of each piece for everyone; the tail is added by everyone.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        buffer.mul_(scale)
        return
    plan = cut(len(buffer), world_size=world_size, piece_max=piece_max)
    for one in plan.pieces:
        piece = buffer[one.start : one.stop]
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
