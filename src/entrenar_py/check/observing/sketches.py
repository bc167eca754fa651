"""Sketches of tensors of any size, on any device (`trace.Sketch`).

The projection is a vector of PROJECTIONS numbers, a sum over rows of PROJECTIONS elements. Element
g of a whole tensor, in C order, is element c = g % PROJECTIONS of row r = g // PROJECTIONS. With h
= `mixed` of r, it is added to number c ^ (mixed(h) % PROJECTIONS) of the projection, with a minus
sign if bit c of h is set. So each row is permuted and its signs are changed at random, by a
function that depends only on the element's index. Then the expected squared length of the
projection is that of the tensor.

On a GPU with Triton, one launch reads all tensors (`kernels`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.compute import digest
from entrenar_py.compute.digest import DigestTable
from entrenar_py.shared.trace import Sketch, TensorRecord, record_sketch
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES

# Dtypes that have sketches -> numpy's names of the dtypes that their samples are stored in.
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "float32",
}
_ROWS = 512  # rows in a chunk on a GPU: one program of the kernel handles a chunk
_TILE = 64
_BATCH = 64
_TABLES_MAX = 8  # digest tables: each is for tensors at fixed addresses, such as weights
_BLOCK_ROWS = 2**12  # rows that a CPU projects at once: 1 MB, which fits into its caches
_LOW = 0xFFFFFFFF  # mask of the lowest 32 bits


def sketch(tensor: Tensor, piece: Piece | None = None) -> Sketch:
    """Return the sketch of a whole tensor of any shape, or of a `piece` of it, on any device."""
    plain = tensor.detach().reshape(-1)
    size = tensor.numel() if piece is None else math.prod(piece.whole)
    first = first_of(tensor, piece)
    index = None if first is not None else _index(piece, plain.device)
    # First add up all rows with the same permutation.
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
    """Yield row numbers, int64 [rows], and the elements of these rows, float64 [rows, PROJECTIONS].

    Elements that the piece doesn't have are 0. A row may be yielded several times, each time with
    some of its elements.
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
    """Return byte -> the signs that stand for its bits, lowest bit first, float64 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1.0 - 2.0 * bits).to(device)


def mixed(number: Tensor) -> Tensor:
    """Return hashes of 32-bit numbers; argument and result are int64 (Wellons, "lowbias32")."""
    number = number ^ (number >> 16)
    number = (number * 0x7FEB352D) & _LOW
    number = number ^ (number >> 15)
    number = (number * 0x846CA68B) & _LOW
    return number ^ (number >> 16)


@cache
def sample_places(size: int) -> NDArray[np.int64]:
    """Return the indices of the sampled elements: a random one in each of equal parts, in order."""
    count = min(SAMPLES, size)
    bounds = np.array([part * size // max(count, 1) for part in range(count + 1)], dtype=np.int64)
    seeds = torch.arange(count) * 0x9E3779B1 + size
    drawn = mixed(seeds & _LOW).numpy()
    places: NDArray[np.int64] = bounds[:-1] + drawn % np.maximum(np.diff(bounds), 1)
    return places


def _sampled(
    plain: Tensor, size: int, first: int | None, index: Tensor | None
) -> NDArray[np.float64]:
    """Return the sampled elements; 0 for elements that the piece doesn't have."""
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
    """Return the index of the piece's first element in the whole tensor.

    None if the elements don't form a single range. They do if the tensor is whole, or cut only
    along its first dimension.
    """
    if piece is None:
        return 0
    if tuple(piece.shape[1:]) == tuple(piece.whole[1:]):
        return int(piece.offset[0]) * math.prod(piece.whole[1:]) if piece.offset else 0
    return None


def _index(piece: Piece | None, device: torch.device) -> Tensor:
    """Return the index of each of a piece's elements in the whole tensor, int64, flat."""
    assert piece is not None, "a whole tensor is in order"
    index = torch.zeros((), dtype=torch.int64, device=device)
    for offset, length, whole in zip(piece.offset, piece.shape, piece.whole, strict=True):
        along = torch.arange(offset, offset + length, device=device)
        index = index[..., None] * whole + along
    return index.reshape(-1)


