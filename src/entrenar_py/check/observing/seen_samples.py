"""The samples of forward passes, identified by the inputs of the passes.

`Batches` has the batches that DataLoaders have yielded, with the indices that were drawn for each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.utils.data import Subset

from entrenar_py.check.observing import contents
from entrenar_py.check.observing.batches import Batch, Epochs, Iteration, blocks_of
from entrenar_py.check.observing.contents import Row
from entrenar_py.check.observing.samples import Samples, Told
from entrenar_py.check.observing.sources import Ids, Source

_SOURCES_MAX = 8  # loaders with facts that are remembered
_UNKNOWN_SIZE = 2**22  # numbers that are reserved for a data set without a length
# Batches that were yielded and not used. If there are more, or more than PENDING_FEW with too many
# bytes, the oldest counts as skipped. A step may fetch all its micro-batches first.
PENDING_MAX, PENDING_FEW, PENDING_BYTES_MAX = 256, 8, 2**28


class Batches:
    """The batches that this process's DataLoaders have yielded, and training has not used yet."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self._first: tuple[Any, ...] | None = None  # the data from which the first loader draws
        # Whether training also used a loader that draws other samples, or picks rows of batches.
        self.varies = False
        # The loaders that were used since the last backward pass, and whether one draws samples
        # that another one draws, too.
        self._new_loaders: list[Any] = []
        self._is_apart = False
        self._arranged: list[Any] = []  # data sets that were drawn from in their order
        self._last_trained: Any = None  # the loader that was used last before that pass
        self.pending: deque[Batch] = deque()
        self.loader: Any = None  # the loader that training used last
        self._sources: deque[Source] = deque(maxlen=_SOURCES_MAX)
        self._numbers = _Numbers()
        self._is_ahead = False
        self.num_events = 0  # number of yielded batches and ended iterations
        self._used_last: tuple[Batch, int] | None = None  # a batch, and num_events when it was used
        self._newest: Batch | None = None

    def over(self) -> None:
        """Called when an iteration has ended."""
        self.num_events += 1

    def add(self, batch: Batch, item: Any) -> None:
        """Add a batch that was yielded."""
        batch.content = item
        if batch.ids is None:
            batch.resize(contents.num_rows(item) or 0)
        self.num_events += 1
        self._newest = batch
        self.pending.append(batch)
        tensors = contents.tensors_in(item)
        # A sparse tensor has no `nbytes`.
        batch.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        while len(self.pending) > PENDING_FEW and (
            len(self.pending) > PENDING_MAX
            or sum(one.num_bytes for one in self.pending) > PENDING_BYTES_MAX
        ):
            self.pending.popleft().iteration.has_lost = True

    def use(self, batch: Batch, places: Iterable[int]) -> tuple[int, list[int]]:
        """Use the samples at `places` of a batch for training; return their epoch and ids.

        When all samples of the batch are used, the batch is no longer pending. Nor are older
        batches of its loader: these were skipped.
        """
        self._used_last = batch, self.num_events
        # The rest of an earlier batch was left out: rows without a label, or with small losses.
        self.varies |= any(
            one.is_picked and bool(one.left)
            for one in takewhile(lambda one: one is not batch, self.pending)
            if one.iteration.loader is batch.iteration.loader
        )
        epoch = self._epoch_of(batch.iteration)
        ids = batch.take([*places])
        if not batch.left:
            at = self.pending.index(batch)
            later = [*self.pending][at + 1 :]
            others = [b for b in [*self.pending][:at] if b.iteration.loader is not self.loader]
            self.pending = deque([*others, *later])
        return epoch, self._numbered(batch.iteration, ids)

    def taken(self) -> None:
        """Called when a backward pass has used the samples: those that follow are new ones."""
        self._numbers.taken()
        self.varies |= self._is_apart
        for loader in self._new_loaders:
            drawn = self._source_of(loader).drawn_from
            self._first = self._first or drawn
            self.varies |= drawn != self._first
            self._note_arrangement(loader)
        self._last_trained = self.loader
        self._new_loaders.clear()

    def forget(self, iterations: Sequence[Iteration]) -> None:
        """Forget that batches of these iterations were used: no backward pass did."""
        for iteration in iterations:
            iteration.was_probed = True
            self.epochs.forget(iteration)
        self._numbers.forget(iterations)
        self._new_loaders.clear()
        self.loader, self._is_apart = self._last_trained, False

    def forget_evaluations(self, iterations: Sequence[Iteration], *, varied: bool) -> int:
        """Forget that passes used these iterations, before the one that training uses now.

        They evaluated the model. `varied` is what `varies` was before. Return the current epoch.
        """
        for iteration in iterations:
            iteration.trains = False
        self.epochs.forget_before_latest(reversed(iterations))
        self.varies = varied
        latest = self.epochs.latest
        return 0 if latest is None or latest.epoch is None else latest.epoch

    def newest(self, batch: Batch) -> Batch:
        """Return the newest pending batch with the samples of `batch`, and forget earlier ones.

        A script may read a batch to get its size, and then begin another iteration with the same
        batch.
        """
        loader = batch.iteration.loader
        same = [b for b in self.pending if b.ids == batch.ids and b.iteration.loader is loader]
        older = [b for b in same if b.iteration is not same[-1].iteration]
        self.pending = deque(b for b in self.pending if b not in older)
        return same[len(older)] if older else batch

    def _epoch_of(self, iteration: Iteration) -> int:
        """Return the epoch in which a batch of an iteration is used.

        If a step uses batches of several loaders, an epoch ends when one of them begins again. So
        no sample may come twice in it.
        """
        if iteration.epoch is None:
            self._numbers.epoch_begins()
        self.epochs.of(iteration)
        if self.loader is not iteration.loader:
            self.loader = iteration.loader
            self._new_loaders.append(iteration.loader)
        return self.epochs.count - 1

    def _numbered(self, iteration: Iteration, ids: Iterable[int]) -> list[int]:
        source = self._source_of(iteration.loader)
        first, is_apart = self._numbers.first(iteration, source)
        self._is_apart |= is_apart
        return [first + source.numbering.of(id_) for id_ in ids]

    def set_aside(self, num_rows: int | None, *, trains: bool = False) -> None:
        """Mark the batch that was yielded last as used in a pass that doesn't train.

        With `trains`, remove the mark, because the pass trained after all. Nothing changes unless
        the batch has `num_rows` rows, the number of rows of the pass.
        """
        if self.pending and self.pending[-1].size == num_rows:
            self.pending[-1].trains = trains

    def source(self) -> Source | None:
        """Return the facts about the loader that training uses; None if there is none."""
        loader = self.loader
        if loader is None and (batch := self.meant()) is not None:
            loader = batch.iteration.loader
        return None if loader is None else self._source_of(loader)

    def _source_of(self, loader: Any) -> Source:
        source = next((one for one in self._sources if one.given is loader), None)
        if source is None:
            self._sources.append(source := Source(loader))
        return source

    def meant(self) -> Batch | None:
        """Return the only batch that a training pass of this thread can use; None if not unique.

        If there are several such batches, the script skips batches or fetches them ahead, perhaps
        in a thread. From then on batches can only be distinguished by their content.
        """
        fit = [batch for batch in self.pending if batch.trains and batch.ids is not None]
        if self.loader is not None:
            same = [batch for batch in fit if batch.iteration.loader is self.loader]
            fit = same or [batch for batch in fit if self._goes_on(batch.iteration.loader)]
        if fit and (newest := fit[-1].iteration).is_one_ahead and not newest.has_lost:
            read = [batch for batch in self.pending if batch.iteration is newest]
            given = read[-1:] if newest.is_over else read[-2:-1]
            return next((batch for batch in given if batch in fit), None)
        here = threading.get_ident()
        self._is_ahead |= len(fit) > 1 or any(batch.thread != here for batch in fit)
        return None if self._is_ahead or not fit else fit[0]

    def newest_yielded(self) -> Batch | None:
        """Return the batch that the script received last."""
        return self._newest

    @property
    def have_lost(self) -> bool:
        """True if a batch of the iteration that training uses was forgotten before its use."""
        latest = self.epochs.latest
        newest = None if self._newest is None else self._newest.iteration
        return any(one is not None and one.has_lost for one in (latest, newest))

    def in_use(self) -> Batch | None:
        """Return the batch that was used up last, with all its samples.

        None if the script has received another batch since, or ended an iteration.
        """
        if self._used_last is None:
            return None
        batch, num_events = self._used_last
        return batch if num_events == self.num_events and not batch.left else None

    def are_again(self, num_rows: int | None) -> bool:
        """Return whether `num_rows` rows may be a second use of the batch that was used last.

        They may if the batch has as many rows, all were used, and the script has received no other
        batch since.
        """
        batch = self.in_use()
        return batch is not None and batch.size == num_rows

    def lends(self, inputs: Any) -> bool:
        """Return whether an input is a view of the batch that was used last: a part of each row."""
        batch = self.in_use()
        lent = [] if batch is None else blocks_of(batch.content)
        return any(own.storage == given.storage for own in lent for given in blocks_of(inputs))

    @property
    def are_ordered(self) -> bool:
        """True if nothing in the script draws an order of samples for an epoch.

        A script may draw an order by a new `Subset` for each epoch.
        """
        source = self.source()
        if source is None or not source.is_ordered:
            return False
        return not source.is_sequential or len(self._arranged) <= 1

    def _note_arrangement(self, loader: Any) -> None:
        data = getattr(loader, "dataset", None)
        is_split = isinstance(data, Subset) and len(self._arranged) <= 1
        if is_split and not any(data is one for one in self._arranged):
            self._arranged.append(data)

    def _goes_on(self, loader: Any) -> bool:
        # Some scripts create a new loader for every epoch.
        source = self.source()
        return source is not None and Source(loader).drawn_from == source.drawn_from


