"""The samples of a micro-batch, as the script reports them or as its loader draws them.

A batch of a loader is recognised by its memory when it is an input of a model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, Sampler

from entrenar_py.check.observing import call_sites
from entrenar_py.check.observing.batches import Batch, Block, Epochs, Iteration, blocks_of
from entrenar_py.check.observing.iterations import IterationHooks, LoaderHooks
from entrenar_py.check.observing.sources import (
    Ids,
    InOrder,
    Source,
    declared_numbering,
    positions_of,
)

_PENDING_MAX = 4096  # batches that are remembered until they are used

STREAM = "the data set is a stream: its samples have no numbers"
AHEAD = "the loader had fetched several batches, and nothing shows which of them the model got"
AGAIN = "the model was given a batch that was already used in an earlier step"
NONE = "the loader handed out no batch for this forward pass"
OTHERS = "with dispatch_batches=True one rank draws the samples of all ranks"


class Drawn(NamedTuple):
    """The samples of a forward pass; `ids` is None if they are unknown, for the reason `why`."""

    ids: Ids | None
    epoch: int
    why: str = ""


class SamplerIteration(Iteration):
    """One iteration over a sampler; the script itself fetches the samples."""

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws, None)
        self._draws = draws

    def item(self, item: Any) -> None:
        """Record a drawn sample, or all samples of a drawn batch."""
        if self._draws.is_loaded:
            return
        # The source may be a loader of the script's own class: the numbers in its batches need not
        # be sample ids.
        is_trusted = self._draws.is_sampler or type(item) in (list, tuple, int)
        batch = Batch(self, positions_of(item) if is_trusted else None)
        batch.is_gathered = isinstance(item, Integral)
        self.add(batch, None)


class Draws:
    """The samples that a `source` draws: a DataLoader, or a sampler for one.

    The batch of a forward pass is the one that shares memory with the pass's inputs. If the inputs
    are copies, it is the batch that the loader has yielded since the last pass, provided that
    batches are used one by one in their order. If that isn't clear, the samples are unknown.
    Nothing is recorded before `listen`.

    `resumed` says that the script continues an earlier run, and may skip batches at its beginning.
    """

    def __init__(self, source: Any, *, resumed: bool = False) -> None:
        loader = source.source if isinstance(source, InOrder) else source
        self.source = Source(loader)
        # accelerate's loaders fetch one batch ahead, and don't skip a batch that they have fetched.
        self._in_order = isinstance(source, InOrder) or self.source.is_accelerate_s
        self.is_sampler = isinstance(loader, Sampler)
        self.is_loaded = False  # whether a DataLoader fetches the samples that the sampler draws
        self._lock = threading.Lock()
        self._pending: deque[Batch] = deque(maxlen=_PENDING_MAX)
        self._of_step: list[Batch] = []  # batches used in the current step
        # For each completed micro-batch of the step, the number of batches used until its end.
        self._ends: list[int] = []
        self._used: deque[Batch] = deque(maxlen=_PENDING_MAX)  # batches used in earlier steps
        self.epochs = Epochs()
        self._was_unsure = False  # whether the current step has a pass with unknown samples
        self._is_resumed = resumed
        # Whether batches are used one by one as they are yielded; None before the first use.
        self._is_orderly: bool | None = None
        self._hooks: list[LoaderHooks | IterationHooks] = []

    def listen(self) -> None:
        """Record from here on which batches the loader yields."""
        self._hooks.append(LoaderHooks(self._begin_loader))
        if not self.source.has_loader:
            self._hooks.append(IterationHooks(self.source.given, lambda: SamplerIteration(self)))

    def remove(self) -> None:
        """Restore the methods of the source's class."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()

    # --- batches that the loader yields -----------------------------------------------------------

    def _begin_loader(self, loader: Any) -> Iteration | None:
        if not self.source.concerns(loader):
            return None
        self.is_loaded = True
        problem = ""
        if self.source.is_dispatched:
            problem = OTHERS
        elif isinstance(getattr(loader, "dataset", None), IterableDataset):
            problem = STREAM
        return Iteration(self, loader, problem, held=False)

    def over(self) -> None:
        """Do nothing at the end of an iteration."""

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch that was yielded.

        A sample that the sampler drew alone extends the last batch.
        """
        batch.blocks = blocks_of(item)
        with self._lock:
            if batch.is_gathered and self._pending:
                last = self._pending[-1]
                if last.iteration is batch.iteration:
                    last.extend(batch.ids)
                    return
                self._pending.clear()  # the unused rest of an earlier epoch
            self._pending.append(batch)

    # --- batches that passes use ------------------------------------------------------------------

    def use(self, blocks: list[Block]) -> Drawn | None:
        """Return the samples of a forward pass with inputs in `blocks`; None if it has no new ones.

        If `blocks` is empty, the inputs are unknown.
        """
        with self._lock:
            used = self._by_memory(blocks) or self._again(blocks) or self._by_order(blocks)
            if isinstance(used, str):
                self._was_unsure = True
                return Drawn(None, max(self.epochs.count - 1, 0), used)
            if not used:
                return None
            epoch = self.epochs.of(used[-1].iteration)
            unknown = next((batch.why for batch in used if batch.ids is None), "")
            ids = [batch.take(batch.within(blocks)) for batch in used if batch.ids is not None]
            numbers = tuple(map(self.source.numbering.of, chain.from_iterable(ids)))
            return Drawn(None if unknown else numbers, epoch, unknown)

    def skip(self, blocks: list[Block]) -> None:
        """Drop the batches of a forward pass that doesn't train."""
        with self._lock:
            self._keep(lambda batch: not batch.shares(blocks))

    def end_micro_batch(self) -> None:
        """Called when a backward pass is over."""
        with self._lock:
            self._ends.append(len(self._of_step))

    def end_step(self, num_ahead: int = 0) -> None:
        """Called when an optimizer step is over.

        The last `num_ahead` micro-batches belong to the next step, as does a forward pass without
        its backward pass. A pass with the step's batches in a later step is a repetition.
        """
        with self._lock:
            ends = [0, *self._ends]
            begin, *self._ends = ends[max(0, len(ends) - 1 - num_ahead) :]
            self._ends = [end - begin for end in self._ends]
            self._used.extend(self._of_step[:begin])
            self._of_step, self._was_unsure = self._of_step[begin:], False
            while self._used and self._used[0].is_gone():
                self._used.popleft()

    def _keep(self, wanted: Callable[[Batch], bool]) -> None:
        self._pending = deque(filter(wanted, self._pending), _PENDING_MAX)

    def _take(self, batches: list[Batch]) -> list[Batch]:
        self._of_step += batches
        self._keep(lambda batch: batch not in batches)
        return batches

    def _by_memory(self, blocks: list[Block]) -> list[Batch]:
        """Mark the batches that share memory with `blocks` as used, and return them."""
        sharing = [batch for batch in self._pending if batch.shares(blocks)]
        if len(sharing) > 1:  # either all are parts of one tensor, or the pass uses several batches
            sharing = [batch for batch in sharing if batch.shares(blocks, exactly=True)]
        if sharing:
            before = [*self._pending][: self._pending.index(sharing[0])]
            self._take(sharing)
            # Earlier batches were skipped, unless the script still refers to them. Later ones were
            # fetched ahead.
            self._keep(lambda batch: not (batch in before and (self._in_order or batch.is_gone())))
            self._is_orderly = all(batch in before for batch in self._pending)
        return sharing

    def _again(self, blocks: list[Block]) -> list[Batch] | str:
        again = [batch for batch in self._of_step if batch.shares(blocks)]
        if again or not any(batch.shares(blocks) for batch in self._used):
            return again
        return AGAIN

    def _by_order(self, blocks: list[Block]) -> list[Batch] | str:
        """Use the next batch of the loader and return it, or say why it is unknown which one."""
        if not self._pending:
            return [] if self._of_step or self._was_unsure else NONE
        if self._in_order:
            # Unused batches of earlier iterations were dropped.
            latest = self._pending[-1].iteration
            self._keep(lambda batch: batch.iteration is latest)
            return self._take([self._pending[0]])
        newest, skipped = self._pending[-1], [*self._pending][:-1]
        # These batches may come from an evaluation with the same loader.
        if self._is_orderly is None:
            evaluated = all(batch.iteration.is_over for batch in skipped)
            self._is_orderly = evaluated or self._is_resumed
        if self._is_orderly and self._may_skip(skipped, newest) and newest.fits(blocks):
            self._pending.clear()
            return self._take([newest])
        self.epochs.of(newest.iteration)
        self._is_orderly = False
        self._pending.clear()
        return AHEAD

    def _may_skip(self, skipped: list[Batch], newest: Batch) -> bool:
        # The script may skip the rest of an epoch, or, if it resumes within an epoch, the
        # beginning.
        resumes = self._is_resumed and self.epochs.latest is None
        return resumes or all(batch.iteration is not newest.iteration for batch in skipped)


