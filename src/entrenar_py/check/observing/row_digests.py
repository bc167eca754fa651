"""The rows of tensors as digests, by which a sample is recognised without an id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import dtensors

ROWS_MAX = 2**16  # of a batch; rows of more are no samples
IGNORED = -100  # the label that torch's losses ignore
_LABELS = (torch.int64, torch.int32)
ID_BYTES = 6  # a JSON reader that knows only float64 has 53 bits for a whole number

PADDING = (0, -100)  # at the end of texts, and of their labels
_WHOLE = (torch.int64, torch.int32, torch.int16)

Row = bytes


def tensors_in(batch: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of a batch: in lists, tuples and mappings, and lists of these.

    Of a DTensor it is this rank's part. Tensors that can't be indexed are left out.
    """
    if isinstance(batch, DTensor):
        yield dtensors.local(batch)
    elif isinstance(batch, Tensor):
        if not (batch.is_nested or batch.is_mkldnn):
            yield batch
    elif depth and isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value, depth - 1)


def num_rows(batch: Any) -> int | None:
    """Return the size of the first dimension of the batch's first tensor; None if it has none."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    return None


def rows_of(tensor: Tensor) -> list[Row] | None:
    """Return a digest of each slice along the first dimension, without the padding at its end.

    Zeros there, or labels to ignore, are no part of a row: it has as many as the longest row of its
    batch needs. Rows of one length stay apart. None for a scalar, for more than ROWS_MAX slices,
    and for tensors without plain elements.
    """
    if not (tensor.dim() and tensor.layout is torch.strided) or len(tensor) > ROWS_MAX:
        return None
    if tensor.is_meta or tensor.is_quantized:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    head = f"{plain.dtype} {tuple(plain.shape[2:])} ".encode()
    padding = torch.full((1,), IGNORED, dtype=plain.dtype) if plain.dtype in _LABELS else None
    ignored = b"" if padding is None else padding.numpy().tobytes()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    flat = plain.reshape(len(plain), -1).view(torch.uint8) if plain.numel() else plain
    return [blake3(head + _unpadded(row.numpy().tobytes(), ignored)).digest(16) for row in flat]


def telling_rows(tensor: Tensor) -> list[Row] | None:
    """Return what `rows_of` does if no other tensor is likely to have these rows; else None.

    Rows that are alike, and masks, tell little.
    """
    rows = rows_of(tensor)
    if not rows or len({*rows}) < len(rows) or len(torch.unique(tensor.detach())) <= 2:
        return None
    return rows


def _unpadded(row: bytes, ignored: bytes) -> bytes:
    """Return a row without zeros at its end, nor elements that are `ignored` behind these."""
    end, size = len(row), len(ignored)
    while size and end and row[end - size : end] == ignored:
        end -= size
    return row[:end].rstrip(b"\0")


def _unpadded_rows_of(tensor: Tensor) -> list[Row] | None:
    """Return what `rows_of` does; rows of whole numbers without the PADDING at their end."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    is_padded = tensor.dim() == 2 and is_plain and tensor.dtype in _WHOLE
    if not (is_padded and tensor.numel()) or len(tensor) > ROWS_MAX:
        return rows_of(tensor)
    rows = tensor.detach().contiguous().cpu()
    filled = torch.stack([rows != number for number in PADDING]).all(0)
    sizes = (filled * torch.arange(1, rows.shape[1] + 1)).amax(1)
    head = f"{rows.dtype} ".encode()
    return [
        blake3(head + row[: int(size)].numpy().tobytes()).digest(16)
        for row, size in zip(rows, sizes, strict=True)
    ]


def rows_together(batch: Any) -> list[Row] | None:
    """Return a digest of each row of all the batch's tensors that have as many rows as the first.

    Rows of whole numbers are the same whatever the batch pads them to. None if the batch has no
    rows.
    """
    count = num_rows(batch)
    parts = [_unpadded_rows_of(t) for t in tensors_in(batch) if t.dim() and len(t) == count]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return [blake3(b"".join(row)).digest(16) for row in zip(*known, strict=True)]


def as_id(row: Row) -> int:
    """Return a row's digest as a number that can stand for a sample's id."""
    return int.from_bytes(row[:ID_BYTES], "little")
