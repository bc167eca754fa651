"""Assembly of the files of a run's ranks to the events of one run, as a trace has them.

`ordered` makes events comparable between ranks, and `numbered` adds facts that no single rank
knows. Before that, `load` finds the step from which a restarted rank continues (`recognised`), and
drops sample ids if they don't mean the same on all ranks (`agreed`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import numpy as np

from entrenar_py.check.rank_files import rank_file, whole_model
from entrenar_py.check.rank_files.rank_file import SUFFIX, RankTrace
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import (
    Declared,
    Drawn,
    Event,
    Halt,
    Held,
    Injected,
    Membership,
    Noticed,
    Ruled,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Update,
)

# The order of the events of one step: starts come first, updates after the shards.
_IN_ORDER = (
    Start,
    Declared,
    Noticed,
    Ruled,
    Drawn,
    Shard,
    Update,
    Synchronised,
    Injected,
    Halt,
    Membership,
)


def load(folder: Path) -> tuple[list[RankTrace], list[str]]:
    """Read the files of all ranks in `folder`. A rank has one file for each start.

    Return the records that could be read, and descriptions of what is wrong with the files. If a
    rank resumed without saying at which step, the step is derived from its weights.
    """
    ranks, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            ranks.append(rank_file.load(path))
        except TraceError as error:
            problems.append(str(error))
    ranks = agreed(recognised(ranks))
    return ranks, problems + list(_observed_again(ranks))


def _observed_again(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Yield a problem for each process that called `observe` again, from an earlier step."""
    ends: dict[tuple[int, int], int] = {}  # (rank, process) -> number of steps
    for life in sorted(ranks, key=lambda life: life.life):
        place = life.rank, int(life.header.get("pid", 0))
        begun = min((event.step for event in life.events if isinstance(event, Start)), default=0)
        if place in ends and begun < ends[place]:
            yield (
                f"rank {life.rank} called observe() again, from step {begun} on, after "
                f"{ends[place]} steps that another call had recorded: observe two models as one, "
                "observe(torch.nn.ModuleList([a, b]), [optimizer_a, optimizer_b]); or say step="
            )
        steps = [event.step + 1 for event in life.events if isinstance(event, Update)]
        ends[place] = max([ends.get(place, 0), *steps])


def ordered(ranks: Sequence[RankTrace]) -> list[Event]:
    """Return the events of all ranks, one life after the other, and step by step in each life.

    A life is the time between two starts. Within a step, starts come first, and updates after
    shards. A rank that died in a step has no update of that step. Tensors that ranks have in pieces
    are made whole, and micro-batches that ranks share become one event. If a buffer depends on any
    rank's own samples, it is local on all ranks.
    """

    def place(event: Event) -> tuple[int, int]:
        kind = _IN_ORDER.index(type(event)) if type(event) in _IN_ORDER else len(_IN_ORDER)
        return getattr(event, "step", None) or 0, kind

    declared = [rank.local for rank in ranks if rank.local is not None]
    own = _integers_that_differ(ranks)
    local = frozenset[str]().union(own, *declared) if declared else None
    comparable = [replace(rank, events=tuple(_comparable(rank, local))) for rank in ranks]
    lives = sorted({rank.life for rank in ranks})
    return [
        event
        for life in lives
        for event in sorted(
            whole_model.of_life([rank for rank in comparable if rank.life == life]), key=place
        )
    ]


def _integers_that_differ(ranks: Sequence[RankTrace]) -> Set[str]:
    """Return the integer buffers that differ between ranks, before or after a step.

    Such a buffer belongs to its rank: the rank's number, the place of its piece, or the number of
    samples seen. A script may count after its step, so that the next life begins with a different
    count from the last recorded one. Therefore only ranks of the same life are compared.
    """
    values: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for rank in ranks:
        for event in rank.events:
            if not isinstance(event, Start | Update):
                continue
            step = event.step - isinstance(event, Start)
            for name, record in event.buffers.items():
                if record.data is not None and not record.dtype.startswith("float"):
                    values[name, step, rank.life].add(record.digest)
    return {name for (name, *_), digests in values.items() if len(digests) > 1}


