"""Sketches of all tensors on one GPU at once, with the digests of their bits where these count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.check.observing import sketches
from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.check.watch import digest, digest_table
from entrenar_py.shared.trace import Sketch, TensorRecord, record_sketch
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES

_ROWS = 512  # of a chunk: one program of the kernel
_TILE = 64
_BATCH = 64
_NUMBERS = 1 + PROJECTIONS + SAMPLES
_TABLES_MAX = 8  # of digests: each is for tensors at fixed addresses, as weights are


class SketchesOnGpu:
    """Makes the records of tensors on one GPU, which are whole or cut along their first dimension.

    Raises BackendUnavailable if Triton is not installed.
    """

    def __init__(self) -> None:
        self._digests: dict[Any, digest_table.DigestTable] = {}

    def records(
        self, named: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, exact: bool
    ) -> dict[str, TensorRecord]:
        """Return the record of each tensor; `exact` as in `sketch_records.Sketches.records`."""
        bits = dict(zip(named, self.bits([*named.values()]), strict=True)) if exact else {}
        records: dict[str, TensorRecord] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in named.values()):
            alike = {name: t for name, t in named.items() if t.dtype is dtype}
            kept = sketches.DTYPES[dtype]
            for name, sketch in zip(alike, _sketches(alike, pieces, dtype), strict=True):
                records[name] = record_sketch(sketch, kept, bits.get(name))
        return records

    def bits(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the digest of each tensor's bits."""
        key = tuple(digest_table.places(tensors))
        table = self._digests.pop(key, None) or digest_table.DigestTable(tensors)
        self._digests[key] = table  # the last used is the last to go
        if len(self._digests) > _TABLES_MAX:
            del self._digests[next(iter(self._digests))]
        rows = table.run()[:, :2].cpu().numpy()
        return [digest.text(row.tobytes()) for row in rows]


def _sketches(
    named: Mapping[str, Tensor], pieces: Mapping[str, Piece], dtype: torch.dtype
) -> list[Sketch]:
    """Return the sketches of tensors of one dtype on one device."""
    plain = [t if t.is_contiguous() else t.contiguous() for t in named.values()]
    device = plain[0].device
    sizes = counts = tuple(tensor.numel() for tensor in plain)
    firsts = (0,) * len(plain)
    if pieces:
        firsts = tuple(
            sketches.first_of(tensor, pieces.get(name)) or 0 for name, tensor in named.items()
        )
        sizes = tuple(
            math.prod(pieces[name].whole) if name in pieces else count
            for name, count in zip(named, counts, strict=True)
        )
    owner, first_row, ends, wanted = _tables(firsts, counts, sizes, device)
    table = np.array([[tensor.data_ptr() for tensor in plain], firsts, counts], np.int64)
    on_device = torch.from_numpy(np.ascontiguousarray(table.T)).to(device)
    num_chunks = len(owner)
    sums = torch.empty((num_chunks, PROJECTIONS + 1), dtype=torch.float64, device=device)
    out = torch.empty((len(named), _NUMBERS), dtype=torch.float64, device=device)
    kernel, kind = _kernels(), _triton_dtype(dtype)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if num_chunks:
            kernel.project[(num_chunks,)](
                on_device, owner, first_row, sums, dtype=kind, rows=_ROWS, tile=_TILE, num_warps=4
            )
        kernel.finish[(len(named),)](on_device, wanted, ends, sums, out, dtype=kind, batch=_BATCH)
    numbers = out.cpu().numpy()
    return [
        Sketch(size, row if size >= SAMPLES else row[: 1 + PROJECTIONS + size])
        for size, row in zip(sizes, numbers, strict=True)
    ]


@lru_cache(maxsize=32)
def _tables(
    firsts: tuple[int, ...], counts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tables that depend on sizes alone, on `device`, as the kernels take them."""
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
        wanted[index, : min(SAMPLES, size)] = sketches.sample_places(size)
    arrays = np.concatenate(owner), np.concatenate(first_row), np.array(ends, np.int64), wanted
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def _kernels() -> Any:
    from entrenar_py.check.observing import sketch_kernel

    return sketch_kernel
