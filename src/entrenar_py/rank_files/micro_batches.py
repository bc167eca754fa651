"""Micro-batches that several ranks share: one Shard each, whoever computed what of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from entrenar_py.rank_files import whole_tensors
from entrenar_py.rank_files.layout import Layout
from entrenar_py.rank_files.whole_tensors import Ranks
from entrenar_py.trace import Shard


def shared(shards: Mapping[int, Sequence[Shard]], ranks: Ranks, arranged: Layout) -> list[Shard]:
    """One Shard for each micro-batch of each group of ranks that draw the same samples.

    Who drew others than the first of its group has a Shard of its own beside the group's.
    """
    found = []
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(shards):
        groups[arranged.data(rank)].append(rank)
    for group in groups.values():
        for parts in _by_micro_batch({rank: shards[rank] for rank in group}, arranged):
            found += _one(parts, ranks, arranged)
    return found


def _by_micro_batch(
    shards: Mapping[int, Sequence[Shard]], arranged: Layout
) -> Iterable[dict[int, Shard]]:
    """Rank -> what it computed of a micro-batch, one after the other."""
    found: dict[tuple[int, int], dict[int, Shard]] = defaultdict(dict)
    for rank, own in shards.items():
        steps: dict[int, list[Shard]] = defaultdict(list)
        for shard in own:
            steps[shard.step].append(shard)
        for step, of_step in steps.items():
            # A pipeline's schedule cuts a batch further, as no sampler knows: a step is one.
            for one in [_joined(of_step)] if arranged.has(["pp"]) else of_step:
                found[step, one.shard][rank] = one
    return (found[place] for place in sorted(found))


def _joined(shards: Sequence[Shard]) -> Shard:
    """All that a rank computed in a step."""
    losses = [one for one in shards if one.loss_sum is not None]
    drawn = [one.draws for one in shards if one.draws is not None]
    return replace(
        shards[0],
        shard=0,
        ids=tuple(i for one in shards for i in one.ids),
        loss_sum=sum(one.loss_sum or 0.0 for one in losses) if losses else None,
        weight=sum(one.weight for one in losses or shards),
        finite=all(one.finite for one in shards),
        draws=drawn[0] if drawn else None,
        gradient=whole_tensors.total(one.gradient for one in shards),
    )


def _one(parts: Mapping[int, Shard], ranks: Ranks, arranged: Layout) -> list[Shard]:
    group = sorted(parts)
    drew = [rank for rank in group if parts[rank].ids] or group
    model = parts[drew[0]]
    others = [parts[rank] for rank in drew if parts[rank].ids != model.ids]
    losses = [one for one in parts.values() if one.loss_sum is not None]
    culprits = [rank for rank in group if not parts[rank].finite]
    drawn = [one.draws for one in parts.values() if one.draws is not None]
    whole = replace(
        model,
        rank=(culprits or group)[0],
        loss_sum=losses[0].loss_sum if losses else None,
        weight=(losses or [model])[0].weight,
        finite=not culprits,
        draws=drawn[0] if drawn else None,
        gradient={}
        if others
        else whole_tensors.gradient(
            group, {rank: one.gradient for rank, one in parts.items()}, ranks, arranged
        ),
    )
    return [whole, *(replace(one, gradient={}) for one in others)]
