"""Layouts of ranks that declare none, derived by comparing them with the run on one worker.

`placement` finds where a rank's tensors lie in the tensors of one worker. This module turns the
result into what a script with DTensors declares: a layout, and the pieces of each rank. The files
of both kinds of scripts are then read in the same way.

Ranks may share the work on a batch in three ways: they draw the same samples, they get parts of one
worker's rows, or they get the results of other ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.rank_files import placement
from entrenar_py.check.rank_files.layout import PARTIAL, Layout, Piece
from entrenar_py.check.rank_files.placement import Indices, Placed
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Event, Noticed, Shard, Start

# Rank -> name of its tensor -> place in the whole model.
Places = Mapping[int, Mapping[str, Placed]]

_PARTS_UNKNOWN = "ranks are given parts of rows, and no complete row is known"


@dataclass(frozen=True, kw_only=True)
class Arranged(Layout):
    """The arrangement that follows from the tensors and samples of ranks.

    `groups` has a number for each rank: ranks with the same number compute on the same samples. All
    ranks together have the model, once or in several copies. `is_partial` is true if the ranks of a
    group get parts of each sample.
    """

    groups: tuple[int, ...]
    is_partial: bool = False

    def data(self, rank: int) -> tuple[int, ...]:
        """Return the number of the rank's group."""
        return (self.groups[rank],)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank as a stage of its own: what ranks share is a copy or a term of a sum."""
        return {"pp": rank}

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return one value for all ranks, since other ranks have the tensors that a rank lacks."""
        return ()

    def has(self, names: Iterable[str]) -> bool:
        """Return whether ranks compute on parts of samples, if `names` are the axes PARTIAL.

        Return False for other axes.
        """
        return self.is_partial and names == PARTIAL


