"""Micro-batches that several ranks share: one Shard each, whichever rank computed what of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from entrenar_py.rank_files import whole_tensors
from entrenar_py.rank_files.layout import Layout
from entrenar_py.rank_files.whole_tensors import Ranks
from entrenar_py.trace import Shard


def shared(shards: Mapping[int, Sequence[Shard]], ranks: Ranks, layout: Layout) -> list[Shard]:
    """Return one Shard for each micro-batch of each group of ranks that draw the same samples.

    `shards` are what each rank recorded. A rank that drew other samples than the first of its
    group has a Shard of its own next to the group's.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(shards):
        groups[layout.data(rank)].append(rank)
    return [
        shard
        for group in groups.values()
        for parts in _by_micro_batch({rank: shards[rank] for rank in group}, layout)
        for shard in _merged(parts, ranks, layout)
    ]


def _by_micro_batch(
    shards: Mapping[int, Sequence[Shard]], layout: Layout
) -> Iterable[dict[int, Shard]]:
    """Return for each micro-batch, in order, what each rank computed of it."""
    parts: dict[tuple[int, int], dict[int, Shard]] = defaultdict(dict)
    for rank, own in shards.items():
        steps: dict[int, list[Shard]] = defaultdict(list)
        for shard in own:
            steps[shard.step].append(shard)
        for step, of_step in steps.items():
            # A pipeline's schedule cuts a batch further, as no sampler knows: a step is one.
            for shard in [_joined(of_step)] if layout.has(["pp"]) else of_step:
                parts[step, shard.shard][rank] = shard
    return (parts[place] for place in sorted(parts))


def _joined(shards: Sequence[Shard]) -> Shard:
    """Return all that a rank computed in a step as one micro-batch."""
    losses = [shard for shard in shards if shard.loss_sum is not None]
    draws = [shard.draws for shard in shards if shard.draws is not None]
    return replace(
        shards[0],
        shard=0,
        ids=tuple(id_ for shard in shards for id_ in shard.ids),
        loss_sum=sum(shard.loss_sum or 0.0 for shard in losses) if losses else None,
        weight=sum(shard.weight for shard in losses or shards),
        finite=all(shard.finite for shard in shards),
        draws=draws[0] if draws else None,
        gradient=whole_tensors.total(shard.gradient for shard in shards),
    )


def _merged(parts: Mapping[int, Shard], ranks: Ranks, layout: Layout) -> list[Shard]:
    """Return the Shard of a micro-batch, and one of each rank that drew other samples for it."""
    group = sorted(parts)
    drew = [rank for rank in group if parts[rank].ids] or group
    first = parts[drew[0]]
    others = [parts[rank] for rank in drew if parts[rank].ids != first.ids]
    losses = [shard for shard in parts.values() if shard.loss_sum is not None]
    culprits = [rank for rank in group if not parts[rank].finite]
    draws = [shard.draws for shard in parts.values() if shard.draws is not None]
    gradients = {rank: shard.gradient for rank, shard in parts.items()}
    merged = replace(
        first,
        rank=(culprits or group)[0],
        loss_sum=losses[0].loss_sum if losses else None,
        weight=(losses or [first])[0].weight,
        finite=not culprits,
        draws=draws[0] if draws else None,
        gradient={} if others else whole_tensors.gradient(group, gradients, ranks, layout),
    )
    return [merged, *(replace(shard, gradient={}) for shard in others)]
