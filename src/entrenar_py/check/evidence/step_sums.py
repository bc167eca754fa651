"""Add up what a step's micro-batches gave to the applied gradient. Judges nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.evidence import evidence
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update

Vector = NDArray[np.float64]


def summed(by_rank: Mapping[int, Update], shard: Shard) -> Tensors:
    """Return the tensors of the shard's gradient that its rank's applied gradient holds."""
    update = by_rank.get(shard.rank)
    held = {} if update is None else update.summed
    return {
        name: record
        for name, record in shard.gradient.items()
        if shard.shard in held.get(name, (shard.shard,))
    }


def total(
    by_rank: Mapping[int, Update],
    shards: Collection[Shard],
    vectors: Callable[[Tensors], Mapping[str, NDArray[Any]] | None] = evidence.vectors,
) -> dict[str, Vector] | None:
    """Return the sum, in float64, of what the shards gave to the applied gradient.

    `vectors` says what stands for a tensor: all its elements or their projection, or samples.

    None if a shard with samples has no gradient, if values are unknown, or if sizes differ.
    """
    sums: dict[str, Vector] = {}
    for shard in held(by_rank, shards):
        if not (shard.ids or shard.gradient):
            continue
        values = vectors(summed(by_rank, shard))
        if values is None:
            return None
        for name, value in values.items():
            if name in sums and sums[name].shape != value.shape:
                return None
            sums[name] = sums.get(name, 0) + value.astype(np.float64)
    return sums or None


def cancelled(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> dict[str, float]:
    """Return by tensor how many times its micro-batches' gradients are as large as their sum.

    It is the sum of their norms, over the norm of their sum. Return {} if values are unknown.
    """
    sums, norms = total(by_rank, shards) or {}, defaultdict[str, float](float)
    for shard in held(by_rank, shards):
        for name, record in summed(by_rank, shard).items():
            norms[name] += math.sqrt(record.square() or 0.0)
    sizes = {name: float(np.linalg.norm(vector)) for name, vector in sums.items()}
    return {name: norms[name] / size for name, size in sizes.items() if size}


def held(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[Shard]:
    """Return the shards of which something was applied, or may have been."""
    lost = dropped(by_rank, shards)
    return [
        shard
        for shard in shards
        if not any(shard is one for one in lost)
        and (shard.gradient or not _is_left_out(by_rank, shard))
    ]


def _is_left_out(by_rank: Mapping[int, Update], shard: Shard) -> bool:
    """Return whether no tensor's applied gradient holds the shard, whose gradient is unknown."""
    update = by_rank.get(shard.rank)
    if update is None or update.summed.keys() != update.gradient.keys():
        return False
    return not any(shard.shard in held for held in update.summed.values())


def parts(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[list[Shard]]:
    """Return the shards that a step applied, apart where no tensor's gradient holds two of them.

    Two networks that are trained in turn have losses of their own, which are never added.
    """
    found: list[tuple[set[str], list[Shard]]] = []
    for shard in held(by_rank, shards):
        names, own = {*summed(by_rank, shard)}, [shard]
        near = [part for part in found if not names or not part[0] or names & part[0]]
        for part in near:
            names, own = names | part[0], part[1] + own
            found.remove(part)
        found.append((names, own))
    return [own for _, own in found]


def joined(vectors: Mapping[str, NDArray[Any]], names: Collection[str]) -> Vector:
    """Return the tensors `names` as one vector, in alphabetical order."""
    return np.concatenate([np.asarray(vectors[name], np.float64) for name in sorted(names)])


def are_apart(shards: Collection[Shard]) -> bool:
    """Return whether all shards have samples, and none is in two of them in the same epoch."""
    ids = [(shard.epoch, id_) for shard in shards for id_ in shard.ids]
    return len({*ids}) == len(ids) and all(shard.ids for shard in shards)


def dropped(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[Shard]:
    """Return the shards with a gradient of which nothing was applied: it was cleared before."""
    return [shard for shard in shards if shard.gradient and not summed(by_rank, shard)]


def dropped_otherwise(model: Trace, trace: Trace) -> int | None:
    """Return the first step in which one of two runs drops passes that the other one applies.

    A script may skip a batch by its loss, which is another one on other numbers of workers. One
    that drops passes in most steps does so for another reason.
    """
    due, got = map(_num_dropped, (model, trace))
    if any(2 * sum(map(bool, run.values())) >= len(run) for run in (due, got)):
        return None
    return min((step for step in due.keys() & got.keys() if due[step] != got[step]), default=None)


def _num_dropped(trace: Trace) -> dict[int, int]:
    """Return step -> how many passes the rank with most of them drops."""
    shards = evidence.shards(trace)
    ranks = {
        step: [shard.rank for shard in dropped(by_rank, shards.get(step, ()))]
        for step, by_rank in evidence.ranks_by_step(trace)
    }
    return {step: max(map(lost.count, lost), default=0) for step, lost in ranks.items()}
