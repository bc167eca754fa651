"""The batches that loaders and samplers hand out, each run through one, and its epoch.

A forward pass is given a batch as it was handed out, a part of it, a copy, or something that was
made of it. `Batch` tells whether inputs are its own in two ways, which two readers need:

- By memory, for a loader that `observe` is given (`samples.Draws`). Equal rows stay apart, a batch
  may wait for as long as the script likes, and none is held: its memory is the script's to free.
  Whatever else the process iterates is not looked at.
- By content, for whatever loader there is (`seen_samples.Batches`). On another device, or behind a
  collating thread, memory tells nothing. That needs the tensors, so a few batches are held.

One reader with both ways was considered. It would hold batches of a declared loader, so it could
not tell any more which ones the script has dropped without use, and that decides whether a copy
is the newest batch. So the readers share what is known of a batch, and each has its own rule.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from entrenar_py.check.observing import contents
from entrenar_py.check.observing.contents import Row
from entrenar_py.check.observing.sources import Ids, positions_of

KEYS = "the sampler draws something other than numbers of samples"
DISORDER = "the loader hands out batches in another order than it draws them (in_order=False)"
FAILED = "the loader had raised an error"

_DEPTH_MAX = 4  # of containers in a batch that are looked into
_TENSORS_MAX = 64
# The method by which accelerate fetches a batch, and then hands out the one before it.
_ONE_AHEAD = ("accelerate.data_loader", "DataLoaderShard.__iter__")
_FRAMES_MAX = 20  # between that and torch's iteration


class Block(NamedTuple):
    """The memory of a tensor: its storage, where it begins there, its rows and their distance."""

    storage: StorageWeakRef
    offset: int
    stride: int
    num_rows: int


class Batch:
    """A batch that was handed out by `iteration`.

    - `ids`: the positions of its samples in order; None, and `why`, if they are unknown.
    - `left`: the places in it that no training pass was given yet.
    - `rest`: positions that a shortened run has drawn with its last batch. They come with the first
      places of it that are used.
    - `trains`: it may be meant for training: gradients are enabled, and no other pass used it.
    - `is_gathered`: its samples were drawn one by one.
    - `blocks` and `content`: its memory and its tensors, where the reader wants them.
    """

    def __init__(self, iteration: Iteration, ids: Ids | None, rest: Ids = ()) -> None:
        self.iteration, self.ids, self.rest = iteration, ids, rest
        self.why = iteration.why or KEYS
        self.size = len(ids or ())
        self.left = [*range(self.size)]
        self.trains = torch.is_grad_enabled()
        self.thread = threading.get_ident()
        self.is_gathered = False
        self.blocks: list[Block] = []
        self.content: Any = None
        self._columns: list[list[Row]] | None = None

    def extend(self, ids: Ids | None) -> None:
        """Add samples."""
        if self.ids is None or ids is None:
            self.ids = None
            self.resize(0)
        else:
            self.left += range(self.size, self.size + len(ids))
            self.ids, self.size = self.ids + ids, self.size + len(ids)

    def resize(self, size: int) -> None:
        """Note that the batch has `size` samples, and that all are left."""
        self.size, self.left = size, [*range(size)]

    def take(self, places: list[int]) -> Ids:
        """Return the samples at `places` for training, and with the first ones the `rest`."""
        assert self.ids is not None, "only a batch with ids is used"
        taken = {*places}
        self.left = [place for place in self.left if place not in taken]
        rest, self.rest = self.rest, ()
        return (*(self.ids[place] for place in places), *rest)

    # --- by memory --------------------------------------------------------------------------------

    def fits(self, blocks: list[Block]) -> bool:
        """Return whether a pass in this thread may have been given a copy of this batch."""
        if threading.get_ident() != self.thread:
            return False  # it was put into a queue
        several = self.is_gathered and len(self.ids or ()) > 1 and bool(blocks)
        return not several or len(self.ids or ()) in [block.num_rows for block in blocks]

    def shares(self, blocks: list[Block], *, exactly: bool = False) -> bool:
        """Return whether any of `blocks` lies in this batch's memory, or begins where it does."""
        return any(
            own.storage == block.storage and (not exactly or own.offset == block.offset)
            for own in self.blocks
            for block in blocks
        )

    def is_gone(self) -> bool:
        """Return whether the script has dropped all tensors of the batch."""
        return all(block.storage.expired() for block in self.blocks)  # type: ignore[no-untyped-call]

    def within(self, blocks: list[Block]) -> list[int]:
        """Return the unused places that a model is given with `blocks`.

        If the blocks are rows of the batch (`batch.chunk(2)`), these are the rows' places.
        """
        rows = self._rows_within(blocks)
        return [place for place in self.left if place in rows]

    def _rows_within(self, blocks: list[Block]) -> range:
        whole = range(self.size)
        for block in blocks:
            for own in self.blocks:
                if own.storage != block.storage or own.num_rows != self.size or not own.stride:
                    continue
                first, rest = divmod(block.offset - own.offset, own.stride)
                if rest or block.stride != own.stride or first + block.num_rows > self.size:
                    return whole
                return range(first, first + block.num_rows)
        return whole

    # --- by content -------------------------------------------------------------------------------

    def has_all(self, rows: list[Row]) -> bool:
        """Return whether all `rows` are among those of the tensor with the most different ones."""
        return any({*column}.issuperset(rows) for column in self._rows()[:1])

    def find(self, rows: list[Row]) -> list[int] | None:
        """Return the unused positions with the content `rows`, in their order; None if not all are.

        The batch's tensor with the most different rows counts, since labels have duplicates. None,
        too, if duplicates leave open which positions these are.
        """
        for column in self._rows():
            places: dict[Row, deque[int]] = defaultdict(deque)
            for place in self.left:
                places[column[place]].append(place)
            wanted = Counter(rows)
            if any(len(places.get(row, ())) < count for row, count in wanted.items()):
                continue
            certain = all(len(places[row]) == count for row, count in wanted.items())
            return [places[row].popleft() for row in rows] if certain else None
        return None

    def is_within(self, rows: list[Row]) -> bool:
        """Return whether all unused positions have different contents, which are among `rows`."""
        for column in self._rows()[:1]:
            unused = {column[place] for place in self.left}
            return bool(unused) and len(unused) == len(self.left) and unused.issubset(rows)
        return False

    def _rows(self) -> list[list[Row]]:
        if self._columns is None:
            found = map(contents.rows_of, contents.tensors_in(self.content))
            fitting = [rows for rows in found if rows and len(rows) == self.size]
            self._columns = sorted(fitting, key=lambda column: -len(set(column)))
        return self._columns


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


