"""Add up the gradients of a step's micro-batches, and compare the sum with the applied gradient.

In any correct trainer, the gradient that an optimizer applies is a sum over the step's
micro-batches on all ranks, divided by one number. Here the sum is computed in float64, from the
local gradients that were recorded with each micro-batch. The number is estimated from the tensors
themselves (`divisor`, a weighted median), since scripts divide by workers, samples, tokens or
nothing. So a tensor that was added up differently from the others stands out, whatever the script
divides by.

A micro-batch is added to a tensor's sum only if the applied gradient contains it (`Update.summed`):
a script may clear gradients between two passes, train two networks in turn, or drop a batch because
of its loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, factors
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update

Vector = NDArray[np.float64]


def summed(by_rank: Mapping[int, Update], shard: Shard) -> Tensors:
    """Return the tensors of the shard's gradient that are part of its rank's applied gradient."""
    update = by_rank.get(shard.rank)
    batches_of = {} if update is None else update.summed
    return {
        name: record
        for name, record in shard.gradient.items()
        if shard.shard in batches_of.get(name, (shard.shard,))
    }


def total(
    by_rank: Mapping[int, Update],
    shards: Collection[Shard],
    vectors: Callable[[Tensors], Mapping[str, NDArray[Any]] | None] = evidence.vectors,
) -> dict[str, Vector] | None:
    """Return tensor -> the sum, in float64, of what the shards contribute to the applied gradient.

    `vectors` returns what represents each tensor: all its elements, their projection, or a sample
    of them. The result is None if a shard with samples has no gradient, if values are unknown, or
    if sizes differ.
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
    """Return tensor -> (sum of the gradients' norms) / (norm of their sum).

    The ratio says how much larger the gradients of micro-batches are than their sum. The result is
    Return {} if values are unknown.
    """
    sums, norms = total(by_rank, shards) or {}, defaultdict[str, float](float)
    for shard in held(by_rank, shards):
        for name, record in summed(by_rank, shard).items():
            norms[name] += math.sqrt(record.square() or 0.0)
    sizes = {name: float(np.linalg.norm(vector)) for name, vector in sums.items()}
    return {name: norms[name] / size for name, size in sizes.items() if size}


