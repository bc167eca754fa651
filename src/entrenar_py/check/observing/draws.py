"""Attribute to a forward pass the samples of the batches that a loader or sampler handed out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, Sampler

from entrenar_py.check.observing.batches import Batch, Block, Ids
from entrenar_py.check.observing.iterations import IterationHooks
from entrenar_py.check.observing.loader_iterators import LoaderHooks
from entrenar_py.check.observing.sources import InOrder, Source, positions_of

_PENDING_MAX = 4096  # batches that are remembered until they are used

STREAM = "the data set is a stream, whose samples have no numbers"
KEYS = "the sampler draws something other than numbers of samples"
DISORDER = "the loader hands out batches in another order than it draws them (in_order=False)"
FAILED = "the loader had raised an error"
AHEAD = "the loader had fetched several batches, and nothing shows which of them the model got"
AGAIN = "the model was given a batch that an earlier step had, too"
NONE = "the loader handed out no batch for this forward pass"
OTHERS = "with dispatch_batches=True one rank draws the samples of all"


class Drawn(NamedTuple):
    """The samples that a forward pass was given, None if unknown, and then `why`."""

    ids: Ids | None
    epoch: int
    why: str = ""


class Iteration:
    """One run through a loader. Its `epoch` is None until one of its batches is used.

    `last` is the batch that was handed out last, and `largest` the size of the largest one.
    """

    def __init__(self, draws: Draws, why: str = "", *, is_ahead: bool = False) -> None:
        self._draws, self._why = draws, why
        self._is_ahead = is_ahead  # workers fetch batches ahead
        self._indices: deque[Any] = deque()  # of batches that are not handed out yet
        self.epoch: int | None = None
        self.is_over = False
        self.last: Batch | None = None
        self.largest = 0

    def drawn(self, index: Any) -> None:
        """Note the index, or indices, of a batch that will be handed out."""
        self._indices.append(index)

    def item(self, item: Any) -> None:
        """Note that the loader hands out a batch."""
        index = self._indices.popleft() if self._indices else None
        ids = None if self._why else self._ids(index)
        batch = Batch(self, ids, item, self._why or KEYS)
        batch.rest = self._ids(getattr(index, "rest", ())) or ()
        self._draws.add(batch)

    def failed(self) -> None:
        """Note an error of the loader. Which batches of its workers are lost is not known."""
        self._indices.clear()
        if self._is_ahead:
            self._why = FAILED

    def over(self) -> None:
        """Note that there are no more batches."""
        self.is_over = True

    @property
    def dropped_last(self) -> bool:
        """True if the last batch was short, and not used."""
        last = self.last
        if not self.is_over or last is None or last.ids is None or last.is_used:
            return False
        return len(last.ids) < self.largest

    def _ids(self, index: Any) -> Ids | None:
        positions = positions_of(index)
        if positions is None:
            return None
        return tuple(map(self._draws.source.numbering.of, positions))


class SamplerIteration(Iteration):
    """One run through a sampler whose samples the script fetches itself."""

    def item(self, item: Any) -> None:
        """Note a sample that is drawn, or all samples of a batch."""
        if self._draws.is_loaded:
            return
        # A class of the script's may be a loader, whose batches are numbers that are no samples'.
        is_trusted = self._draws.is_sampler or type(item) in (list, tuple, int)
        batch = Batch(self, self._ids(item) if is_trusted else None, None, KEYS)
        batch.is_gathered = isinstance(item, Integral)
        self._draws.add(batch)


class Draws:
    """The samples of a `source`: a DataLoader, or a sampler that one may have.

    A forward pass is given the batch whose memory its inputs share. If they are copies, it is the
    batch that was handed out since the last pass, provided that batches are used one by one as they
    come. Where that can't be seen, the samples are unknown. An epoch is a run through the source of
    which a batch was used. `drops_last` tells whether the script has skipped a last, short batch.
    Nothing is heard before `listen`.

    `resumed`: the script goes on with an earlier run, and may skip batches at its beginning.
    """

    def __init__(self, source: Any, *, resumed: bool = False) -> None:
        given = source.source if isinstance(source, InOrder) else source
        self.source = Source(given)
        # accelerate's loaders fetch one batch ahead, and skip none that they have fetched.
        self._in_order = isinstance(source, InOrder) or self.source.is_accelerate_s
        self.is_sampler = isinstance(given, Sampler)
        self.is_loaded = False  # whether a DataLoader fetches what the sampler draws
        self.drops_last = False
        self._lock = threading.Lock()
        self._pending: deque[Batch] = deque(maxlen=_PENDING_MAX)
        self._of_step: list[Batch] = []  # that were used in the current step
        self._used: deque[Batch] = deque(maxlen=_PENDING_MAX)  # that were used in earlier ones
        self._num_epochs = 0
        self._latest: Iteration | None = None  # whose batch was used last
        self._was_unsure = False  # whether the current step has a pass with unknown samples
        self._is_resumed = resumed
        # Whether batches are used one by one as they come; None before one is used.
        self._is_orderly: bool | None = None
        self._hooks: list[LoaderHooks | IterationHooks] = []

    def listen(self) -> None:
        """Hear from here on which batches are handed out."""
        self._hooks.append(LoaderHooks(self._begin_loader))
        if not self.source.has_loader:
            self._hooks.append(IterationHooks(self.source.given, lambda: SamplerIteration(self)))

    def remove(self) -> None:
        """Put back the methods of the source's class."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()

    # --- what is handed out -----------------------------------------------------------------------

    def _begin_loader(self, loader: Any) -> Iteration | None:
        if not self.source.concerns(loader):
            return None
        self.is_loaded = True
        why, has_workers = "", getattr(loader, "num_workers", 0) > 0
        if self.source.is_dispatched:
            why = OTHERS
        elif isinstance(getattr(loader, "dataset", None), IterableDataset):
            why = STREAM
        elif has_workers and not getattr(loader, "in_order", True):
            why = DISORDER
        return Iteration(self, why, is_ahead=has_workers)

    def add(self, batch: Batch) -> None:
        """Add a batch that was handed out; a sample that was drawn alone extends the last one."""
        with self._lock:
            if batch.is_gathered and self._pending:
                last = self._pending[-1]
                if last.iteration is batch.iteration:
                    last.extend(batch.ids)
                    return
                self._pending.clear()  # the rest of an epoch before, which was not used
            batch.iteration.last = batch
            batch.iteration.largest = max(batch.iteration.largest, len(batch.ids or ()))
            self._pending.append(batch)

    # --- what is used -----------------------------------------------------------------------------

    def use(self, blocks: list[Block]) -> Drawn | None:
        """Return the samples of a forward pass whose inputs lie in `blocks`; None if none are new.

        Without `blocks` the inputs are not known.
        """
        with self._lock:
            used = self._by_memory(blocks) or self._again(blocks) or self._by_order(blocks)
            if isinstance(used, str):
                self._was_unsure = True
                return Drawn(None, max(self._num_epochs - 1, 0), used)
            if not used:
                return None
            ids: Ids | None = ()
            for batch in used:
                fresh = batch.use(blocks)
                ids = None if fresh is None or ids is None else ids + fresh
            unknown = next((batch.why for batch in used if batch.ids is None), "")
            return Drawn(ids, self._epoch_of(used[-1].iteration), unknown)

    def skip(self, blocks: list[Block]) -> None:
        """Forget the batches of a forward pass that does not train."""
        with self._lock:
            self._keep(lambda batch: not batch.shares(blocks))

    def end_step(self) -> None:
        """Note that an optimizer step is over: from here on its batches would be used again."""
        with self._lock:
            self._used.extend(self._of_step)
            self._of_step, self._was_unsure = [], False
            while self._used and self._used[0].is_gone():
                self._used.popleft()

    def _keep(self, wanted: Callable[[Batch], bool]) -> None:
        self._pending = deque(filter(wanted, self._pending), _PENDING_MAX)

    def _take(self, batches: list[Batch]) -> list[Batch]:
        self._of_step += batches
        self._keep(lambda batch: batch not in batches)
        return batches

    def _by_memory(self, blocks: list[Block]) -> list[Batch]:
        """Return and take the batches that share memory with `blocks`."""
        found = [batch for batch in self._pending if batch.shares(blocks)]
        if len(found) > 1:  # all are parts of one tensor, or the pass is given several
            found = [batch for batch in found if batch.shares(blocks, exactly=True)]
        if found:
            before = [*self._pending][: self._pending.index(found[0])]
            self._take(found)
            # Earlier ones are skipped, unless the script has kept them. Later ones are read ahead.
            self._keep(lambda batch: not (batch in before and (self._in_order or batch.is_gone())))
            self._is_orderly = all(batch in before for batch in self._pending)
        return found

    def _again(self, blocks: list[Block]) -> list[Batch] | str:
        """Return the batches of this step that are used again, or why samples are unknown."""
        again = [batch for batch in self._of_step if batch.shares(blocks)]
        if again or not any(batch.shares(blocks) for batch in self._used):
            return again
        return AGAIN

    def _by_order(self, blocks: list[Block]) -> list[Batch] | str:
        """Return and take the batch that the pass must have been given, or why that is unknown."""
        if not self._pending:
            return [] if self._of_step or self._was_unsure else NONE
        if self._in_order:
            latest = self._pending[-1].iteration  # what is left of those before was dropped
            self._keep(lambda batch: batch.iteration is latest)
            return self._take([self._pending[0]])
        newest, skipped = self._pending[-1], [*self._pending][:-1]
        if self._is_orderly is None:  # maybe after an evaluation on the same loader
            evaluated = all(batch.iteration.is_over for batch in skipped)
            self._is_orderly = evaluated or self._is_resumed
        if self._is_orderly and self._may_skip(skipped, newest) and newest.fits(blocks):
            self._pending.clear()
            return self._take([newest])
        self._epoch_of(newest.iteration)
        self._is_orderly = False
        self._pending.clear()
        return AHEAD

    def _may_skip(self, skipped: list[Batch], newest: Batch) -> bool:
        """Return whether a script that uses batches as they come can have `skipped` these.

        It may leave out the rest of an epoch, and the beginning if it resumes there.
        """
        resumes = self._is_resumed and self._latest is None
        return resumes or all(batch.iteration is not newest.iteration for batch in skipped)

    def _epoch_of(self, iteration: Iteration) -> int:
        """Return the epoch of an iteration, a new one if no batch of it was used before."""
        if iteration.epoch is None:
            if self._latest is not None and self._latest.dropped_last:
                self.drops_last = True
            iteration.epoch = self._num_epochs
            self._num_epochs += 1
        self._latest = iteration
        return iteration.epoch