class Sketches:
    """Creates records of tensors without their values: sketches and digests.

    On GPUs it keeps tables between calls, for tensors that stay at the same address.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, DigestTable] = {}

    def records(
        self, named: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, exact: bool
    ) -> dict[str, TensorRecord]:
        """Return the record of each tensor; this rank has all of it, or the piece in `pieces`.

        With `exact`, the digest is that of all bits, otherwise that of the sketch. In the
        latter case two gradients may have the same digest although they differ, by less than the
        rounding of a float64 sum. A tensor that isn't floating-point has no sketch, and always the
        digest of all bits.
        """
        records: dict[str, TensorRecord] = {}
        on_gpu: dict[str, Tensor] = {}
        for name, tensor in named.items():
            piece = pieces.get(name)
            fits = tensor.dtype in DTYPES and (piece is None or first_of(tensor, piece) is not None)
            if fits and _is_on_gpu(tensor):
                on_gpu[name] = tensor
            else:
                records[name] = _record(tensor, piece, exact=exact)
        bits = self.digests(on_gpu) if exact else {}
        by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in on_gpu.items():
            by_kind.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
        for (_, dtype), alike in by_kind.items():
            for name, shown in zip(alike, _sketches(alike, pieces, dtype), strict=True):
                all_bits = bits[name].digest if exact else None
                records[name] = record_sketch(shown, DTYPES[dtype], all_bits)
        return {name: records[name] for name in named}

    def digests(self, named: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
        """Return records with only the digest of all bits."""
        records: dict[str, TensorRecord] = {}
        by_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            if _is_on_gpu(tensor):
                by_gpu.setdefault(tensor.device, {})[name] = tensor
            else:
                records[name] = TensorRecord(digest.digest(tensor))
        for device, on_gpu in by_gpu.items():
            rows = self._table(device, [*on_gpu.values()]).run()[:, :2].cpu().numpy()
            for name, row in zip(on_gpu, rows, strict=True):
                records[name] = TensorRecord(digest.text(row.tobytes()))
        return {name: records[name] for name in named}

    def _table(self, device: torch.device, tensors: Sequence[Tensor]) -> DigestTable:
        key = (device, *digest.places(tensors))
        table = self._tables.pop(key, None) or DigestTable(tensors)
        self._tables[key] = table  # move to the end, since tables are deleted from the front
        if len(self._tables) > _TABLES_MAX:
            del self._tables[next(iter(self._tables))]
        return table


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _record(tensor: Tensor, piece: Piece | None, *, exact: bool) -> TensorRecord:
    if tensor.dtype not in DTYPES:
        return TensorRecord(digest.digest(tensor))
    # These are hundreds of small operations. If a mode intercepted each, that would take a third of
    # a step, and a mode of the script may put new tensors on another device.
    with torch._C.DisableTorchFunction():
        bits = digest.digest(tensor) if exact else None
        return record_sketch(sketch(tensor, piece), DTYPES[tensor.dtype], bits)


# --- on a GPU: the sketches of all tensors at once ------------------------------------------------


def _sketches(
    named: Mapping[str, Tensor], pieces: Mapping[str, Piece], dtype: torch.dtype
) -> list[Sketch]:
    """Return the sketches of tensors of one dtype on one device."""
    plain = [t if t.is_contiguous() else t.contiguous() for t in named.values()]
    device = plain[0].device
    sizes = counts = tuple(tensor.numel() for tensor in plain)
    firsts = (0,) * len(plain)
    if pieces:
        firsts = tuple(first_of(tensor, pieces.get(name)) or 0 for name, tensor in named.items())
        sizes = tuple(
            math.prod(pieces[name].whole) if name in pieces else count
            for name, count in zip(named, counts, strict=True)
        )
    owner, first_row, ends, wanted = _tables_of_sizes(firsts, counts, sizes, device)
    table = np.array([[tensor.data_ptr() for tensor in plain], firsts, counts], np.int64)
    on_device = torch.from_numpy(np.ascontiguousarray(table.T)).to(device)
    num_chunks = len(owner)
    sums = torch.empty((num_chunks, PROJECTIONS + 1), dtype=torch.float64, device=device)
    out = torch.empty((len(named), 1 + PROJECTIONS + SAMPLES), dtype=torch.float64, device=device)
    kernels, kind = digest.kernels(), _triton_dtype(dtype)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if num_chunks:
            kernels.project_sketch[(num_chunks,)](
                on_device, owner, first_row, sums, dtype=kind, rows=_ROWS, tile=_TILE, num_warps=4
            )
        kernels.finish_sketch[(len(named),)](
            on_device, wanted, ends, sums, out, dtype=kind, batch=_BATCH
        )
    numbers = out.cpu().numpy()
    return [
        Sketch(size, row if size >= SAMPLES else row[: 1 + PROJECTIONS + size])
        for size, row in zip(sizes, numbers, strict=True)
    ]


@lru_cache(maxsize=32)
def _tables_of_sizes(
    firsts: tuple[int, ...], counts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tables that depend only on sizes, on `device`, as arguments of the kernels."""
    owner: list[NDArray[np.int32]] = []
    first_row: list[NDArray[np.int64]] = []
    ends = [0]
    for index, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        begin, end = first // PROJECTIONS, -(-(first + count) // PROJECTIONS)
        rows = np.arange(begin, end if count else begin, _ROWS, dtype=np.int64)
        owner.append(np.full(len(rows), index, np.int32))
        first_row.append(rows)
        ends.append(ends[-1] + len(rows))
    wanted = np.full((len(sizes), SAMPLES), -1, np.int64)
    for index, size in enumerate(sizes):
        wanted[index, : min(SAMPLES, size)] = sample_places(size)
    arrays = np.concatenate(owner), np.concatenate(first_row), np.array(ends, np.int64), wanted
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
