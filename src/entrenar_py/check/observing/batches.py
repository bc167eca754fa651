"""The batches that loaders and samplers hand out, each iteration over a loader, and its epoch.

A forward pass may get a batch as it was handed out, a part of it, a copy, or something made from
it. `Batch` can decide in two ways whether inputs belong to it. There are two readers, and each
needs one of the ways:

- By memory, for a loader that was passed to `observe` (`samples.Draws`). Batches with equal rows
  can be distinguished. A batch may wait for any time before it is used, and no reference to it is
  kept, so that the script can free its memory. No other loader of the process is examined.
- By content, for any loader (`seen_samples.Batches`). After a copy to a device, or by a collating
  thread, memory shows nothing. This way needs the tensors, so references to a few batches are kept.

One reader for both ways was considered. It would keep references to batches of a declared loader,
so it couldn't detect which of them the script dropped without use, and that decides whether a copy
is the newest batch. So the readers share only what is known about a batch.
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
DISORDER = "the loader hands out batches in a different order than it draws them (in_order=False)"
FAILED = "the loader had raised an error"

_DEPTH_MAX = 4  # depth of containers in a batch that are examined
_TENSORS_MAX = 64
# The method with which accelerate fetches a batch before it hands out the previous one.
_ONE_AHEAD = ("accelerate.data_loader", "DataLoaderShard.__iter__")
_FRAMES_MAX = 20  # stack frames between that method and torch's iteration


class Block(NamedTuple):
    """The memory of a tensor: its storage, offset there, number of rows and their distance."""

    storage: StorageWeakRef
    offset: int
    stride: int
    num_rows: int


class Batch:
    """A batch that `iteration` handed out.

    - `ids`: the positions of its samples in order. None if they are unknown, for the reason `why`.
    - `left`: the places in the batch that no training pass has used yet.
    - `rest`: positions that a shortened run has drawn with its last batch. They are returned with
      the first places of the batch that are used.
    - `trains`: whether the batch may be meant for training: gradients were enabled and no other
      pass used it.
    - `is_gathered`: whether the samples were drawn one by one.
    - `is_picked`: whether rows here and there were used, and those between them not at that time.
    - `blocks` and `content`: its memory and its tensors, if the reader needs them.
    - `num_bytes`: the size of these tensors.
    """

    def __init__(self, iteration: Iteration, ids: Ids | None, rest: Ids = ()) -> None:
        self.iteration, self.ids, self.rest = iteration, ids, rest
        self.why = iteration.why or KEYS
        self.size = len(ids or ())
        self.left = [*range(self.size)]
        self.trains = torch.is_grad_enabled()
        self.thread = threading.get_ident()
        self.is_gathered = self.is_picked = False
        self.blocks: list[Block] = []
        self.content: Any = None
        self.num_bytes = 0  # of its tensors
        self._columns: list[list[Row]] | None = None

    def extend(self, ids: Ids | None) -> None:
        """Add samples. If `ids` is None, all samples of the batch become unknown."""
        if self.ids is None or ids is None:
            self.ids = None
            self.resize(0)
        else:
            self.left += range(self.size, self.size + len(ids))
            self.ids, self.size = self.ids + ids, self.size + len(ids)

    def resize(self, size: int) -> None:
        """Record that the batch has `size` samples, and that none of them was used yet."""
        self.size, self.left = size, [*range(size)]

    def take(self, places: list[int]) -> Ids:
        """Return the samples at `places` for training, and in the first call also the `rest`."""
        assert self.ids is not None, "only a batch with ids is used"
        taken = {*places}
        self.is_picked |= len(taken) < max(taken, default=-1) - min(taken, default=0) + 1
        self.left = [place for place in self.left if place not in taken]
        rest, self.rest = self.rest, ()
        return (*(self.ids[place] for place in places), *rest)

    # --- by memory --------------------------------------------------------------------------------

    def fits(self, blocks: list[Block]) -> bool:
        """Return whether the input of a pass in this thread may be a copy of this batch."""
        if threading.get_ident() != self.thread:
            return False  # the batch was put into a queue
        several = self.is_gathered and len(self.ids or ()) > 1 and bool(blocks)
        return not several or len(self.ids or ()) in [block.num_rows for block in blocks]

    def shares(self, blocks: list[Block], *, exactly: bool = False) -> bool:
        """Return whether any of `blocks` lies in the memory of this batch.

        If `exactly`, a block must also begin where a tensor of the batch begins.
        """
        return any(
            own.storage == block.storage and (not exactly or own.offset == block.offset)
            for own in self.blocks
            for block in blocks
        )

    def is_gone(self) -> bool:
        """Return whether the script has dropped all tensors of the batch."""
        return all(block.storage.expired() for block in self.blocks)  # type: ignore[no-untyped-call]

    def within(self, blocks: list[Block]) -> list[int]:
        """Return the unused places that belong to `blocks`, the memory of a model's input.

        If the blocks are rows of the batch (`batch.chunk(2)`), these are the places of the rows.
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
        """Return whether the batch has all `rows`.

        Only the batch's tensor with the largest number of different rows is examined.
        """
        return any({*column}.issuperset(rows) for column in self._rows()[:1])

    def find(self, rows: list[Row]) -> list[int] | None:
        """Return the unused places with the contents `rows`, in order; None if one is missing.

        Tensors with more different rows are tried first, since labels have duplicates. Also None if
        duplicates make the places ambiguous.
        """
        for column in self._rows():
            if rows and rows[0] not in column:
                continue
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
        """Return whether all unused places have different contents, which are among `rows`."""
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

    No code of these objects is called. Only the first _TENSORS_MAX tensors count. Tensors without
    their own storage (sparse ones) don't count: a batch of only such tensors is recognised by its
    order, as a copied batch is.
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
    """Finds the batches that forward passes use, among the batches that were reported to it."""

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch that was handed out as `item`."""

    def over(self) -> None:
        """Record that an iteration has ended."""


class Iteration:
    """One iteration over a `loader`, as `LoaderHooks` report it.

    - `loader`: None unless it is `held`, since a loader's workers end when nothing refers to the
      loader.
    - `epoch`: None until one of its batches is used.
    - `place`: 0, or how many iterations were used in the same epoch, over the same data, before it.
    - `trains`: whether a backward pass has used its batches. `was_probed`: whether a pass that no
      backward pass used had a batch.
    - `has_lost`: whether the reader has forgotten a batch that was not used.
    - `last`: the batch that was handed out last. `largest` is the size of the largest one.
    - `is_one_ahead`: whether the script uses the batch before the newest one.
    - `why`: why its samples are unknown. If it is "", batches are handed out in the order of their
      indices.
    """

    def __init__(
        self, reader: Reader, loader: Any, problem: str = "", *, held: bool = True
    ) -> None:
        self._reader, self.loader = reader, loader if held else None
        num_workers = getattr(loader, "num_workers", 0)
        has_order = getattr(loader, "in_order", True) or num_workers <= 1
        self.why = problem or ("" if has_order else DISORDER)
        self._is_ahead = num_workers > 0  # workers fetch batches ahead
        self._indices: deque[Any] = deque()  # indices of batches that are not handed out yet
        self.epoch: int | None = None
        self.place = 0
        self.trains = self.was_probed = self.has_lost = False
        self.is_over = False
        self.is_one_ahead = _is_one_ahead()
        self.last: Batch | None = None
        self.largest = 0

    def drawn(self, index: Any) -> None:
        """Record the index, or indices, of a batch that will be handed out."""
        self._indices.append(index)

    def item(self, item: Any) -> None:
        """Record that the loader hands out a batch."""
        index = self._indices.popleft() if self._indices else None
        ids = None if self.why or index is None else positions_of(index)
        self.add(Batch(self, ids, positions_of(getattr(index, "rest", ())) or ()), item)

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch to those that may be used."""
        self._reader.add(batch, item)
        self.last, self.largest = batch, max(self.largest, batch.size)

    def failed(self) -> None:
        """Record an error of the loader: it is unknown which batches of its workers are lost."""
        self._indices.clear()
        if self._is_ahead:
            self.why = FAILED

    def over(self) -> None:
        """Record that there are no more batches."""
        self.is_over = True
        self._reader.over()

    @property
    def dropped_last(self) -> bool:
        """True if the last batch was shorter than the largest one and not used."""
        last = self.last
        if not self.is_over or last is None or last.ids is None:
            return False
        return len(last.left) == last.size < self.largest


