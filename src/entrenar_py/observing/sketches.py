"""Sketches of tensors of any size, on any device (`trace.Sketch`), and the records that hold them.

The projection is a sum over rows of PROJECTIONS elements. Element g of a whole tensor, in C order,
is element c = g % PROJECTIONS of row r = g // PROJECTIONS. With h = `mixed` of r, it is added to
number c ^ (mixed(h) % PROJECTIONS) of the projection, with a minus sign if bit c of h is set. So
each row is permuted and its signs are changed at random, by a function of the place alone. Then
the expected squared length of the projection is that of the tensor.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.rank_files.layout import Piece
from entrenar_py.trace import Sketch, TensorRecord, record_sketch
from entrenar_py.trace.tensors import PROJECTIONS, SAMPLES
from entrenar_py.watch import digest

if TYPE_CHECKING:
    from entrenar_py.observing.sketches_on_gpu import SketchesOnGpu

# The dtypes that have sketches -> numpy's names of those in which samples are kept.
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "float32",
}
_BLOCK_ROWS = 2**15  # rows that are projected at once on a CPU, to bound the memory
_LOW = 0xFFFFFFFF  # the lowest 32 bits


class Sketches:
    """Makes the records of tensors whose values are not kept.

    It keeps tables on the GPU from one call to the next, for tensors that stay where they are.
    """

    def __init__(self) -> None:
        self._gpu: dict[torch.device, SketchesOnGpu] = {}

    def records(
        self, named: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, exact: bool
    ) -> dict[str, TensorRecord]:
        """Return the record of each tensor, which this rank holds whole, or as its piece.

        With `exact` its digest is that of all bits, else that of the sketch: two gradients that
        differ by less than the rounding of a float64 sum may then have the same digest. A tensor
        that isn't of floating point has no sketch, and always the digest of all bits.
        """
        records: dict[str, TensorRecord] = {}
        by_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            piece = pieces.get(name)
            fits = tensor.dtype in DTYPES and (piece is None or first_of(tensor, piece) is not None)
            if fits and _is_on_gpu(tensor):
                by_gpu.setdefault(tensor.device, {})[name] = tensor
            else:
                records[name] = _record(tensor, piece, exact=exact)
        for device, chosen in by_gpu.items():
            records |= self._of(device).records(chosen, pieces, exact=exact)
        return {name: records[name] for name in named}

    def digests(self, named: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
        """Return records that have only the digest of all bits."""
        records: dict[str, TensorRecord] = {}
        by_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            if _is_on_gpu(tensor):
                by_gpu.setdefault(tensor.device, {})[name] = tensor
            else:
                records[name] = TensorRecord(digest.digest(tensor))
        for device, chosen in by_gpu.items():
            bits = self._of(device).bits([*chosen.values()])
            records |= {name: TensorRecord(text) for name, text in zip(chosen, bits, strict=True)}
        return {name: records[name] for name in named}

    def _of(self, device: torch.device) -> SketchesOnGpu:
        if device not in self._gpu:
            from entrenar_py.observing.sketches_on_gpu import SketchesOnGpu

            self._gpu[device] = SketchesOnGpu()
        return self._gpu[device]


def _is_on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels read a tensor; without Triton the same is computed step by step."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _record(tensor: Tensor, piece: Piece | None, *, exact: bool) -> TensorRecord:
    if tensor.dtype not in DTYPES:
        return TensorRecord(digest.digest(tensor))
    made = sketch(tensor, piece)
    return record_sketch(made, DTYPES[tensor.dtype], digest.digest(tensor) if exact else None)


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
