"""The samples that an epoch of a user's trainer should have, as far as its ranks' files show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Selection


def of(ranks: Sequence[RankTrace], events: Iterable[Event]) -> Collection[int] | None:
    """Return the numbers of the samples; None if no loader showed how many there are.

    If ranks select different samples, these are the samples that any rank selects. If the samples
    vary from pass to pass, nothing is known of them.
    """
    if vary(ranks):
        return None
    num_samples = ranks[0].header.get("num_samples") if ranks else None
    chosen = {event.rank: event.ids for event in events if isinstance(event, Selection)}
    if not chosen or len(chosen) < len({rank.rank for rank in ranks}):
        return range(num_samples) if num_samples else None
    return {id_ for ids in chosen.values() for id_ in ids}


def vary(ranks: Sequence[RankTrace]) -> bool:
    """Return whether the script trains from several data sets, or from other parts of one."""
    return any(rank.header.get("varied") for rank in ranks)


def is_known(ranks: Sequence[RankTrace], samples: Collection[int] | None) -> bool:
    """Return whether each epoch should have all `samples`: no sampler of the script's decides."""
    return samples is not None and all(rank.header.get("thorough", True) for rank in ranks)
