"""Which ranks compute on the same samples, and which on parts of one sample.

Ranks that declare nothing may share the work on a batch: those that draw the same samples, those
that are given parts of the rows that one worker is given, and those that are given what others
have computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Shard

_NEAR = 1e-6  # relative: norms are recorded with nine digits


@dataclass(frozen=True)
class Batch:
    """The samples that a rank draws in a step, in order; `contents` are () where unknown."""

    ids: tuple[int, ...]
    contents: tuple[tuple[float, ...], ...]


Batches = Mapping[int, Batch]  # by step


def of(rank: RankTrace) -> Batches:
    """Return the batches of a rank, without steps whose samples are unknown."""
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


def drawn(ranks: Sequence[RankTrace], one: Batches) -> dict[int, Batches]:
    """Return the batches of each rank that draws samples itself, by what one worker draws.

    A rank that is given what another has computed has rows, too, but none of those of one worker.
    """
    are_rows = any(rank.header.get("samples") == "content" for rank in ranks)
    given = {rank.rank: of(rank) for rank in ranks if not rank.life}
    return {
        rank: batches
        for rank, batches in given.items()
        if batches and not (are_rows and _are_others(batches, one))
    }


def _are_others(batches: Batches, one: Batches) -> bool:
    """Return whether no row of a rank is one of those of one worker, in the same step."""
    return not any({*b.ids} & {*one[step].ids} for step, b in batches.items() if step in one)


def groups(drawn_by: Mapping[int, Batches], world_size: int) -> tuple[int, ...] | None:
    """Return a number for each rank, equal for ranks that draw the same samples in each step.

    A rank that draws none works on those of the others. Return None if these differ.
    """
    numbers: dict[frozenset[tuple[int, tuple[int, ...]]], int] = {}
    known = {}
    for rank, batches in sorted(drawn_by.items()):
        key = frozenset((step, tuple(sorted(batch.ids))) for step, batch in batches.items())
        known[rank] = numbers.setdefault(key, len(numbers))
    if not known or (len(known) < world_size and len(numbers) > 1):
        return None
    return tuple(known.get(rank, 0) for rank in range(world_size))


def are_parts(ranks: Sequence[RankTrace], one: Batches) -> bool:
    """Return whether each row of one worker is what the ranks have of it, put together.

    Then the sizes of parts have that of the row as their sum, and so have their squares. Steps that
    one worker doesn't make say nothing, nor do those whose contents are unknown: one must be known.
    """
    given: dict[int, dict[int, Batch]] = defaultdict(dict)
    for rank in ranks:
        given[rank.rank] |= of(rank)
    steps = set(one).intersection(*given.values())
    if len(given) < 2:
        return False
    is_shown = False
    for step in sorted(steps):
        whole, parts = one[step], [batches[step] for batches in given.values()]
        if any(len(part.ids) != len(whole.ids) for part in parts):
            return False
        if not whole.contents or not all(part.contents for part in parts):
            continue
        rows = zip(whole.contents, *(part.contents for part in parts), strict=True)
        if not all(_is_sum(row, of_ranks) for row, *of_ranks in rows):
            return False
        is_shown = True
    return is_shown


def _is_sum(whole: Sequence[float], parts: Sequence[Sequence[float]]) -> bool:
    """Return whether the first tensor of a row consists of the first tensors of the parts."""
    if any(len(row) < 3 for row in (whole, *parts)) or any(p[0] >= whole[0] for p in parts):
        return False
    square = math.fsum(part[1] ** 2 for part in parts)
    is_near = math.isclose(square, whole[1] ** 2, rel_tol=_NEAR)
    return sum(part[0] for part in parts) == whole[0] and is_near


def whole(rank: RankTrace, one: Batches) -> RankTrace:
    """Return the record of a rank that has parts of rows, with the rows of one worker in place."""
    before: dict[int, int] = defaultdict(int)
    events: list[Event] = []
    for event in rank.events:
        if isinstance(event, Shard) and event.step in one:
            first = before[event.step]
            before[event.step] = last = first + len(event.ids)
            batch = one[event.step]
            event = replace(event, ids=batch.ids[first:last], contents=batch.contents[first:last])
        events.append(event)
    return replace(rank, events=tuple(events))


def without(rank: RankTrace, unknown: str = "") -> RankTrace:
    """Return the record of a rank without samples: it draws none, or they are `unknown`."""
    events = (
        replace(event, ids=(), contents=(), unknown=unknown or event.unknown)
        if isinstance(event, Shard)
        else event
        for event in rank.events
    )
    return replace(rank, events=tuple(events))
