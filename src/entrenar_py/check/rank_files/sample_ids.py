"""Drop the ids of samples that don't mean the same on all ranks.

Without a line in the script a rank names samples by the indices that its loader drew, or else by
digests of what its model was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Shard


def agreed(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return `ranks`, without ids if two ranks, or two steps of one, named samples differently."""
    kinds = {str(rank.header["samples"]) for rank in ranks if "samples" in rank.header}
    if len(kinds) < 2 and "unknown" not in kinds:
        return list(ranks)
    return [replace(rank, events=tuple(map(_nameless, rank.events))) for rank in ranks]


def _nameless(event: Event) -> Event:
    """Return a shard without its ids, and why they are unknown."""
    if not isinstance(event, Shard) or not event.ids:
        return event
    return replace(event, ids=(), unknown="ranks or steps name samples in different ways")