class _Numbers:
    """Numbers the samples of all data sets from which training draws, one data set after the other.

    Two iterations over one data set that are used in the same epoch rightly draw each sample twice,
    so each of them has its own numbers for the data set.
    """

    def __init__(self) -> None:
        # (data sets, number of samples, place of the iteration) -> number of the first sample.
        self._firsts: dict[tuple[Any, ...], int] = {}
        self._size = 0
        self._of_epoch: dict[tuple[Any, ...], Iteration] = {}  # by the same keys
        self._of_pass: set[Iteration] = set()  # used since the last backward pass

    def taken(self) -> None:
        """Called after a backward pass."""
        self._of_pass.clear()

    def forget(self, iterations: Iterable[Iteration]) -> None:
        """Forget iterations since the last backward pass."""
        self._of_pass.difference_update(iterations)

    def epoch_begins(self) -> None:
        """Called when an iteration is used for the first time, which begins an epoch.

        The epoch has all samples of its first backward pass.
        """
        kept = {key: one for key, one in self._of_epoch.items() if one in self._of_pass}
        self._of_epoch = kept

    def first(self, iteration: Iteration, source: Source) -> tuple[int, bool]:
        """Return the number of a data set's first sample.

        Also return whether another iteration of this epoch draws from the data set.
        """
        numbering = source.numbering
        while True:
            key = (numbering.bottoms, numbering.size, iteration.place)
            if self._of_epoch.setdefault(key, iteration) is iteration:
                break
            iteration.place += 1
        self._of_pass.add(iteration)
        if key not in self._firsts:
            self._firsts[key] = self._size
            self._size += _UNKNOWN_SIZE if numbering.size is None else numbering.size
        return self._firsts[key], iteration.place > 0


