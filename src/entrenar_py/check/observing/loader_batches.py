"""The batches that DataLoaders yield, with the indices that were drawn for them."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from entrenar_py.check.observing import row_digests
from entrenar_py.check.observing.batches import Ids
from entrenar_py.check.observing.row_digests import Row
from entrenar_py.check.observing.sources import Source, positions_of

# The method by which accelerate fetches a batch, and then hands out the one before it.
_ONE_AHEAD = ("accelerate.data_loader", "DataLoaderShard.__iter__")
_FRAMES_MAX = 20  # between that and torch's iteration
PENDING_MAX = 8  # batches that were yielded and not used; the oldest of more is skipped


@dataclass(eq=False)
class Iteration:
    """One pass over a `loader`; `ahead` are the indices that it drew and did not yield yet.

    `epoch` counts the passes, of any loader, from which a batch was trained on. `largest` is the
    size of its largest batch. `is_one_ahead` tells whether the batch before the newest is used.
    `rest` has the indices that a shortened pass has drawn with its last one, until that is used.
    """

    loader: Any
    ahead: deque[Ids | None] = field(default_factory=deque)
    epoch: int | None = None
    largest: int = 0
    is_over: bool = False
    is_one_ahead: bool = False
    rest: Ids = ()


@dataclass(eq=False)
class Batch:
    """A batch that was yielded: `ids` of its samples, None if these have none.

    `left` are the positions of the samples that no training pass was given yet. `trains` tells
    whether the batch may be meant for training: gradients are enabled, and no other pass used it.
    `is_last` tells that of a shortened pass.
    """

    iteration: Iteration
    ids: Ids | None
    content: Any
    size: int
    left: list[int]
    trains: bool
    thread: int
    is_last: bool = False
    _columns: list[list[Row]] | None = None

    def has_all(self, rows: list[Row]) -> bool:
        """Return whether all `rows` are among those of the tensor with the most different ones."""
        return any({*column}.issuperset(rows) for column in self._rows()[:1])

    def find(self, rows: list[Row]) -> list[int] | None:
        """Return the unused positions whose content is `rows`, in their order; None if not all are.

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

    def _rows(self) -> list[list[Row]]:
        """Return the digests of the rows of each tensor that has one row per sample."""
        if self._columns is None:
            found = map(row_digests.rows_of, row_digests.tensors_in(self.content))
            fitting = [rows for rows in found if rows and len(rows) == self.size]
            self._columns = sorted(fitting, key=lambda column: -len(set(column)))
        return self._columns