@dataclass(frozen=True, kw_only=True)
class Scattered(Piece):
    """The elements at `indices` of a flat tensor, in the order in which a rank has them.

    Any other elements of the rank's tensor are padding.
    """

    indices: Indices

    def arranged(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the elements without padding."""
        return values[: self.indices.size]

    @property
    def place(self) -> tuple[Any, ...]:
        """The indices of the elements in the whole tensor."""
        return (self.indices,)


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the ranks of a run share the model, as needed to read their files.

    `places` and `pieces` have ranks as keys; pieces have the names of whole tensors. `idle` are the
    ranks that draw no samples and get the results of other ranks. `shapes` are those of whole
    tensors. `rows` are the samples of one worker, if ranks get parts of them. `buffers` maps each
    rank to the names of its buffers and their names in the whole model. `local` names the buffers
    with different initial values on different ranks.
    """

    layout: Layout
    places: Places = field(default_factory=dict)
    pieces: Mapping[int, Mapping[str, Piece]] = field(default_factory=dict)
    idle: Set[int] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Batches = field(default_factory=dict)
    buffers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    local: Set[str] = frozenset()

    def of(self, ranks: Sequence[RankTrace]) -> list[RankTrace]:
        """Return the records of a run's ranks with this layout and the names of whole tensors."""
        if self.rows:
            ranks = [
                with_whole_rows(rank, self.rows)
                if are_parts(ranks, self.rows)
                else without_samples(rank, _PARTS_UNKNOWN)
                for rank in ranks
            ]
        return [self._of_rank(rank) for rank in ranks]

    def alone(self) -> Arrangement | None:
        """Return the arrangement for the run on one worker; None if that run is read as it is.

        If ranks are stages of a pipeline, all micro-batches of a step count as one, in both runs.
        """
        return Arrangement(layout=Layout(axes={"pp": 1})) if "pp" in self.layout.axes else None

    def _of_rank(self, rank: RankTrace) -> RankTrace:
        named = {name: place.name for name, place in self.places.get(rank.rank, {}).items()}
        named |= self.buffers.get(rank.rank, {})
        bare = without_samples(rank) if rank.rank in self.idle else rank
        events = tuple(
            self._without_owned(_renamed(event, named, self.shapes)) for event in bare.events
        )
        pieces = self.pieces.get(rank.rank, {})
        kept = {
            name: pieces[parameter]
            for name, parameter, size in _held(events)
            if parameter in pieces and pieces[parameter].shape == (size,)
        }
        local = rank.local if rank.local is None else rank.local | self.local
        return replace(rank, events=events, layout=self.layout, pieces=kept, local=local)

    def _without_owned(self, event: Event) -> Event:
        if not isinstance(event, Shard) or not self.layout.owned:
            return event
        kept = {name: t for name, t in event.gradient.items() if name not in self.layout.owned}
        return replace(event, gradient=kept)


def shown(ranks: Sequence[RankTrace], alone: Sequence[RankTrace]) -> Arrangement | None:
    """Return how `ranks` share the model, derived from the run on one worker, `alone`.

    Return None if ranks have DTensors, if all have the whole model, or if the place of a tensor
    isn't clear. A declared layout says which ranks share samples. If in addition every rank has
    whole tensors under the names that one worker has, nothing else is needed, and None is returned.
    """
    starts = {rank.rank: start for rank in reversed(ranks) if (start := _first(rank)) is not None}
    whole = next((start for rank in alone if (start := _first(rank)) is not None), None)
    if whole is None or len(starts) < 2 or any(rank.pieces for rank in ranks):
        return None
    if sorted(starts) != [*range(len(starts))] or not all(s.weights for s in starts.values()):
        return None
    places = placement.of(starts, whole)
    if not all(_is_clear(places[rank], start) for rank, start in starts.items()):
        return None
    declared = next((rank.layout for rank in ranks if rank.layout is not None), None)
    held = [item for of_rank in places.values() for item in of_rank.items()]
    if declared is not None and all(
        place.indices is None and place.name == name for name, place in held
    ):
        return None
    alone_rows = next((batches_of(rank) for rank in alone if not rank.life), {})
    is_partial = are_parts(ranks, alone_rows)
    if not is_partial and all(_is_whole(of_rank, whole) for of_rank in places.values()):
        return None
    drawn = {} if is_partial else drawn_batches(ranks, alone_rows)
    groups = (0,) * len(starts) if is_partial else groups_of(drawn, len(starts))
    if declared is not None:
        groups = _numbers([declared.data(rank) for rank in sorted(starts)])
    if groups is None:
        return None
    buffers = {rank: placement.of_buffers(starts[rank], places[rank]) for rank in places}
    axis = "pp" if _are_stages(places, groups) else "dp"
    return Arrangement(
        layout=Arranged(
            axes={axis: len(starts)} if declared is None else declared.axes,
            tied=() if declared is None else declared.tied,
            groups=groups,
            is_partial=is_partial,
            owned=_owned(places) if len({*groups}) > 1 else frozenset(),
        ),
        places=places,
        pieces=_pieces(places, whole, groups),
        idle=frozenset() if is_partial else places.keys() - drawn.keys(),
        shapes=whole.shapes,
        rows=alone_rows if is_partial else {},
        buffers=buffers,
        local=_unlike(starts, buffers),
    )


def _first(rank: RankTrace) -> Start | None:
    return next((event for event in rank.events if isinstance(event, Start)), None)


def _numbers(keys: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    distinct = [*dict.fromkeys(keys)]
    return tuple(map(distinct.index, keys))


def _is_whole(places: Mapping[str, Placed], whole: Start) -> bool:
    return {place.name for place in places.values() if place.indices is None} >= {*whole.weights}


def _is_clear(places: Mapping[str, Placed], start: Start) -> bool:
    names = {place.name for place in places.values()}
    return places.keys() == start.weights.keys() and len(names) == len(places)


def _owned(places: Places) -> frozenset[str]:
    held = [{p.name for p in of_rank.values() if p.indices is None} for of_rank in places.values()]
    every = frozenset(place.name for of_rank in places.values() for place in of_rank.values())
    return every - held[0].intersection(*held)


def _unlike(starts: Mapping[int, Start], named: Mapping[int, Mapping[str, str]]) -> Set[str]:
    digests: dict[str, set[str]] = {}
    for rank, start in starts.items():
        for name, record in start.buffers.items():
            digests.setdefault(named[rank][name], set()).add(record.digest)
    return {name for name, seen in digests.items() if len(seen) > 1}


def _are_stages(places: Places, groups: Sequence[int]) -> bool:
    held = [{place.name for place in of_rank.values()} for of_rank in places.values()]
    return len({*groups}) == 1 and all(
        one - set[str]().union(*(other for other in held if other is not one)) for one in held
    )


# --- pieces ---------------------------------------------------------------------------------------


def _pieces(places: Places, whole: Start, groups: Sequence[int]) -> dict[int, dict[str, Piece]]:
    """Return rank -> name of a whole tensor -> the rank's piece of it."""
    pieces: dict[int, dict[str, Piece]] = {rank: {} for rank in places}
    for rank, of_rank in places.items():
        for place in of_rank.values():
            if place.indices is None:
                continue
            size = math.prod(whole.shapes.get(place.name) or (whole.weights[place.name].size or 0,))
            pieces[rank][place.name] = Scattered(
                offset=(0,),
                shape=(place.indices.size + place.padding,),
                whole=(size,),
                ranks=_holders(rank, place, places, groups, size),
                indices=place.indices,
            )
    return pieces


def _holders(
    rank: int, place: Placed, places: Places, groups: Sequence[int], size: int
) -> tuple[int, ...]:
    """Return the ranks that together have a copy of a tensor: `rank` and the nearest ones to it."""
    known = np.zeros(size, bool)
    holders = []
    for other in sorted(
        places, key=lambda other: (groups[other] != groups[rank], abs(other - rank))
    ):
        for piece in places[other].values():
            if piece.name != place.name or piece.indices is None or known[piece.indices].all():
                continue
            known[piece.indices] = True
            holders.append(other)
    return tuple(sorted(holders))


# --- the records of a rank ------------------------------------------------------------------------


def _held(events: Iterable[Event]) -> Set[tuple[str, str, int]]:
    """Return (name, parameter, number of elements) of each tensor that may be in pieces."""
    names = set()
    for event in events:
        for kind in ("weights", "gradient", "edited", "optimizer", "extra"):
            for name, record in (getattr(event, kind, None) or {}).items():
                first, _, last = name.partition("/")
                parameter = {"optimizer": first, "extra": last}.get(kind, name)
                names.add((name, parameter, record.size or 0))
    return names


def _renamed(
    event: Event, named: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Event:
    if isinstance(event, Noticed):
        return _noticed(event, named)
    new = evidence.event_renamed(event, named)
    if not isinstance(new, Start):
        return new
    return replace(
        new, shapes={name: shapes.get(name, shape) for name, shape in new.shapes.items()}
    )


def _noticed(event: Noticed, named: Mapping[str, str]) -> Noticed:
    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(named.get(name, name) for name in names))

    return replace(
        event,
        shared=tuple(tie for names in event.shared if len(tie := renamed(names)) > 1),
        alike=tuple((named.get(a, a), named.get(b, b)) for a, b in event.alike),
        doubled=renamed(event.doubled),
        peculiar={named.get(name, name): look for name, look in event.peculiar.items()},
    )


# --- samples that ranks share ---------------------------------------------------------------------


_NEAR = 1e-6  # relative, as norms are recorded with nine digits


@dataclass(frozen=True)
class Batch:
    """The samples that a rank draws in a step, in order. `contents` is () if unknown."""

    ids: tuple[int, ...]
    contents: tuple[tuple[float, ...], ...]


Batches = Mapping[int, Batch]  # step -> batch


def batches_of(rank: RankTrace) -> Batches:
    """Return the batches of a rank, without steps in which samples are unknown."""
    shards: dict[int, list[Shard]] = defaultdict(list)
    for event in rank.events:
        if isinstance(event, Shard):
            shards[event.step].append(event)
    batches = {}
    for step, of_step in shards.items():
        ids = tuple(id_ for shard in of_step for id_ in shard.ids)
        contents = tuple(row for shard in of_step for row in shard.contents)
        if ids:
            batches[step] = Batch(ids, contents if len(contents) == len(ids) else ())
    return batches


def drawn_batches(ranks: Sequence[RankTrace], alone_rows: Batches) -> dict[int, Batches]:
    """Return rank -> its batches, for ranks that draw samples themselves.

    A rank that gets the results of another rank also has rows, but none of the rows of one worker,
    which `alone_rows` has.
    """
    are_rows = any(rank.header.get("samples") == "content" for rank in ranks)
    by_rank = {rank.rank: batches_of(rank) for rank in ranks if not rank.life}
    return {
        rank: batches
        for rank, batches in by_rank.items()
        if batches and not (are_rows and _are_others(batches, alone_rows))
    }


def _are_others(batches: Batches, one: Batches) -> bool:
    return not any({*b.ids} & {*one[step].ids} for step, b in batches.items() if step in one)


def groups_of(drawn_by: Mapping[int, Batches], world_size: int) -> tuple[int, ...] | None:
    """Return a number for each rank, equal for ranks that draw the same samples in each step.

    A rank that draws no samples works on those of the others. Return None if no rank draws any, or
    if a rank draws none while the others draw different samples.
    """
    numbers: dict[frozenset[tuple[int, tuple[int, ...]]], int] = {}
    known = {}
    for rank, batches in sorted(drawn_by.items()):
        key = frozenset((step, tuple(sorted(batch.ids))) for step, batch in batches.items())
        known[rank] = numbers.setdefault(key, len(numbers))
    if not known or (len(known) < world_size and len(numbers) > 1):
        return None
    return tuple(known.get(rank, 0) for rank in range(world_size))


def are_parts(ranks: Sequence[RankTrace], alone_rows: Batches) -> bool:
    """Return whether the rows of the ranks, put together, are the rows of one worker.

    Then the sizes of the parts add up to the size of the row, and the squares of their norms to its
    squared norm. Steps that one worker doesn't take are ignored, and so are steps with unknown
    contents. At least one step must have known contents.
    """
    by_rank: dict[int, dict[int, Batch]] = defaultdict(dict)
    for rank in ranks:
        by_rank[rank.rank] |= batches_of(rank)
    steps = set(alone_rows).intersection(*by_rank.values())
    if len(by_rank) < 2:
        return False
    is_shown = False
    for step in sorted(steps):
        with_whole_rows, parts = alone_rows[step], [batches[step] for batches in by_rank.values()]
        if any(len(part.ids) != len(with_whole_rows.ids) for part in parts):
            return False
        if not with_whole_rows.contents or not all(part.contents for part in parts):
            continue
        rows = zip(with_whole_rows.contents, *(part.contents for part in parts), strict=True)
        if not all(_is_sum(row, of_ranks) for row, *of_ranks in rows):
            return False
        is_shown = True
    return is_shown


def _is_sum(with_whole_rows: Sequence[float], parts: Sequence[Sequence[float]]) -> bool:
    """Return whether the first tensor of a row consists of the first tensors of the parts."""
    if any(len(row) < 3 for row in (with_whole_rows, *parts)) or any(
        p[0] >= with_whole_rows[0] for p in parts
    ):
        return False
    square = math.fsum(part[1] ** 2 for part in parts)
    is_near = math.isclose(square, with_whole_rows[1] ** 2, rel_tol=_NEAR)
    return sum(part[0] for part in parts) == with_whole_rows[0] and is_near


def with_whole_rows(rank: RankTrace, alone_rows: Batches) -> RankTrace:
    """Return the record of a rank that gets parts of rows, with one worker's whole rows instead."""
    before: dict[int, int] = defaultdict(int)
    events: list[Event] = []
    for event in rank.events:
        if isinstance(event, Shard) and event.step in alone_rows:
            first = before[event.step]
            before[event.step] = last = first + len(event.ids)
            batch = alone_rows[event.step]
            event = replace(event, ids=batch.ids[first:last], contents=batch.contents[first:last])
        events.append(event)
    return replace(rank, events=tuple(events))


def without_samples(rank: RankTrace, unknown: str = "") -> RankTrace:
    """Return the record of a rank without its samples.

    They are removed because the rank draws none, or for the reason `unknown`.
    """
    events = (
        replace(event, ids=(), contents=(), unknown=unknown or event.unknown)
        if isinstance(event, Shard)
        else event
        for event in rank.events
    )
    return replace(rank, events=tuple(events))