# --- samples of micro-batches ---------------------------------------------------------------------


class Told(NamedTuple):
    """The samples of a micro-batch, in order.

    `unknown` is the reason if they are unknown, otherwise "". A micro-batch may have no samples of
    its own, but inputs made from earlier samples; then `num_made` is the number of these, otherwise
    0.
    """

    ids: Ids
    epoch: int
    unknown: str = ""
    num_made: int = 0


class Samples:
    """The samples of the forward passes since the last backward pass.

    Once the script reports samples, what its loader draws no longer counts. Samples that are
    reported between the last forward pass and its backward pass may belong to the next micro-batch.
    They do if the script also reported samples before the forward pass: then it has already fetched
    the next batch.
    """

    def __init__(self, source: Any, dataset: Any = None, *, resumed: bool = False) -> None:
        self.draws = None if source is None else Draws(source, resumed=resumed)
        drawn = None if self.draws is None else self.draws.source.numbering
        self._whole = None if dataset is None else declared_numbering(dataset, drawn)
        if self.draws is not None:
            self.draws.listen()  # only after all arguments were accepted
        self._epoch = 0
        self._tells = self._tells_epochs = False  # whether the script reports samples, and epochs
        self._replaces = False
        # The samples reported since the last forward pass, and their epoch.
        self._ahead: list[int] | None = None
        self._epoch_ahead: int | None = None
        self._reported: list[int] | None = None
        self._drawn: list[Drawn] = []
        self._repeated: Ids = ()
        self._num_passes = 0
        # The memory of the inputs of the last pass that may not train.
        self._blocks: list[Block] = []
        self._written: dict[str, bool] = {}
        self._num_cut = 0  # epochs cut by the script that were written

    def tell(self, ids: Iterable[int], epoch: int | None, *, replacement: bool = False) -> None:
        """Record `ids` as the next samples; without `epoch`, in the epoch of the previous ones."""
        self._tells, self._replaces = True, self._replaces or replacement
        call_sites.Samples.reported()
        self._ahead = [*(self._ahead or []), *map(int, ids)]
        if epoch is not None:
            self._epoch_ahead, self._tells_epochs = epoch, True

    def forward(self, blocks: list[Block]) -> None:
        """Record a training forward pass with inputs in the memory `blocks`."""
        self._num_passes += 1
        self._draw(blocks)
        self._report()

    def aside(self, blocks: list[Block], *, trains: bool) -> None:
        """Record a pass in evaluation mode.

        It `trains` if it has gradients, so that a backward pass may follow.
        """
        self._blocks = blocks
        if not trains and self.draws is not None:
            self.draws.skip(blocks)

    def given(self, inputs: Any, *, trains: bool, may_train: bool = False) -> bool:
        """Get the inputs of a forward pass; ignored here, since the source identifies samples.

        Return False: earlier passes count.
        """
        return False

    def drew(self) -> None:
        """Called when random numbers were drawn between two passes; ignored here."""

    def settle(self) -> None:
        """Called when a backward pass begins or is over, even of only some parts of the model."""
        if not self._num_passes:
            self._draw(self._blocks)
        if self._reported is None:
            self._report()

    def repeat(self, ids: Ids) -> None:
        """Record that the next backward pass repeats the samples of the last one, `ids`."""
        self._repeated = ids

    @property
    def are_new(self) -> bool:
        """Whether there are samples since the last backward pass."""
        return bool(self._now().ids)

    def forget_evaluations(self) -> bool:
        """Forget that passes which trained nothing had samples; return False if it can't."""
        return False

    def take(self) -> Told:
        """Return the samples of the micro-batch, and forget them."""
        now = self._now()
        if self.draws is not None:
            self.draws.end_micro_batch()
        self._epoch = now.epoch
        self._reported, self._drawn, self._repeated = None, [], ()
        self._num_passes, self._blocks = 0, []
        return now

    def end_step(self, num_ahead: int = 0) -> None:
        """Called when a step is over; its last `num_ahead` micro-batches belong to the next one."""
        if self.draws is not None:
            self.draws.end_step(num_ahead)

    def remove(self) -> None:
        """Stop observing the loader."""
        if self.draws is not None:
            self.draws.remove()

    def _report(self) -> None:
        if self._ahead is not None:
            self._reported = [*(self._reported or []), *self._ahead]
            self._epoch = self._epoch if self._epoch_ahead is None else self._epoch_ahead
            self._ahead = self._epoch_ahead = None

    def _draw(self, blocks: list[Block]) -> None:
        if self.draws is not None and (drawn := self.draws.use(blocks)) is not None:
            self._drawn.append(drawn)

    def _now(self) -> Told:
        drawn_epoch = self._drawn[-1].epoch if self._drawn else self._epoch
        epoch = self._epoch if self._tells_epochs else drawn_epoch
        if self._reported is not None:
            return Told(tuple(self._reported), epoch)
        if self._tells:
            return Told(self._repeated, epoch)
        unknown = next((drawn.why for drawn in self._drawn if drawn.ids is None), "")
        ids = tuple(id_ for drawn in self._drawn for id_ in drawn.ids or ())
        return Told(() if unknown else ids or self._repeated, epoch, unknown)

    # --- facts for the record -------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return facts about the data that can be read from the source, as values for JSON."""
        facts: dict[str, Any] = {}
        if self.draws is not None:
            source = self.draws.source
            facts = {
                "num_samples": source.numbering.size,
                "drop_last": source.drop_last,
                "replacement": source.replacement,
                "thorough": source.is_thorough,
                "ordered": source.is_ordered,
                "splits": source.splits,
                "drawn": self.draws.is_loaded and not self._tells,
            }
        if self._whole is not None:
            facts |= {"num_samples": self._whole.size, "thorough": True}
        return facts

    def selected(self) -> Ids | None:
        """Return the samples that all ranks together draw in an epoch.

        Return None if that is every sample.
        """
        if self._whole is not None:
            return self._whole.selected()
        return None if self.draws is None else self.draws.source.selected

    def news(self) -> dict[str, Any]:
        """Return what has become known since the last call of this method, as values for JSON."""
        facts = {"drop_last": self.draws is not None and self.draws.epochs.drops_last}
        if self._replaces:
            facts["replacement"] = True
        if self._tells and self.draws is None:
            facts["epochs"] = self._tells_epochs
        fresh = {name: value for name, value in facts.items() if value != self._written.get(name)}
        self._written |= fresh
        fresh = fresh if fresh != {"drop_last": False} else {}
        return fresh | ({} if self.draws is None else self._news_of_cuts(self.draws.epochs))

    def _news_of_cuts(self, epochs: Epochs) -> dict[str, Any]:
        cut = epochs.cut[self._num_cut :]
        self._num_cut += len(cut)
        # In an epoch of declared samples all are due.
        return {"cut": cut} if cut and self._whole is None and not self._tells else {}