class Batches:
    """The batches that the process's DataLoaders have yielded and training has not used yet."""

    def __init__(self) -> None:
        self._iterations: weakref.WeakKeyDictionary[Any, Iteration] = weakref.WeakKeyDictionary()
        self._num_passes = 0
        self._first: tuple[Any, ...] | None = None  # what the first loader draws from
        self.varies = False  # whether another was trained from that draws other samples
        self.drops_last = False  # whether the script has skipped a short batch at a pass's end
        self.pending: deque[Batch] = deque(maxlen=PENDING_MAX)
        self.loader: Any = None  # the one that was trained from last
        self._source: Source | None = None
        self._is_ahead = False
        self._num_events = 0  # batches that were yielded, and passes that ended
        self._used_last: tuple[Batch, int] | None = None  # with the number of events by then
        self._newest: Batch | None = None

    # --- called by the patches --------------------------------------------------------------------

    def iterated(self, loader: Any, iterator: Any) -> None:
        """Note that a pass over `loader` begins, before any index is drawn for it."""
        self._iterations[iterator] = Iteration(loader, is_one_ahead=_is_one_ahead())

    def drew(self, iterator: Any, index: Any) -> None:
        """Note the next index, or list of them, that a loader's sampler has drawn."""
        iteration = self._iteration(iterator)
        iteration.ahead.append(positions_of(index))
        iteration.rest = tuple(getattr(index, "rest", ()))

    def yielded(self, iterator: Any, content: Any) -> None:
        """Note the next batch; batches come in the order in which their indices were drawn."""
        self._num_events += 1
        iteration = self._iteration(iterator)
        loader = iteration.loader
        ids = iteration.ahead.popleft() if iteration.ahead else None
        if not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 1:
            ids = None
        size = (row_digests.num_rows(content) or 0) if ids is None else len(ids)
        grown = torch.is_grad_enabled()
        left, thread = [*range(size)], threading.get_ident()
        iteration.largest = max(iteration.largest, size)
        is_last = bool(iteration.rest) and not iteration.ahead
        self._newest = Batch(iteration, ids, content, size, left, grown, thread, is_last)
        self.pending.append(self._newest)

    def failed(self, iterator: Any) -> None:
        """Note that an error is raised in place of the next batch."""
        if ahead := self._iteration(iterator).ahead:
            ahead.popleft()

    def exhausted(self, iterator: Any) -> None:
        """Note that a pass has no more batches."""
        self._num_events += 1
        self._iteration(iterator).is_over = True

    def _iteration(self, iterator: Any) -> Iteration:
        return self._iterations.setdefault(iterator, Iteration(None))

    # --- called by what looks for samples ---------------------------------------------------------

    def use(self, batch: Batch, places: Iterable[int]) -> tuple[int, list[int]]:
        """Take the samples at `places` for training; return their epoch and ids.

        When none is left the batch isn't pending any more, nor are older ones of its loader: these
        were skipped.
        """
        assert batch.ids is not None, "only a batch with ids is used"
        self._used_last = batch, self._num_events
        used, epoch = list(places), self._epoch_of(batch.iteration)
        batch.left = [place for place in batch.left if place not in set(used)]
        if not batch.left:
            at = self.pending.index(batch)
            later = [*self.pending][at + 1 :]
            others = [b for b in [*self.pending][:at] if b.iteration.loader is not self.loader]
            self.pending = deque([*others, *later], maxlen=PENDING_MAX)
        source = self.source()
        ids = [batch.ids[place] for place in used]
        if batch.is_last and batch.iteration.rest:
            ids += batch.iteration.rest
            batch.iteration.rest = ()
        return epoch, ids if source is None else [*map(source.numbering.of, ids)]

    def newest(self, batch: Batch) -> Batch:
        """Return the batch with the samples of `batch` that is newest, and forget those before it.

        A script may look at a batch, for its size, and then begin another pass with it.
        """
        loader = batch.iteration.loader
        same = [b for b in self.pending if b.ids == batch.ids and b.iteration.loader is loader]
        older = [b for b in same if b.iteration is not same[-1].iteration]
        self.pending = deque((b for b in self.pending if b not in older), maxlen=PENDING_MAX)
        return same[len(older)] if older else batch

    def _epoch_of(self, iteration: Iteration) -> int:
        if iteration.epoch is None:
            self.drops_last |= self._left_short_batch()
            iteration.epoch = self._num_passes
            self._num_passes += 1
        if self.loader is not iteration.loader:
            self.loader = iteration.loader
            source = self.source()
            drawn = None if source is None else source.drawn_from
            self._first = self._first or drawn
            self.varies |= drawn != self._first
        return iteration.epoch

    def _left_short_batch(self) -> bool:
        """Return whether the last pass for training left only its last, short batch unused."""
        left = [
            batch
            for batch in self.pending
            if batch.iteration.loader is self.loader
            and batch.iteration.epoch == self._num_passes - 1
        ]
        return (
            len(left) == 1
            and left[0].iteration.is_over
            and len(left[0].left) == left[0].size < left[0].iteration.largest
        )

    def set_aside(self, num_rows: int | None, *, trains: bool = False) -> None:
        """Note that the batch that was yielded last went to a pass that doesn't train.

        With `trains`, take that back.
        """
        if self.pending and self.pending[-1].size == num_rows:
            self.pending[-1].trains = trains

    def source(self) -> Source | None:
        """Return the facts of the loader that is trained from; None if there is none."""
        loader = self.loader
        if loader is None and (batch := self.meant()) is not None:
            loader = batch.iteration.loader
        if loader is None:
            return None
        if self._source is None or self._source.given is not loader:
            self._source = Source(loader)
        return self._source

    def meant(self) -> Batch | None:
        """Return the one batch that a training pass of this thread can use; None without one.

        If there are several the script skips batches, or fetches them ahead, maybe in a thread.
        From then on only content tells batches apart.
        """
        fit = [batch for batch in self.pending if batch.trains and batch.ids is not None]
        if self.loader is not None:
            same = [batch for batch in fit if batch.iteration.loader is self.loader]
            fit = same or [batch for batch in fit if self._goes_on(batch.iteration.loader)]
        if fit and (newest := fit[-1].iteration).is_one_ahead:
            read = [batch for batch in self.pending if batch.iteration is newest]
            given = read[-1:] if newest.is_over else read[-2:-1]
            return next((batch for batch in given if batch in fit), None)
        here = threading.get_ident()
        self._is_ahead |= len(fit) > 1 or any(batch.thread != here for batch in fit)
        return None if self._is_ahead or not fit else fit[0]

    def newest_yielded(self) -> Batch | None:
        """Return the batch that the script has got last."""
        return self._newest

    def in_use(self) -> Batch | None:
        """Return the batch that was used up last, if the script has got no other one since."""
        if self._used_last is None:
            return None
        batch, num_events = self._used_last
        return batch if num_events == self._num_events and not batch.left else None

    def are_again(self, num_rows: int | None) -> bool:
        """Return whether so many rows are a further view of the batch that was used last.

        They are if that was used up and the script has got no other batch since.
        """
        batch = self.in_use()
        return batch is not None and batch.size == num_rows

    def _goes_on(self, loader: Any) -> bool:
        """Return whether `loader` draws from the same data as the one that was trained from.

        Some scripts make a loader for every epoch.
        """
        source = self.source()
        return source is not None and Source(loader).drawn_from == source.drawn_from


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


class Pass:
    """One pass over a DataLoader, whose draws and batches are told to `batches`."""

    def __init__(self, batches: Batches, loader: Any) -> None:
        self._batches = batches
        batches.iterated(loader, self)

    def drawn(self, index: Any) -> None:
        """Note the next index, or list of them, that the loader's sampler has drawn."""
        self._batches.drew(self, index)

    def item(self, content: Any) -> None:
        """Note the next batch."""
        self._batches.yielded(self, content)

    def over(self) -> None:
        """Note that the pass has no more batches."""
        self._batches.exhausted(self)

    def failed(self) -> None:
        """Note an error in place of the next batch."""
        self._batches.failed(self)
