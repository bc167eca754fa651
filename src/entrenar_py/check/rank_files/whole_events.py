"""The events of one life of all ranks, each with the tensors of the whole model.

Ranks may hold a model in pieces or in stages, or share micro-batches. A `Layout` says which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from entrenar_py.check.rank_files import whole_tensors
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.check.rank_files.whole_tensors import Ranks
from entrenar_py.shared.trace import Declared, Event, Shard, Start, Update

State = TypeVar("State", Start, Update)
# Fields that may be in pieces.
_IN_PIECES = (
    "weights",
    "optimizer",
    "buffers",
    "local",
    "gradient",
    "edited",
    "extra",
    "unclipped",
)


def layout_of(ranks: Sequence[RankTrace]) -> Layout | None:
    """Return the first layout that a rank declares; None if none does."""
    return next((rank.layout for rank in ranks if rank.layout is not None), None)


def of_life(life: Sequence[RankTrace]) -> list[Event]:
    """Return the events of `life`, the records of one start of all ranks, not ordered by step."""
    events = [event for rank in life for event in rank.events]
    layout = layout_of(life)
    if layout is None:
        return events
    ranks = {rank.rank: rank for rank in life}
    return [
        *_shared(ranks, layout),
        *(_declared(event, layout) for event in events if isinstance(event, Declared)),
        *(event for event in events if not isinstance(event, Declared | Shard | Start | Update)),
        *(_start(r, starts, ranks, layout) for starts in _by_step(life, Start) for r in starts),
        *(_update(r, made, ranks, layout) for made in _by_step(life, Update) for r in made),
    ]


def _declared(declared: Declared, layout: Layout) -> Declared:
    """Return the declaration with the names under which tensors are compared."""
    if declared.frozen is None:
        return declared
    return replace(declared, frozen=tuple(dict.fromkeys(map(layout.first_name, declared.frozen))))


# --- starts and updates -----------------------------------------------------------------------


def _by_step(life: Iterable[RankTrace], kind: type[State]) -> Iterable[dict[int, State]]:
    """Return for each step the events of `kind`, by rank."""
    by_step: dict[int, dict[int, State]] = defaultdict(dict)
    for rank in life:
        for event in rank.events:
            if isinstance(event, kind):
                by_step[event.step][rank.rank] = event
    return by_step.values()


def _start(rank: int, starts: Mapping[int, Start], ranks: Ranks, layout: Layout) -> Start:
    """Return the start of `rank`, with tensors and names of the whole model."""
    names: dict[str, Any] = {
        kind: tuple(
            dict.fromkeys(
                layout.first_name(name)
                for start in _of_replica(rank, starts, layout)
                for name in getattr(start, kind) or ()
            )
        )
        for kind in ("trainable", "frozen", "decayed")
    }
    shapes = {
        layout.first_name(name): shape
        for start in _of_replica(rank, starts, layout)
        for name, shape in start.shapes.items()
    }
    return replace(starts[rank], **_tensors(rank, starts, ranks, layout), **names, shapes=shapes)


def _update(rank: int, updates: Mapping[int, Update], ranks: Ranks, layout: Layout) -> Update:
    """Return the update of `rank`, with tensors, rates and norms of the whole model."""
    own = updates[rank]
    parts = _tensors(rank, updates, ranks, layout)
    rates = {
        layout.first_name(name): update.rate_of(name)
        for update in _of_replica(rank, updates, layout)
        for name in update.weights
    }
    parts["rates"] = {name: rate for name, rate in rates.items() if rate != own.learning_rate}
    parts["kept"] = {layout.first_name(name): first for name, first in own.kept.items()}
    # Micro-batches are joined, or shared with other ranks.
    parts["summed"] = {name: () for name in layout.owned if name in parts["gradient"]}
    if own.grad_norm is not None:
        parts |= _norms([own, *updates.values()], whole_tensors.norm(parts["gradient"]))
    return replace(own, **parts)


def _of_replica(rank: int, by_rank: Mapping[int, State], layout: Layout) -> list[State]:
    """Return the events of the ranks that together with `rank` hold one copy of the model."""
    replica = layout.replica(rank)
    return [event for other, event in sorted(by_rank.items()) if layout.replica(other) == replica]


def _tensors(
    rank: int, by_rank: Mapping[int, State], ranks: Ranks, layout: Layout
) -> dict[str, Any]:
    """Return the tensor fields of `rank`'s event, filled with the whole model's tensors."""
    return {
        part: whole_tensors.seen_by(
            rank, {other: getattr(event, part) for other, event in by_rank.items()}, ranks, layout
        )
        for part in _IN_PIECES
        if hasattr(by_rank[rank], part)
    }


def _norms(updates: Sequence[Update], norm: float | None) -> dict[str, float | None]:
    """Return the norms of a whole gradient: `norm`, and that norm scaled as a rank clipped it."""
    kept = [
        update.applied_norm / update.grad_norm
        for update in updates
        if update.grad_norm and update.applied_norm is not None
    ]
    return {"grad_norm": norm, "applied_norm": norm * kept[0] if norm and kept else norm}


# --- micro-batches ----------------------------------------------------------------------------


def _shared(ranks: Ranks, layout: Layout) -> list[Event]:
    """Return one Shard for each micro-batch of ranks that draw the same samples.

    If a rank drew other samples than the first of these ranks, it has a Shard of its own, too.
    """
    parts: dict[Any, dict[int, Shard]] = defaultdict(dict)
    for rank in sorted(ranks):
        for shard in _micro_batches(ranks[rank], layout):
            parts[layout.data(rank), shard.step, shard.shard][rank] = shard
    return [shard for place in sorted(parts) for shard in _merged(parts[place], ranks, layout)]


def _micro_batches(rank: RankTrace, layout: Layout) -> list[Shard]:
    shards = [event for event in rank.events if isinstance(event, Shard)]
    if "pp" not in layout.axes:  # one worker has all stages of a pipeline
        return shards
    # A pipeline's schedule splits a batch further, unknown to samplers: a step is one micro-batch.
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_step[shard.step].append(shard)
    return [_joined(of_step) for of_step in by_step.values()]


def _joined(shards: Sequence[Shard]) -> Shard:
    """Return one Shard for all micro-batches that a rank computed in a step."""
    losses = [shard for shard in shards if shard.loss_sum is not None]
    return replace(
        shards[0],
        shard=0,
        ids=tuple(id_ for shard in shards for id_ in shard.ids),
        loss_sum=sum(shard.loss_sum or 0.0 for shard in losses) if losses else None,
        slope=None,
        terms=(),
        weight=sum(shard.weight for shard in losses or shards),
        finite=all(shard.finite for shard in shards),
        draws=_draws(shards),
        contents=shards[0].contents if len(shards) == 1 else (),
        gradient=whole_tensors.total(shard.gradient for shard in shards),
    )


def _merged(parts: Mapping[int, Shard], ranks: Ranks, layout: Layout) -> list[Shard]:
    """Return the Shard of a micro-batch, and one of each rank that drew other samples for it."""
    group = sorted(parts)
    drew = [rank for rank in group if parts[rank].ids] or group
    first = parts[drew[0]]
    others = [parts[rank] for rank in drew if parts[rank].ids != first.ids]
    with_loss = next((shard for shard in parts.values() if shard.loss_sum is not None), first)
    culprits = [rank for rank in group if not parts[rank].finite]
    gradients = {rank: shard.gradient for rank, shard in parts.items()}
    merged = replace(
        first,
        rank=(culprits or group)[0],
        loss_sum=with_loss.loss_sum,
        slope=with_loss.slope,
        terms=with_loss.terms,
        weight=with_loss.weight,
        finite=not culprits,
        draws=_draws(parts.values()),
        gradient={} if others else whole_tensors.gradient(group, gradients, ranks, layout),
    )
    return [merged, *(replace(shard, gradient={}) for shard in others)]


def _draws(shards: Iterable[Shard]) -> str | None:
    return next((shard.draws for shard in shards if shard.draws is not None), None)