# --- samples of forward passes --------------------------------------------------------------------


INDEX, CONTENT = "index", "content"
CUT = "the model was given a changed part of a batch, and nothing shows which part"
STRANGE = "the model was given data that no loader has handed out"
MANY = (
    "the script had fetched many batches ahead, and nothing shows which of them the model was given"
)
NO_ROWS = "the model was given no tensor with rows, and no loader has drawn samples for it"


class SeenSamples(Samples):
    """The samples of the forward passes since the last backward pass, without the script's help.

    Ids are the indices that a DataLoader drew, or digests of the rows of the inputs. A row that was
    already an input in this step is the same sample again, and isn't counted twice. Once a script
    reports its samples, only these count.
    """

    def __init__(self, batches: Batches, dataset: Any = None) -> None:
        super().__init__(None, dataset)
        self._batches = batches
        self._kinds: set[str] = set()  # of the samples before the last backward pass
        self._new_kinds: set[str] = set()
        self._ids: list[int] = []
        self._seen_epoch = 0
        self._unknown = ""
        self._again: Ids = ()
        # Rows that were inputs of the model in this step; those since the last backward pass; and
        # for each completed micro-batch, its rows, and whether it has ids.
        self._rows: set[Row] = set()
        self._rows_now: set[Row] = set()
        self._completed: list[tuple[set[Row], bool]] = []
        self._is_given = False  # whether there was a training pass since the last backward pass
        # The iterations with batches that passes have used since then, with the batch that had been
        # yielded last.
        self._fed: dict[Iteration, Batch | None] = {}
        self._given_at: Batch | None = None  # the batch that had been yielded last, in that pass
        # The inputs of the last pass in evaluation mode, if it may train.
        self._evaluated: Any = None
        # The batch that was yielded last when numbers were last drawn.
        self._drawn_for: Batch | None = None
        self._is_made = False  # whether the inputs of a pass were made from a batch in use
        # The iterations that completed micro-batches of this step used, with whether they had
        # trained before; and whether loaders varied before this step.
        self._of_step: dict[Iteration, bool] = {}
        self._varied = False

    # --- the forward passes -----------------------------------------------------------------------

    def drew(self) -> None:
        """Called when numbers were drawn between two passes: the next inputs may be noise."""
        self._drawn_for = self._batches.newest_yielded()

    def given(self, inputs: Any, *, trains: bool, may_train: bool = False) -> bool:
        """Identify the samples of a forward pass of the model by its `inputs`.

        A pass in evaluation mode with gradients `may_train`: it trains if a backward pass follows.
        Return whether the earlier passes since the last backward pass turned out to be probes,
        which no backward pass uses.
        """
        self._evaluated = None
        if not trains:
            self._batches.set_aside(contents.num_rows(inputs))
            self._evaluated = inputs if may_train else None
            return False
        were_probes = self._is_given and self._were_probes()
        if were_probes:
            self._forget_probes()
        self._is_given, self._given_at = True, self._batches.newest_yielded()
        self._identify(inputs)
        return were_probes

    def _were_probes(self) -> bool:
        """Return whether the passes since the last backward pass train nothing.

        A script may try the model on a batch before it begins to train, or evaluate without telling
        torch. Then it begins another iteration over that loader, or has ended the one over another
        loader. An iteration that has trained may have a part in the next loss.
        """
        newest = self._batches.newest_yielded()
        if newest is None or newest is self._given_at or newest.iteration.epoch is not None:
            return False
        return not self._fed or any(
            (one.is_over or one.loader is newest.iteration.loader)
            and not one.trains
            and at is not newest
            for one, at in self._fed.items()
        )

    def _forget_probes(self) -> None:
        self._ids, self._unknown, self._is_made = [], "", False
        self._new_kinds.clear()
        self._rows_now = set()
        self._rows = set().union(*(rows for rows, _ in self._completed))
        self._batches.forget([*self._fed])
        self._fed.clear()

    def _identify(self, inputs: Any) -> None:
        rows = contents.rows_together(inputs)
        is_again = rows is not None and self._rows.issuperset(rows)
        self._rows.update(rows or ())
        self._rows_now.update(rows or ())
        if self._by_content(inputs):
            return
        if self._are_made(inputs):
            self._is_made = True
            return
        if self._batches.are_again(contents.num_rows(inputs)):
            is_part = any(has_ids for _, has_ids in self._completed) and self._batches.lends(inputs)
            if not (self._ids or is_again or is_part):
                self._unknown = STRANGE
            return  # otherwise these are the same samples again, or inputs made from them
        meant = self._batches.meant()
        if meant is not None:
            self._by_count(inputs, meant, is_again=is_again)
        elif is_again:
            return  # a second pass, perhaps at other weights
        elif self._batches.have_lost:
            self._unknown = MANY
        elif self._batches.loader is not None:
            self._unknown = STRANGE
        elif rows is None:
            self._unknown = NO_ROWS
        else:
            self._ids += map(contents.as_id, rows)
            self._new_kinds.add(CONTENT)

    def _are_made(self, inputs: Any) -> bool:
        """Return whether `inputs` were made from the batch in use, such as noise or sampled text.

        They were if random numbers were drawn after the script received the batch, and not all
        inputs are rows of the batch. (Sampled text may equal the batch if it ended at once.)
        """
        batch = self._batches.in_use()
        if batch is None or batch is not self._drawn_for:
            return False
        tensors = [tensor for tensor in contents.tensors_in(inputs) if tensor.numel()]
        largest = max(tensors, key=torch.Tensor.numel, default=None)
        rows = None if largest is None else contents.rows_of(largest)
        return rows is not None and not batch.has_all(rows)

    def _by_content(self, inputs: Any) -> bool:
        """Find the pending batch that has the inputs, use it, and return whether there is one.

        The oldest batch is tried first. Only the largest tensor of the inputs is compared, since
        several batches may have the same labels or masks. If the script has changed that tensor (to
        a text without its last token, say), another tensor is compared, provided that only one
        batch has it.
        """
        tensors = [tensor for tensor in contents.tensors_in(inputs) if tensor.dim() and len(tensor)]
        largest = max((tensor[0].numel() for tensor in tensors), default=0)
        found = [contents.rows_of(tensor) for tensor in tensors if tensor[0].numel() == largest]
        distinct = max((len(set(rows)) for rows in found if rows), default=0)
        columns = [rows for rows in found if rows and len(set(rows)) == distinct]
        for rows in columns:
            for batch, places in self._holding(rows):
                self._use(self._batches.newest(batch), places)
                return True
            # A discriminator's input may be one tensor with a batch and with what a generator made.
            within = [b for b in self._batches.pending if b.ids is not None and b.is_within(rows)]
            if len({batch.ids for batch in within}) == 1:
                batch = self._batches.newest(within[0])
                self._use(batch, batch.left)
                return True
        others = [tensor for tensor in tensors if largest / 2 <= tensor[0].numel() < largest]
        for rows in filter(None, map(contents.telling_rows, others)):
            holding = [*self._holding(rows)]
            if len({batch.ids for batch, _ in holding}) == 1:
                self._use(self._batches.newest(holding[0][0]), holding[0][1])
                return True
        return False

    def _holding(self, rows: list[Row]) -> Iterator[tuple[Batch, list[int]]]:
        for batch in [batch for batch in self._batches.pending if batch.ids is not None]:
            places = batch.find(rows)
            if places is not None:
                yield batch, places

    def _by_count(self, inputs: Any, batch: Batch, *, is_again: bool) -> None:
        """Use all samples of `batch`; they count as unknown if the inputs have fewer rows.

        All of the batch is right for inputs that the script has changed (normalised, or converted
        to another dtype).
        """
        counts = [size for tensor in contents.tensors_in(inputs) for size in tensor.shape[:2]]
        if is_again or (counts and batch.size > 1 and max(counts) < len(batch.left)):
            self._unknown = CUT
        self._use(batch, batch.left)

    def _use(self, batch: Batch, places: list[int]) -> None:
        iteration = batch.iteration
        iteration.trains |= iteration.was_probed  # it goes on, so it was no probe
        self._fed[iteration] = self._batches.newest_yielded()
        self._seen_epoch, ids = self._batches.use(batch, places)
        self._ids += ids
        self._new_kinds.add(INDEX)

    # --- called by the recorder of a script with the line ---------------------------------------

    def settle(self) -> None:
        """Called when a backward pass begins or is over, even of only some parts of the model.

        If the model had no forward pass before it, the backward pass has the batch that `meant`
        returns.
        """
        super().settle()
        if self._evaluated is not None and not self._is_given:
            self._batches.set_aside(contents.num_rows(self._evaluated), trains=True)
            self.given(self._evaluated, trains=True)
        if self._is_given:
            return
        batch = self._batches.meant()
        if batch is not None:
            self._use(batch, batch.left)
            self._is_given = True
        elif self._batches.loader is None and not (self._ids or self._rows):
            self._unknown = NO_ROWS  # otherwise this is another loss for the rows of this step

    def repeat(self, ids: Ids) -> None:
        """Record that the next backward pass repeats the samples of the last one, `ids`."""
        super().repeat(ids)
        self._again = ids

    @property
    def are_new(self) -> bool:
        """Whether there are samples since the last backward pass."""
        return super().are_new if self._tells else bool(self._ids)

    def forget_evaluations(self) -> bool:
        """Forget the step's completed micro-batches, which trained nothing.

        Return False, and forget nothing, if an iteration that trains has a part in them.
        """
        evaluated = [*self._of_step]
        if self._tells or any(self._of_step.values()) or not self._fed.keys().isdisjoint(evaluated):
            return False
        if evaluated:
            epoch = self._batches.forget_evaluations(evaluated, varied=self._varied)
            self._seen_epoch = epoch if self._fed else self._seen_epoch
        self._of_step, self._completed, self._rows = {}, [], set(self._rows_now)
        return True

    def take(self) -> Told:
        """Return the samples of the micro-batch, and forget them."""
        reported = super().take()
        ids = () if self._unknown else tuple(self._ids) or self._again
        num_made = 0
        has_ids = any(one_has_ids for _, one_has_ids in self._completed)
        if self._is_made and not (ids or self._unknown or has_ids):
            batch = self._batches.in_use()
            num_made = 0 if batch is None else batch.size
        seen = Told(ids, self._seen_epoch, self._unknown, num_made)
        self._completed.append((self._rows_now, bool(ids)))
        self._rows_now = set()
        self._ids, self._again, self._unknown, self._is_given = [], (), "", False
        self._is_made = False
        for iteration in self._fed:
            self._of_step.setdefault(iteration, iteration.trains)
            iteration.trains = True
        self._fed.clear()
        self._kinds |= self._new_kinds
        self._new_kinds.clear()
        self._batches.taken()
        return reported if self._tells else seen

    def end_step(self, num_ahead: int = 0) -> None:
        """Called when a step is over: the next one may have the same inputs.

        The last `num_ahead` micro-batches belong to the next step, as does a forward pass without
        its backward pass.
        """
        self._of_step, self._varied = {}, self._batches.varies
        self._completed = self._completed[len(self._completed) - num_ahead :]
        self._rows = self._rows_now.union(*(rows for rows, _ in self._completed))

    # --- facts for the record ---------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return facts about the data that can be read from the loader, as values for JSON."""
        facts = super().facts()
        if self._tells:
            return facts
        if self._kinds:
            facts["samples"] = next(iter(self._kinds)) if len(self._kinds) == 1 else "unknown"
        source = self._batches.source()
        if source is None:
            return facts
        return {
            "num_samples": source.numbering.size,
            "drop_last": source.drop_last or self._batches.epochs.drops_last,
            "replacement": source.replacement,
            "thorough": source.is_thorough,
            "ordered": self._batches.are_ordered,
            "varied": self._batches.varies,
            **facts,
        }

    def selected(self) -> Ids | None:
        """Return the samples that all ranks together draw in an epoch.

        Return None if that is every sample.
        """
        source = self._batches.source()
        if self._tells or self._whole is not None or source is None:
            return super().selected()
        return source.selected

    def news(self) -> dict[str, Any]:
        """Return what has become known since the last call of this method, as values for JSON.

        An iteration over a loader is an epoch, unless a sampler of the script decides which samples
        are drawn.
        """
        source = self._batches.source()
        if self._tells or source is None:
            return super().news()
        facts = {"epochs": source.has_passes}
        fresh = {name: value for name, value in facts.items() if value != self._written.get(name)}
        self._written |= fresh
        return fresh | self._news_of_cuts(self._batches.epochs)
