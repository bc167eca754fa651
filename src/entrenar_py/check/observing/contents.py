"""Inputs of a model, recognised by their content if samples have no ids.

- Digests of rows identify a sample.
- `contents_of` summarises a sample in a few numbers, which show whether it is the same in two runs.
  Digests could not show it, because the last bits of a feature may depend on the batch in which it
  was computed.
- `Carried` recognises state that a model passes from one forward pass to the next, such as the
  memory of a recurrent model. Such state is among the inputs of a pass, but isn't a sample: it
  depends on the weights, so the same row comes with a different state in each epoch, and on a
  different number of workers. It is recognised by its storage, which an earlier pass returned, even
  if it was detached since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import tensors

ROWS_MAX = 2**16  # rows in a batch; slices of longer tensors are not samples
IGNORED = -100  # the label that torch's losses ignore
_LABELS = (torch.int64, torch.int32)
ID_BYTES = 6  # a JSON reader that knows only float64 has 53 bits for a whole number

PADDING = (0, -100)  # numbers that pad the end of texts, and of their labels
_WHOLE = (torch.int64, torch.int32, torch.int16)

Row = bytes


def tensors_in(batch: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of a batch: in lists, tuples and mappings, nested up to `depth` levels.

    Of a DTensor, this rank's part is yielded. Tensors that can't be indexed are left out.
    """
    if isinstance(batch, DTensor):
        yield tensors.local(batch)
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

    Trailing zeros, and trailing labels to ignore, are not part of a row, since their number depends
    on the longest row of the batch. Rows of the same length remain distinct. Return None for a
    scalar, for more than ROWS_MAX slices, and for tensors without plain elements.
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
    """Return `rows_of(tensor)` if no other tensor is likely to have these rows; otherwise None.

    Duplicate rows, and masks, identify little.
    """
    rows = rows_of(tensor)
    if not rows or len({*rows}) < len(rows) or len(torch.unique(tensor.detach())) <= 2:
        return None
    return rows


def _unpadded(row: bytes, ignored: bytes) -> bytes:
    end, size = len(row), len(ignored)
    while size and end and row[end - size : end] == ignored:
        end -= size
    return row[:end].rstrip(b"\0")


def _unpadded_rows_of(tensor: Tensor) -> list[Row] | None:
    """Return the rows of `rows_of`. Integer rows are without the PADDING at their end."""
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
    """Return a digest per row, over all tensors of the batch with as many rows as the first one.

    The digest of an integer row does not depend on the batch's padding. None if the batch has no
    rows.
    """
    count = num_rows(batch)
    parts = [_unpadded_rows_of(t) for t in tensors_in(batch) if t.dim() and len(t) == count]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return [blake3(b"".join(row)).digest(16) for row in zip(*known, strict=True)]


def as_id(row: Row) -> int:
    """Return a row's digest as a number that can be used as the id of a sample."""
    return int.from_bytes(row[:ID_BYTES], "little")


# --- samples in a few numbers ---------------------------------------------------------------------


# For each tensor: its number of elements per sample, their L2 norm, and their sum with fixed signs.
Contents = tuple[tuple[float, ...], ...]
TENSORS_MAX = 8
ELEMENTS_MAX = 4096  # per sample and tensor; of a larger one every k-th element is used


def contents_of(inputs: Any) -> Contents:
    """Return the contents of the samples in a model's arguments, in order.

    Samples are along the first dimension of the first tensor. Tensors with a different first
    dimension are left out.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if type(leaf) is Tensor and _can_be_read(leaf)]
    batched = [leaf for leaf in leaves if leaf.shape[0] == leaves[0].shape[0]]
    shown = [_shown(tensor) for tensor in batched[:TENSORS_MAX]]
    return tuple(
        tuple(number for of_tensor in of_sample for number in of_tensor)
        for of_sample in zip(*shown, strict=True)
    )


def of_samples(passes: Sequence[Contents], num_samples: int) -> Contents:
    """Return the contents of a micro-batch's samples from those of its forward passes.

    Either each pass had some of the samples, or each had all of them. In any other case nothing is
    known, and the result is ().
    """
    if passes and all(len(one) == num_samples for one in passes):
        return tuple(sum(parts, ()) for parts in zip(*passes, strict=True))
    together = tuple(sample for one in passes for sample in one)
    return together if len(together) == num_samples else ()


def _can_be_read(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    of_functorch = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.dim() > 0 and not (tensor.is_complex() or tensor.is_meta or of_functorch)


def _shown(tensor: Tensor) -> list[tuple[float, float, float]]:
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
    size = rows.shape[1]
    # Computed by numpy, which autocast and the script's dispatch modes don't affect.
    seen = rows[:, :: -(-size // ELEMENTS_MAX) or 1].cpu().double().resolve_neg().numpy()
    with np.errstate(all="ignore"):
        norms, sums = np.sqrt(np.square(seen).sum(1)), seen @ _signs(seen.shape[1])
    both = zip(norms.tolist(), sums.tolist(), strict=True)
    return [(float(size), _short(norm), _short(total)) for norm, total in both]


def _short(number: float) -> float:
    return float(f"{number:.9g}")


@cache
def _signs(size: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).choice((-1.0, 1.0), size)


# --- carried state --------------------------------------------------------------------------------


class Carried:
    """Separates new inputs of a pass from values that earlier passes returned."""

    def __init__(self) -> None:
        self._returned: set[StorageWeakRef] = set()

    def fresh(self, inputs: Any) -> Any:
        """Return the inputs without carried state; all inputs if nothing else would be left."""
        if not self._returned:
            return inputs
        tensors = [*tensors_in(inputs)]
        fresh = [tensor for tensor in tensors if self._returned.isdisjoint(_storages([tensor]))]
        return fresh if len(fresh) < len(tensors) and any(t.dim() for t in fresh) else inputs

    def note(self, inputs: Any, output: Any) -> None:
        """Record the values that a pass returned, except for its own inputs."""
        self._returned = {ref for ref in self._returned if not ref.expired()}  # type: ignore[no-untyped-call]
        fresh = {*_storages(tensors_in(output))}
        self._returned |= fresh - {*_storages(tensors_in(inputs))}


def _storages(tensors: Iterable[Tensor]) -> Iterator[StorageWeakRef]:
    for tensor in tensors:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided and not wrapped:
            yield StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