def _comparable(rank: RankTrace, local: Set[str] | None) -> Iterator[Event]:
    """Yield the events of a rank, with buffers that can't be compared between ranks in `local`.

    These are the buffers named in `local`, or all buffers if `local` is None. A local buffer that
    no update has is left out. A parameter that is frozen at first but has a gradient later isn't
    recorded as frozen, since the script unfreezes it.
    """
    updates = [event for event in rank.events if isinstance(event, Update)]
    trained = {
        name
        for event in rank.events
        if isinstance(event, Shard | Update)
        for name in event.gradient
    }
    known = {name for event in updates for name in event.buffers}
    for event in rank.events:
        if (
            isinstance(event, Shard)
            and rank.header.get("samples") == "content"
            and _is_dummy(event)
        ):
            event = replace(event, ids=(), contents=(), weight=0.0)
        if not isinstance(event, Start | Update | Synchronised):
            yield event
            continue
        own = [name for name in event.buffers if local is None or name in local]
        if isinstance(event, Start):
            frozen = tuple(name for name in event.frozen if name not in trained)
            event = replace(event, frozen=frozen)
        if own and not isinstance(event, Synchronised):
            kept = {name: event.buffers[name] for name in own if name in known}
            event = replace(event, local=kept)
        if own:
            shared = {name: b for name, b in event.buffers.items() if name not in own}
            event = replace(event, buffers=shared)
        yield event


def _is_dummy(shard: Shard) -> bool:
    """Return whether every loss was multiplied by zero: its batch only keeps a rank in step."""
    return bool(shard.terms) and not any(share for _, share, *_ in shard.terms)


def places(ranks: Sequence[RankTrace]) -> dict[int, int]:
    """Return rank -> index, from 0, of the part of a batch that the rank draws.

    Ranks that draw the same samples have the same index.
    """
    layout = whole_model.layout_of(ranks)
    known = {rank.rank for rank in ranks}
    if layout is None:
        return {rank: rank for rank in known}
    numbers = sorted({layout.data(rank) for rank in range(math.prod(layout.axes.values()))})
    return {rank: numbers.index(layout.data(rank)) for rank in known}


def numbered(
    events: Iterable[Event],
    accumulation: int,
    places: Mapping[int, int],
    *,
    reporting: Set[int] = frozenset(),
    steps_per_epoch: int | None = None,
) -> list[Event]:
    """Return `events` with facts that no single rank knows.

    Shards get numbers that are unique among all ranks, derived from the `places` of the ranks that
    draw them. Updates get the weight of all shards of their step. A rank that is started again
    counts epochs from 0, unless it is in `reporting`, the ranks that report epochs. With
    `steps_per_epoch`, the shards of such a rank get the epochs of the whole run.
    """
    weights: dict[int, float] = defaultdict(float)
    epochs_before: dict[int, int] = {}  # rank -> epochs before its life
    renumbered: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            if steps_per_epoch is not None and event.rank not in reporting:
                epochs_before[event.rank] = event.step // steps_per_epoch
            for step in [step for step in weights if step >= event.step]:
                del weights[step]  # this rank resumes here, and these steps are repeated
        elif isinstance(event, Shard):
            weights[event.step] += event.weight
            epoch = event.epoch + epochs_before.get(event.rank, 0)
            number = places.get(event.rank, event.rank) * accumulation + event.shard
            event = replace(event, shard=number, epoch=epoch)
        elif isinstance(event, Injected | Halt) and event.shard is not None:
            rank = event.rank or 0
            event = replace(event, shard=places.get(rank, rank) * accumulation + event.shard)
        elif isinstance(event, Drawn):
            event = replace(event, part=places.get(event.rank, event.rank))
        elif isinstance(event, Update):
            before = places.get(event.rank, event.rank) * accumulation
            summed = {
                name: tuple(before + number for number in numbers)
                for name, numbers in event.summed.items()
            }
            event = replace(event, weight=weights[event.step], summed=summed)
        renumbered.append(event)
    return renumbered


