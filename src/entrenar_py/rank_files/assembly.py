"""The files of a run's ranks put together: the events of one run, as a trace has them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from entrenar_py.errors import TraceError
from entrenar_py.rank_files import micro_batches, rank_file, whole_tensors
from entrenar_py.rank_files.layout import Layout
from entrenar_py.rank_files.rank_file import SUFFIX, RankTrace
from entrenar_py.trace import Event, Halt, Injected, Membership, Shard, Start, Synchronised, Update

# What ranks hold of a model, by the event that has it.
_PARTS = {
    Start: ("weights", "optimizer", "buffers"),
    Update: ("weights", "optimizer", "buffers", "gradient"),
}


def load(folder: Path) -> tuple[list[RankTrace], list[str]]:
    """What each rank recorded in each of its lives, and what is wrong with files that can't be
    read.
    """
    ranks, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            ranks.append(rank_file.load(path))
        except TraceError as error:
            problems.append(str(error))
    return ranks, problems + list(_at_once(ranks))


def _at_once(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Where a process observed again from a step on that it had already recorded."""
    made: dict[tuple[int, int], int] = {}  # of a rank and a process: the steps
    for one in sorted(ranks, key=lambda one: one.life):
        place = one.rank, int(one.header.get("pid", 0))
        begun = min((event.step for event in one.events if isinstance(event, Start)), default=0)
        if place in made and begun < made[place]:
            yield (
                f"rank {one.rank} called observe() again, from step {begun} on, after "
                f"{made[place]} steps that another call had recorded: observe two models as one, "
                "observe(torch.nn.ModuleList([a, b]), [optimizer_a, optimizer_b]); or say step="
            )
        steps = [event.step + 1 for event in one.events if isinstance(event, Update)]
        made[place] = max([made.get(place, 0), *steps])


def ordered(ranks: Sequence[RankTrace]) -> list[Event]:
    """All ranks' events step by step, those of a life after those of the life before; of one step
    starts first and updates last, but who is gone made none.

    What ranks hold in pieces is whole in them, and micro-batches that they share are one. Buffers
    that are local on one rank are in none.
    """
    kinds = (Start, Shard, Update, Synchronised, Injected, Halt, Membership)

    def place(event: Event) -> tuple[int, int]:
        step = getattr(event, "step", None) or 0
        return step, kinds.index(type(event)) if type(event) in kinds else len(kinds)

    told = [one.local for one in ranks if one.local is not None]
    local = frozenset[str]().union(*told) if told else None
    ranks = [replace(one, events=tuple(_without(_thawed(one.events), local))) for one in ranks]
    lives = sorted({one.life for one in ranks})
    return [
        event
        for life in lives
        for event in sorted(_events([one for one in ranks if one.life == life]), key=place)
    ]


def places(ranks: Sequence[RankTrace]) -> dict[int, int]:
    """Rank -> which part of each batch it draws, from 0; ranks that share one have the same."""
    arranged = _arranged(ranks)
    known = {one.rank for one in ranks}
    if arranged is None:
        return {rank: rank for rank in known}
    numbers = sorted({arranged.data(rank) for rank in range(math.prod(arranged.axes.values()))})
    return {rank: numbers.index(arranged.data(rank)) for rank in known}


def numbered(events: Iterable[Event], accumulation: int, places: Mapping[int, int]) -> list[Event]:
    """Shards numbered through the `places` of the ranks that draw them, and updates with the weight
    of all shards of their step: a rank knows its own alone.
    """
    weights: dict[int, float] = defaultdict(float)
    found: list[Event] = []
    for event in events:
        if isinstance(event, Start):  # of who goes on from here: these steps are made again
            for step in [step for step in weights if step >= event.step]:
                del weights[step]
        elif isinstance(event, Shard):
            weights[event.step] += event.weight
        if isinstance(event, Shard | Injected | Halt) and event.shard is not None:
            number = places.get(event.rank or 0, event.rank or 0) * accumulation + event.shard
            found.append(replace(event, shard=number))
        elif isinstance(event, Update):
            found.append(replace(event, weight=weights[event.step]))
        else:
            found.append(event)
    return found


def _without(events: Iterable[Event], local: Set[str] | None) -> Iterator[Event]:
    """`events` without the buffers that are `local`; without any where that is not known."""
    for event in events:
        if isinstance(event, Start | Update | Synchronised) and event.buffers:
            names = event.buffers.keys() - (event.buffers.keys() if local is None else local)
            kept = {name: one for name, one in event.buffers.items() if name in names}
            yield replace(event, buffers=kept)
        else:
            yield event


def _thawed(events: Sequence[Event]) -> Iterator[Event]:
    """`events` without what is frozen at first and given a gradient later: the script says so."""
    given = {name for one in events if isinstance(one, Shard | Update) for name in one.gradient}
    for event in events:
        if isinstance(event, Start):
            event = replace(event, frozen=tuple(n for n in event.frozen if n not in given))
        yield event


def _arranged(ranks: Sequence[RankTrace]) -> Layout | None:
    """As any rank says that they are arranged; None where none does."""
    return next((one.layout for one in ranks if one.layout is not None), None)


def _events(life: Sequence[RankTrace]) -> list[Event]:
    """The events of one life of all ranks."""
    arranged = _arranged(life)
    if arranged is None:
        return [event for one in life for event in one.events]
    ranks = {one.rank: one for one in life}
    shards = {one.rank: [event for event in one.events if isinstance(event, Shard)] for one in life}
    found: list[Event] = [*micro_batches.shared(shards, ranks, arranged)]
    of_step: dict[tuple[type[Event], int], dict[int, Start | Update]] = defaultdict(dict)
    for one in life:
        for event in one.events:
            if isinstance(event, Start | Update):
                of_step[type(event), event.step][one.rank] = event
            elif not isinstance(event, Shard):
                found.append(event)
    for by_rank in of_step.values():
        found += (_seen(rank, by_rank, ranks, arranged) for rank in by_rank)
    return found


def _seen(
    rank: int, by_rank: Mapping[int, Start | Update], ranks: whole_tensors.Ranks, arranged: Layout
) -> Start | Update:
    """What `rank` told, with the tensors of the whole model."""
    own = by_rank[rank]
    parts: dict[str, Any] = {
        part: whole_tensors.seen_by(
            rank, {other: getattr(one, part) for other, one in by_rank.items()}, ranks, arranged
        )
        for part in _PARTS[type(own)]
    }
    if isinstance(own, Start):
        beside = [
            one
            for other, one in sorted(by_rank.items())
            if isinstance(one, Start) and arranged.replica(other) == arranged.replica(rank)
        ]
        for kind in ("trainable", "frozen", "decayed"):
            names = (name for one in beside for name in getattr(one, kind) or ())
            parts[kind] = tuple(dict.fromkeys(map(arranged.first_name, names)))
        return replace(own, **parts)
    made = [
        one
        for other, one in by_rank.items()
        if isinstance(one, Update) and arranged.replica(other) == arranged.replica(rank)
    ]
    rates = {arranged.first_name(n): one.rate_of(n) for one in made for n in one.weights}
    parts["rates"] = {n: rate for n, rate in rates.items() if rate != own.learning_rate}
    if own.grad_norm is not None:
        norm = whole_tensors.norm(parts["gradient"])
        kept = [
            one.applied_norm / one.grad_norm
            for one in (own, *by_rank.values())
            if isinstance(one, Update) and one.grad_norm and one.applied_norm is not None
        ]
        parts |= {"grad_norm": norm, "applied_norm": norm * kept[0] if norm and kept else norm}
    return replace(own, **parts)