# --- runs -----------------------------------------------------------------------------------------


class Reader(Protocol):
    """Finds the batches of forward passes among those that it is told of."""

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch that was handed out as `item`."""

    def over(self) -> None:
        """Note that an iteration has ended."""


class Iteration:
    """One run through a `loader`, heard as `LoaderHooks` tell it.

    - `loader` is None unless it is `held`. The workers of a loader end when nothing holds it.
    - `epoch` is None until one of its batches is used.
    - `last` is the batch that was handed out last, and `largest` the size of the largest one.
    - `is_one_ahead` tells whether the batch before the newest is used.
    - `why` says why its samples are unknown. Else batches come in the order of their indices.
    """

    def __init__(
        self, reader: Reader, loader: Any, problem: str = "", *, held: bool = True
    ) -> None:
        self._reader, self.loader = reader, loader if held else None
        num_workers = getattr(loader, "num_workers", 0)
        has_order = getattr(loader, "in_order", True) or num_workers <= 1
        self.why = problem or ("" if has_order else DISORDER)
        self._is_ahead = num_workers > 0  # workers fetch batches ahead
        self._indices: deque[Any] = deque()  # of batches that are not handed out yet
        self.epoch: int | None = None
        self.is_over = False
        self.is_one_ahead = _is_one_ahead()
        self.last: Batch | None = None
        self.largest = 0

    def drawn(self, index: Any) -> None:
        """Note the index, or indices, of a batch that will be handed out."""
        self._indices.append(index)

    def item(self, item: Any) -> None:
        """Note that the loader hands out a batch."""
        index = self._indices.popleft() if self._indices else None
        ids = None if self.why or index is None else positions_of(index)
        self.add(Batch(self, ids, positions_of(getattr(index, "rest", ())) or ()), item)

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch to those that may be used."""
        self._reader.add(batch, item)
        self.last, self.largest = batch, max(self.largest, batch.size)

    def failed(self) -> None:
        """Note an error of the loader. Which batches of its workers are lost is not known."""
        self._indices.clear()
        if self._is_ahead:
            self.why = FAILED

    def over(self) -> None:
        """Note that there are no more batches."""
        self.is_over = True
        self._reader.over()

    @property
    def dropped_last(self) -> bool:
        """True if the last batch was short, and not used."""
        last = self.last
        if not self.is_over or last is None or last.ids is None:
            return False
        return len(last.left) == last.size < self.largest


class Epochs:
    """Numbers the iterations that lent a batch to training, in the order of their first use.

    `drops_last` tells whether the script has skipped a last, short batch.
    """

    def __init__(self) -> None:
        self.count = 0
        self.latest: Iteration | None = None  # the one of the batch that was used last
        self.drops_last = False

    def of(self, iteration: Iteration) -> int:
        """Return the epoch of an iteration, a new one if no batch of it was used before."""
        if iteration.epoch is None:
            self.drops_last |= self.latest is not None and self.latest.dropped_last
            iteration.epoch = self.count
            self.count += 1
        self.latest = iteration
        return iteration.epoch


def _is_one_ahead() -> bool:
    """Return whether accelerate begins the pass of a loader, in which it is one batch ahead."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) == _ONE_AHEAD:
            return True
        frame = frame.f_back
    return False