def held(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[Shard]:
    """Return the shards that were applied, or may have been."""
    lost = dropped(by_rank, shards)
    return [
        shard
        for shard in shards
        if not any(shard is one for one in lost)
        and (shard.gradient or not _is_left_out(by_rank, shard))
    ]


def _is_left_out(by_rank: Mapping[int, Update], shard: Shard) -> bool:
    update = by_rank.get(shard.rank)
    if update is None or update.summed.keys() != update.gradient.keys():
        return False
    return not any(shard.shard in held for held in update.summed.values())


def parts(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[list[Shard]]:
    """Return the shards that a step applied in groups, such that no tensor is in two groups.

    For example, two networks that are trained in turn have separate losses, which are never added.
    """
    groups: list[tuple[set[str], list[Shard]]] = []
    for shard in held(by_rank, shards):
        names, own = {*summed(by_rank, shard)}, [shard]
        near = [part for part in groups if not names or not part[0] or names & part[0]]
        for part in near:
            names, own = names | part[0], part[1] + own
            groups.remove(part)
        groups.append((names, own))
    return [own for _, own in groups]


def joined(vectors: Mapping[str, NDArray[Any]], names: Collection[str]) -> Vector:
    """Return the vectors called `names` as one vector, joined in alphabetical order."""
    return np.concatenate([np.asarray(vectors[name], np.float64) for name in sorted(names)])


def are_apart(shards: Collection[Shard]) -> bool:
    """Return whether all shards have samples, and no sample is in two shards in the same epoch."""
    ids = [(shard.epoch, id_) for shard in shards for id_ in shard.ids]
    return len({*ids}) == len(ids) and all(shard.ids for shard in shards)


def dropped(by_rank: Mapping[int, Update], shards: Collection[Shard]) -> list[Shard]:
    """Return the shards with a gradient that was cleared before it was applied."""
    return [shard for shard in shards if shard.gradient and not summed(by_rank, shard)]


def dropped_otherwise(model: Trace, trace: Trace) -> int | None:
    """Return the first step in which one of two runs drops passes that the other run applies.

    A script may skip a batch because of its loss, which depends on the number of workers. If a run
    drops passes in at least half of its steps, the reason is a different one, and the result is
    None. It is also None if no step differs.
    """
    due, got = map(_num_dropped, (model, trace))
    if any(2 * sum(map(bool, run.values())) >= len(run) for run in (due, got)):
        return None
    return min((step for step in due.keys() & got.keys() if due[step] != got[step]), default=None)


def _num_dropped(trace: Trace) -> dict[int, int]:
    shards = evidence.shards(trace)
    ranks = {
        step: [shard.rank for shard in dropped(by_rank, shards.get(step, ()))]
        for step, by_rank in evidence.ranks_by_step(trace)
    }
    return {step: max(map(lost.count, lost), default=0) for step, lost in ranks.items()}


# --- a sum and the applied gradient ---------------------------------------------------------------


_TELLING_MIN = 3  # elements: shorter vectors can be multiples of each other by chance
Vectors = Mapping[str, np.ndarray[Any, Any]]


def off(sums: Vectors, mean: Vectors, divisor: float, allowed: float) -> set[str]:
    """Return the tensors with a sum further than `allowed` from `divisor` times the mean."""
    gaps = {
        name: np.square(sums[name] - divisor * value.astype(np.float64)).sum()
        for name, value in mean.items()
    }
    return {name for name, gap in gaps.items() if not math.sqrt(gap) <= allowed}


def is_divided(sums: Vectors, mean: Vectors, bound: float) -> bool:
    """Return whether all sums were divided by the same number to give the mean.

    `bound` is the allowed distance, relative to the norm of all means together.
    """
    if shapes(sums) != shapes(mean):
        return False
    number, size = divisor(sums, mean), float(np.linalg.norm(joined(mean, mean)))
    if number is None or not math.isfinite(size):
        return False
    return not off(sums, mean, number, bound * abs(number) * size)


def divisor(sums: Vectors, mean: Vectors) -> float | None:
    """Return the number by which the sums of most tensors were divided; None if unknown.

    A tensor's divisor is the coefficient of its sum's projection on its mean. The result is the
    median of the divisors, weighted by the squared norms of the sums. Small tensors are left out.
    So a tensor with a different divisor does not change the result.
    """
    divisors = []
    sizes = {name: float(np.square(value).sum()) for name, value in sums.items()}
    small = sum(sizes.values()) / closeness.NOISE_SHARE**2
    for name, value in mean.items():
        wide = value.astype(np.float64)
        norm = float(np.dot(wide, wide))
        number = float(np.dot(sums[name], wide)) / norm if norm else math.nan
        if sizes[name] >= small and math.isfinite(number):
            divisors.append((number, sizes[name]))
    left = sum(size for _, size in divisors) / 2
    for number, size in sorted(divisors):
        left -= size
        if left <= 0:
            return number
    return None


def divisors(sums: Vectors, mean: Vectors, bound: float) -> list[float]:
    """Return the different numbers by which sums of tensors were divided, within `bound`.

    The divisor of most tensors comes first. Tensors with fewer than three non-zero elements are
    ignored.
    """
    counts: dict[float, int] = {}
    for name, value in mean.items():
        number = factors.ratio(value, sums[name], bound)
        if number is None or number <= 0 or np.count_nonzero(value) < _TELLING_MIN:
            continue
        known = next((one for one in counts if abs(one - number) <= 2 * bound * one), number)
        counts[known] = counts.get(known, 0) + 1
    return sorted(counts, key=counts.__getitem__, reverse=True)


def ratio(expected: Tensors, got: Tensors, bound: float) -> float | None:
    """Return the factor c with got = c * expected within `bound`, over all tensors together.

    None if there is no such number, if values are unknown, or if names or shapes differ.
    """
    left, right = evidence.vectors(expected), evidence.vectors(got)
    if left is None or right is None or shapes(left) != shapes(right):
        return None
    return factors.ratio(joined(left, left), joined(right, right), bound)


def shapes(tensors: Vectors) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}