def holdings(ranks: Sequence[RankTrace]) -> list[Held]:
    """Return for each rank how many bytes of parameters it has at its start.

    Ranks are left out if they have no layout, if the layout doesn't spread parameters, if they have
    no start, or if the size of a tensor is unknown.
    """
    records = []
    for rank in ranks:
        start = next((event for event in rank.events if isinstance(event, Start)), None)
        if rank.layout is None or rank.layout.num_parts < 2 or start is None:
            continue
        known = {
            name: (record.size, np.dtype(record.dtype).itemsize)
            for name, record in start.weights.items()
            if record.size is not None
        }
        if len(known) < len(start.weights):
            continue
        whole = {name: math.prod(piece.whole) for name, piece in rank.pieces.items()}
        own = {name: math.prod(piece.shape) for name, piece in rank.pieces.items()}
        records.append(
            Held(
                rank=rank.rank,
                num_parts=rank.layout.num_parts,
                held_bytes=sum(own.get(n, size) * width for n, (size, width) in known.items()),
                whole_bytes=sum(whole.get(n, size) * width for n, (size, width) in known.items()),
            )
        )
    return records


class LastLives:
    """The last life of each rank (`ranks`), and facts about the lives of all ranks.

    - `num_steps`: the number of steps of each rank, in all its lives.
    - `struck`: the kinds of the planted faults, in all lives.
    - `problem`: the first error that ended a last life; "" if none did.
    - `closed`: the ranks that reached the end of training without an error, in their last life.
    """

    def __init__(self, ranks: Sequence[RankTrace], events: Iterable[Event]) -> None:
        by_life = sorted(ranks, key=lambda rank: rank.life)
        self.ranks: Mapping[int, RankTrace] = {rank.rank: rank for rank in by_life}
        self.num_steps: dict[int, int] = {}
        self.struck: set[str] = set()
        for event in events:
            if isinstance(event, Update):
                made = self.num_steps.get(event.rank, 0)
                self.num_steps[event.rank] = max(made, event.step + 1)
            elif isinstance(event, Injected):
                self.struck.add(event.fault["kind"])
        self.problem = next((rank.problem for rank in self.ranks.values() if rank.problem), "")
        self.closed = {
            number for number, rank in self.ranks.items() if rank.ended and not rank.problem
        }

    @property
    def met_a_planted_value(self) -> bool:
        """True if a NaN or infinity was planted, so that training may stop on purpose."""
        return any(kind.startswith("non_finite") for kind in self.struck)

    def all_made_the_same(self, world_size: int) -> bool:
        """Return whether a rank is in `closed`, and all ranks took the same number of steps.

        Then the run is complete: only its shutdown failed or hung.
        """
        steps = {self.num_steps.get(rank, 0) for rank in range(world_size)}
        return bool(self.closed) and len(steps) == 1


# --- lives that resume without saying at which step -----------------------------------------------