class Epochs:
    """Numbers the iterations with batches that training uses, in the order of their first use.

    `drops_last` is true if the script has skipped a last, short batch. `cut` has the epochs that
    the script ended before the loader had yielded all batches.
    """

    def __init__(self) -> None:
        self.count = 0
        self.latest: Iteration | None = None  # the iteration of the batch that was used last
        self.drops_last = False
        self.cut: list[int] = []

    def of(self, iteration: Iteration) -> int:
        """Return the epoch of an iteration: a new number if none of its batches was used before."""
        if iteration.epoch is None:
            self.drops_last |= self.latest is not None and self.latest.dropped_last
            if (
                self.latest is not None
                and self.latest.epoch is not None
                and not self.latest.is_over
            ):
                self.cut.append(self.latest.epoch)
            iteration.epoch = self.count
            self.count += 1
        self.latest = iteration
        return iteration.epoch

    def forget(self, iteration: Iteration) -> None:
        """Forget that a batch of an iteration was used, if it was used last."""
        if iteration is self.latest:
            self.latest, iteration.epoch = None, None
            self.count -= 1

    def forget_before_latest(self, iterations: Iterator[Iteration]) -> None:
        """Forget that batches of the newest iterations but the latest were used.

        If the latest began after them, it takes their number.
        """
        for iteration in iterations:
            if self.latest is None or iteration.epoch is None:
                continue
            assert self.latest.epoch is not None
            self.cut = [epoch for epoch in self.cut if epoch != iteration.epoch]
            if self.latest.epoch > iteration.epoch:
                self.latest.epoch -= 1
            elif self.latest.epoch in self.cut:
                self.cut.remove(self.latest.epoch)  # it goes on
            iteration.epoch = None
            self.count -= 1


def _is_one_ahead() -> bool:
    """Return whether accelerate is starting this iteration, so that it fetches one batch ahead."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) == _ONE_AHEAD:
            return True
        frame = frame.f_back
    return False
