"""The batches that a loader hands out, recognised by their memory when a model is given them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Ids = tuple[int, ...]

_DEPTH_MAX = 4  # of containers in a batch that are looked into
_TENSORS_MAX = 64


class Block(NamedTuple):
    """The memory of a tensor: its storage, where it begins there, its rows and their distance."""

    storage: StorageWeakRef
    offset: int
    stride: int
    num_rows: int


class Batch:
    """A batch that was handed out: its samples in order, or None and `why` they are unknown.

    `iteration` is the run through the loader that it belongs to. The batch holds no tensor, so that
    memory is freed when the script drops it. `is_gathered` tells that its samples were drawn one by
    one. `rest` are samples that a shortened pass has drawn with its last batch: they come with the
    first of it that are used.
    """

    def __init__(self, iteration: Any, ids: Ids | None, data: Any, why: str) -> None:
        self.iteration, self.ids, self.why = iteration, ids, why
        self.is_gathered = self.is_used = False
        self.rest: Ids = ()
        self._blocks = blocks_of(data)
        self._thread = threading.get_ident()
        self._rows_used: set[int] = set()

    def extend(self, ids: Ids | None) -> None:
        """Add samples."""
        self.ids = None if self.ids is None or ids is None else self.ids + ids

    def fits(self, blocks: list[Block]) -> bool:
        """Return whether a pass in this thread may have been given a copy of this batch."""
        if threading.get_ident() != self._thread:
            return False  # it was put into a queue
        several = self.is_gathered and len(self.ids or ()) > 1 and bool(blocks)
        return not several or len(self.ids or ()) in [block.num_rows for block in blocks]

    def shares(self, blocks: list[Block], *, exactly: bool = False) -> bool:
        """Return whether any of `blocks` lies in this batch's memory, or begins where it does."""
        return any(
            own.storage == block.storage and (not exactly or own.offset == block.offset)
            for own in self._blocks
            for block in blocks
        )

    def is_gone(self) -> bool:
        """Return whether the script has dropped all tensors of the batch."""
        return all(block.storage.expired() for block in self._blocks)  # type: ignore[no-untyped-call]

    def use(self, blocks: list[Block]) -> Ids | None:
        """Return the samples that a model is given with `blocks`, without those given before.

        If the blocks are rows of the batch (`batch.chunk(2)`), these are the samples of the rows.
        """
        self.is_used = True
        if self.ids is None:
            return None
        rows = self._rows(blocks, len(self.ids))
        fresh = [row for row in rows if row not in self._rows_used]
        self._rows_used.update(fresh)
        rest, self.rest = self.rest, ()
        return (*(self.ids[row] for row in fresh), *rest)

    def _rows(self, blocks: list[Block], num_ids: int) -> range:
        whole = range(num_ids)
        for block in blocks:
            for own in self._blocks:
                if own.storage != block.storage or own.num_rows != num_ids or not own.stride:
                    continue
                first, rest = divmod(block.offset - own.offset, own.stride)
                if rest or block.stride != own.stride or first + block.num_rows > num_ids:
                    return whole
                return range(first, first + block.num_rows)
        return whole


def blocks_of(data: Any) -> list[Block]:
    """Return the memory of the tensors in nested containers and attributes of objects.

    No code of these objects is called. Of more than _TENSORS_MAX tensors the first ones count.
    Tensors without memory of their own (sparse ones) don't: where a batch has no others, it is
    known by its order, as one that is copied.
    """
    blocks = (_block_of(tensor) for tensor in islice(_walk(data, _DEPTH_MAX), _TENSORS_MAX))
    return [block for block in blocks if block is not None]


def _block_of(tensor: Tensor) -> Block | None:
    with suppress(NotImplementedError, RuntimeError):
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        rows = (tensor.stride(0), tensor.shape[0]) if tensor.dim() else (0, 1)
        return Block(storage, int(tensor.storage_offset()), *rows)
    return None


def _walk(data: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
        return
    if depth == 0:
        return
    inside: Iterator[Any] = iter(())
    if isinstance(data, list):
        inside = list.__iter__(data)
    elif isinstance(data, tuple):
        inside = tuple.__iter__(data)
    elif isinstance(data, dict):
        inside = iter(dict.values(data))
    elif isinstance(attributes := getattr(data, "__dict__", None), dict):
        inside = iter(attributes.values())
    for item in inside:
        yield from _walk(item, depth - 1)
