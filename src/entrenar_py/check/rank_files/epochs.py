"""The epochs of a run whose script reports samples, and not the epochs that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Shard, Start


def are_told(ranks: Sequence[RankTrace]) -> bool:
    """Return whether all ranks report epochs, or have a loader that shows them."""
    return all(rank.epochs is not False for rank in ranks)


def go_on(
    ranks: Sequence[RankTrace], events: Sequence[Event], population: Collection[int] | None
) -> bool:
    """Return whether all samples come in one pass of a loader that never ends.

    A sample comes again there once all of `population` have come.
    """
    is_seen = all(rank.header.get("samples") == "index" for rank in ranks)
    shards = [event for event in events if isinstance(event, Shard)]
    if not is_seen or not population or any(shard.epoch or shard.unknown for shard in shards):
        return False
    drawn: dict[int, list[int]] = defaultdict(list)
    for shard in shards:
        drawn[shard.step].extend(shard.ids)
    seen = set[int]()
    for _, ids in sorted(drawn.items()):
        if len({*ids}) < len(ids) or not seen.isdisjoint(ids):
            return seen.union(ids).issuperset(population)
        seen.update(ids)
    return False


def derived(events: Sequence[Event], population: Collection[int] | None) -> list[Event] | None:
    """Return `events` with the epochs that follow from the samples, or None if none follow.

    An epoch is over when each sample of `population` was drawn once. By default these are all
    samples that the run draws. A step that draws a sample again before that could be an error or
    the beginning of an epoch, and which it is can't be told. The run must begin at its first step.
    """
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for event in events:
        if isinstance(event, Start) and event.step > 0:
            return None
        if isinstance(event, Shard):
            by_step[event.step].append(event)
    drawn = {id_ for shards in by_step.values() for shard in shards for id_ in shard.ids}
    whole = drawn if population is None else set(population)
    epochs: dict[int, int] = {}
    epoch, seen = 0, set[int]()
    for step, shards in sorted(by_step.items()):
        ids = [id_ for shard in shards for id_ in shard.ids]
        if len(set(ids)) < len(ids) or any(shard.unknown for shard in shards):
            return None
        if not seen.isdisjoint(ids):
            if not seen >= whole:
                return None
            epoch, seen = epoch + 1, set()
        seen.update(ids)
        epochs[step] = epoch
    return [
        replace(event, epoch=epochs[event.step]) if isinstance(event, Shard) else event
        for event in events
    ]