def recognised(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return `ranks`, with corrected steps for those that resumed without saying at which step.

    A later life of a rank may begin at step 0 with weights that the rank had only after step k.
    Then the life begins at step k + 1. It also begins there if only some weights are those after
    step k, and the others are initial weights or those of other tensors: the checks decide what
    went wrong. If the rank never had these weights, they are compared with those of rank 0, which
    scripts often save for all ranks. All ranks of a life that show a step must show the same one,
    and the remaining ranks are moved with them. Nothing is changed if no rank shows a step, because
    the script then started over. Nothing is changed either if the process is that of an earlier
    life, because it then called `observe` twice.
    """
    memories: dict[int, _Memory] = defaultdict(_Memory)
    known: dict[tuple[int, int], RankTrace] = {}
    for life in sorted({rank.life for rank in ranks}):
        lives = [rank for rank in ranks if rank.life == life]
        ahead = _step_before(lives, memories)
        for rank in lives:
            moved = rank if not ahead else _moved(rank, ahead)
            memories[rank.rank].add(moved)
            known[rank.rank, rank.life] = moved
    return [known[rank.rank, rank.life] for rank in ranks]


def _step_before(lives: Sequence[RankTrace], memories: Mapping[int, _Memory]) -> int:
    """Return the step with which one life of all ranks continues; 0 if it can't be determined."""
    shown: set[int] = set()
    for life in lives:
        steps = memories[life.rank].steps_before(life)
        if steps is not None and not steps and life.rank:
            steps = memories[0].steps_before(life)
        if steps is None or len(steps) > 1:
            return 0
        shown.update(steps)
    return shown.pop() if len(shown) == 1 else 0


class _Memory:
    """The weights that a rank had in its lives so far: the initial ones, and those after steps.

    Only trainable weights count, because an average within the model moves after a step was
    recorded.
    """

    def __init__(self) -> None:
        self._trained: tuple[str, ...] = ()
        self._first: tuple[str, ...] | None = None
        self._steps: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._weights: dict[int, Mapping[str, str]] = {}  # step -> digests of tensors
        self._first_weights: Mapping[str, str] = {}
        self._processes: set[int] = set()

    def steps_before(self, rank: RankTrace) -> Set[int] | None:
        """Return the steps with which a life may continue; None if the life says so itself.

        Also None if its process is that of an earlier life. The set is empty if the weights are the
        initial ones or unknown.
        """
        start = next((event for event in rank.events if isinstance(event, Start)), None)
        if start is None or start.step or not start.weights:
            return None
        if rank.header.get("pid") in self._processes:
            return None
        weights = self._fingerprint(start.weights)
        if weights == self._first:
            return set()
        made = self._steps.get(weights) or self._in_part(self._digests(start.weights))
        return {step + 1 for step in made}

    def _in_part(self, weights: Mapping[str, str]) -> Set[int]:
        """Return the steps after which some of `weights` had their values.

        At least one tensor must have a value that it had after no other step. Each other tensor
        must have its initial value, or the value of any tensor after the step. Return no steps if a
        tensor has none of these values.
        """
        steps = set()
        for step, after in self._weights.items():
            others = [self._first_weights, *(w for at, w in self._weights.items() if at != step)]
            tells = any(
                after.get(name) == digest and all(one.get(name) != digest for one in others)
                for name, digest in weights.items()
            )
            known = {*after.values()}
            if tells and all(
                digest in known or digest == self._first_weights.get(name)
                for name, digest in weights.items()
            ):
                steps.add(step)
        return steps

    def add(self, rank: RankTrace) -> None:
        if "pid" in rank.header:
            self._processes.add(int(rank.header["pid"]))
        for event in rank.events:
            if isinstance(event, Start) and self._first is None:
                self._trained = event.trainable
                self._first = self._fingerprint(event.weights)
                self._first_weights = self._digests(event.weights)
            elif isinstance(event, Update | Synchronised):
                self._steps[self._fingerprint(event.weights)].add(event.step)
                self._weights[event.step] = self._digests(event.weights)

    def _fingerprint(self, tensors: Tensors) -> tuple[str, ...]:
        return tuple(f"{name} {digest}" for name, digest in sorted(self._digests(tensors).items()))

    def _digests(self, tensors: Tensors) -> Mapping[str, str]:
        names = [name for name in self._trained if name in tensors] or tensors
        return {name: tensors[name].digest for name in names}


def _moved(rank: RankTrace, ahead: int) -> RankTrace:
    return replace(rank, events=tuple(_later(event, ahead) for event in rank.events))


def _later(event: Event, ahead: int) -> Event:
    step = getattr(event, "step", None)
    if step is None:
        return event
    if isinstance(event, Start):
        return replace(event, step=step + ahead, resumed=True)
    return replace(event, step=step + ahead)  # type: ignore[call-arg]  # every kind with a step


# --- ids of samples -------------------------------------------------------------------------------


def agreed(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return `ranks`, without sample ids if ranks or steps identify samples in different ways."""
    kinds = {str(rank.header["samples"]) for rank in ranks if "samples" in rank.header}
    if len(kinds) < 2 and "unknown" not in kinds:
        return list(ranks)
    return [replace(rank, events=tuple(map(_nameless, rank.events))) for rank in ranks]


def _nameless(event: Event) -> Event:
    if not isinstance(event, Shard) or not event.ids:
        return event
    return replace(event, ids=(), unknown="ranks or steps name samples in different ways")
