"""Sketches of tensors of any size, on any device (`trace.Sketch`).

The projection is a sum over rows of PROJECTIONS elements. Element g of a whole tensor, in C order,
is element c = g % PROJECTIONS of row r = g // PROJECTIONS. With h = `mixed` of r, it is added to
number c ^ (mixed(h) % PROJECTIONS) of the projection, with a minus sign if bit c of h is set. So
each row is permuted and its signs are changed at random, by a function of the place alone. Then
the expected squared length of the projection is that of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.shared.trace import Sketch
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES

# The dtypes that have sketches -> numpy's names of those in which samples are kept.
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "float32",
}
_BLOCK_ROWS = 2**12  # rows that are projected at once on a CPU: 1 MB, which its caches hold
_LOW = 0xFFFFFFFF  # the lowest 32 bits


def sketch(tensor: Tensor, piece: Piece | None = None) -> Sketch:
    """Return the sketch of a whole tensor of any shape, or of a `piece` of it, on any device."""
    plain = tensor.detach().reshape(-1)
    size = tensor.numel() if piece is None else math.prod(piece.whole)
    first = first_of(tensor, piece)
    index = None if first is not None else _index(piece, plain.device)
    # By how each row is permuted: all rows alike are added up first.
    alike = torch.zeros((PROJECTIONS, PROJECTIONS), dtype=torch.float64, device=plain.device)
    square = torch.zeros((), dtype=torch.float64, device=plain.device)
    for rows, part in _rows(plain, first, index):
        drawn = mixed(mixed(rows >> 32) ^ (rows & _LOW))
        signs = _signs(plain.device)[drawn.int().view(torch.uint8).long()].view(-1, PROJECTIONS)
        alike.index_add_(0, mixed(drawn) % PROJECTIONS, part * signs)
        square += part.square().sum()
    column = torch.arange(PROJECTIONS, device=plain.device)
    projected = alike[column[:, None], column ^ column[:, None]].sum(0)
    summed = torch.cat([square[None], projected]).cpu().numpy()
    return Sketch(size, np.concatenate([summed, _sampled(plain, size, first, index)]))


def _rows(
    plain: Tensor, first: int | None, index: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield numbers of rows, int64 [rows], with their elements, float64 [rows, PROJECTIONS].

    Elements of other pieces are 0. A row may come more than once, with some of its elements.
    """
    for begin in range(0, plain.numel(), _BLOCK_ROWS * PROJECTIONS):
        part = plain[begin : begin + _BLOCK_ROWS * PROJECTIONS].double()
        if index is None:
            before, number = (first or 0) + begin, len(part)
            row, lead = before // PROJECTIONS, before % PROJECTIONS
            if lead or number % PROJECTIONS:
                part = torch.nn.functional.pad(part, (lead, -(lead + number) % PROJECTIONS))
            part = part.view(-1, PROJECTIONS)
            yield torch.arange(row, row + len(part), device=plain.device), part
            continue
        places = index[begin : begin + len(part)]
        rows, which = torch.unique(places // PROJECTIONS, return_inverse=True)
        spread = torch.zeros((len(rows), PROJECTIONS), dtype=torch.float64, device=plain.device)
        spread[which, places % PROJECTIONS] = part
        yield rows, spread


@cache
def _signs(device: torch.device) -> Tensor:
    """Return for each byte the signs that its bits stand for, lowest first, float64 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1.0 - 2.0 * bits).to(device)


def mixed(number: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers, as int64 in and out (Wellons, "lowbias32")."""
    number = number ^ (number >> 16)
    number = (number * 0x7FEB352D) & _LOW
    number = number ^ (number >> 15)
    number = (number * 0x846CA68B) & _LOW
    return number ^ (number >> 16)


@cache
def sample_places(size: int) -> NDArray[np.int64]:
    """Return the places of the sampled elements: one at random in each of equal parts, in order."""
    count = min(SAMPLES, size)
    bounds = np.array([part * size // max(count, 1) for part in range(count + 1)], dtype=np.int64)
    seeds = torch.arange(count) * 0x9E3779B1 + size
    drawn = mixed(seeds & _LOW).numpy()
    places: NDArray[np.int64] = bounds[:-1] + drawn % np.maximum(np.diff(bounds), 1)
    return places


def _sampled(
    plain: Tensor, size: int, first: int | None, index: Tensor | None
) -> NDArray[np.float64]:
    """Return the sampled elements; 0 for those of other pieces."""
    places = torch.from_numpy(sample_places(size))
    if index is not None:
        found = (index.cpu()[:, None] == places).nonzero()
        local = torch.full((len(places),), -1)
        local[found[:, 1]] = found[:, 0]
    else:
        local = places - (first or 0)
    held = (local >= 0) & (local < plain.numel())
    sampled = torch.zeros(len(places), dtype=torch.float64)
    sampled[held] = plain[local[held].to(plain.device)].double().cpu()
    return sampled.numpy()


def first_of(tensor: Tensor, piece: Piece | None) -> int | None:
    """Return the place of the first element in the whole tensor; None if others don't follow it.

    They do if the tensor is whole, or cut along its first dimension only.
    """
    if piece is None:
        return 0
    if tuple(piece.shape[1:]) == tuple(piece.whole[1:]):
        return int(piece.offset[0]) * math.prod(piece.whole[1:]) if piece.offset else 0
    return None


def _index(piece: Piece | None, device: torch.device) -> Tensor:
    """Return the place of each of a piece's elements in the whole tensor, int64, flat."""
    assert piece is not None, "a whole tensor is in order"
    index = torch.zeros((), dtype=torch.int64, device=device)
    for offset, length, whole in zip(piece.offset, piece.shape, piece.whole, strict=True):
        along = torch.arange(offset, offset + length, device=device)
        index = index[..., None] * whole + along
    return index.reshape(-1)
