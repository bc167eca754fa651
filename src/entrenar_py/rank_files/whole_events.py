"""The events of one life of all ranks, each with the tensors of the whole model.

Ranks may hold a model in pieces, in stages, or share micro-batches: a `Layout` says how.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.rank_files import micro_batches, whole_tensors
from entrenar_py.rank_files.layout import Layout
from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Event, Shard, Start, Update

# Fields of an event that ranks hold in pieces.
_PARTS = {
    Start: ("weights", "optimizer", "buffers"),
    Update: ("weights", "optimizer", "buffers", "gradient"),
}


def layout_of(ranks: Sequence[RankTrace]) -> Layout | None:
    """Return the layout that any rank declares; None where none does."""
    return next((rank.layout for rank in ranks if rank.layout is not None), None)


def of_life(life: Sequence[RankTrace]) -> list[Event]:
    """Return the events of one life of all ranks, in no order of steps."""
    layout = layout_of(life)
    if layout is None:
        return [event for rank in life for event in rank.events]
    ranks = {rank.rank: rank for rank in life}
    shards: dict[int, list[Shard]] = {rank: [] for rank in ranks}
    by_step: dict[tuple[type[Event], int], dict[int, Start | Update]] = defaultdict(dict)
    others: list[Event] = []
    for rank in life:
        for event in rank.events:
            if isinstance(event, Shard):
                shards[rank.rank].append(event)
            elif isinstance(event, Start | Update):
                by_step[type(event), event.step][rank.rank] = event
            else:
                others.append(event)
    whole: list[Event] = [
        _whole(rank, by_rank, ranks, layout) for by_rank in by_step.values() for rank in by_rank
    ]
    return [*micro_batches.shared(shards, ranks, layout), *others, *whole]


def _whole(
    rank: int, by_rank: Mapping[int, Start | Update], ranks: whole_tensors.Ranks, layout: Layout
) -> Start | Update:
    """Return what `rank` recorded, with the tensors of the whole model."""
    own = by_rank[rank]
    parts: dict[str, Any] = {
        part: whole_tensors.seen_by(
            rank, {other: getattr(event, part) for other, event in by_rank.items()}, ranks, layout
        )
        for part in _PARTS[type(own)]
    }
    replica = layout.replica(rank)
    beside = [event for other, event in sorted(by_rank.items()) if layout.replica(other) == replica]
    if isinstance(own, Start):
        starts = [event for event in beside if isinstance(event, Start)]
        return replace(own, **(parts | _names(starts, layout)))
    updates = [event for event in beside if isinstance(event, Update)]
    rates = {layout.first_name(n): event.rate_of(n) for event in updates for n in event.weights}
    parts["rates"] = {n: rate for n, rate in rates.items() if rate != own.learning_rate}
    if own.grad_norm is not None:
        others = [event for event in by_rank.values() if isinstance(event, Update)]
        parts |= _norms([own, *others], whole_tensors.norm(parts["gradient"]))
    return replace(own, **parts)


def _names(starts: Sequence[Start], layout: Layout) -> dict[str, Any]:
    """Return the names that any of the ranks of one replica trains, freezes and decays."""
    return {
        kind: tuple(
            dict.fromkeys(
                layout.first_name(name) for start in starts for name in getattr(start, kind) or ()
            )
        )
        for kind in ("trainable", "frozen", "decayed")
    }


def _norms(updates: Sequence[Update], norm: float | None) -> dict[str, float | None]:
    """Return the norms of a whole gradient: `norm`, and what clipping left of it on a rank."""
    kept = [
        update.applied_norm / update.grad_norm
        for update in updates
        if update.grad_norm and update.applied_norm is not None
    ]
    return {"grad_norm": norm, "applied_norm": norm * kept[0] if norm and kept else norm}
