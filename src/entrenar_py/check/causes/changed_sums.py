"""Find tensors whose applied gradient is no sum of the micro-batches', where the others are.

Two right runs may differ by what rounding makes of them, and a gradient that is wrong by less is
lost in that. But whatever rounding made of a run's micro-batches, its gradient is their sum. What a
tensor has beyond that sum, and lacks in the other run, came with the reduction or after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import reduction_format
from entrenar_py.check.evidence import closeness, precision, step_sums
from entrenar_py.check.evidence.step_sums import Vector, Vectors
from entrenar_py.shared.trace import Shard, Trace, Update

# A change counts if it is so many times that of most tensors: where sums are rounded, all change.
_OUTLYING = 8.0
_ROUNDS = 10  # of a fit, in each of which tensors count the less the further they are off
_ROUNDED = 2.0**-20  # a relative distance below which tensors count alike
# The largest standard error of the share of a change that is found in the difference of two runs.
_ERROR_MAX = 0.1
# The most numbers of a tensor that count as independent, and the fewest that tell anything.
_INDEPENDENT, _TELLING_MIN = 32, 4


class Change(NamedTuple):
    """A part of a tensor's gradient that no micro-batch gave, and what the gradient is without it.

    `relative` is its norm as a share of the gradient's.
    """

    right: Vector
    change: Vector
    relative: float


def of(trace: Trace, update: Update, model: Update, bound: float) -> dict[str, Change]:
    """Return the tensors whose gradient in `update` has a part that no micro-batch gave.

    `model` is the update of the other run. A part counts if it is larger than `bound`, relative to
    the tensor's norm, and if the two runs differ by it. Each micro-batch may count by any share
    that is the same for all tensors.
    """
    applied, other = evidence.vectors(update.gradient), evidence.vectors(model.gradient)
    bound = allowed(update, bound)
    if not applied or not other or trace.traits.compressed:
        return {}
    by_rank = evidence.updates(trace)[update.step]
    shards = evidence.shards(trace).get(update.step, [])
    terms = _terms(by_rank, shards, applied)
    if terms is None:
        return {}
    is_coarse = precision.unit(trace) > precision.FLOAT32
    if is_coarse and reduction_format.of_step(shards, by_rank, bound):
        return {}
    changes = _changes(applied, terms)
    usual = median_low([change.relative for change in changes.values()] or [math.inf])
    near = max(bound, _OUTLYING * usual)
    return {
        name: change
        for name, change in changes.items()
        if change.relative > near
        and _is_in(change.change, applied[name], other.get(name))
        and not (is_coarse and precision.may_be_coarse(update.gradient[name]))
    }


def allowed(update: Update, bound: float) -> float:
    """Return `bound` for the tensors of `update`, of which there may be projections."""
    is_sketched = any(record.sketch for record in update.gradient.values())
    return closeness.PROJECTED * bound if is_sketched else bound


def _terms(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], applied: Vectors
) -> Vectors | None:
    """Return by tensor what each micro-batch gave: float64 [size, num_micro_batches].

    None if that is unknown, or if a tensor has another size.
    """
    given = []
    for shard in step_sums.held(by_rank, shards):
        values = evidence.vectors(step_sums.summed(by_rank, shard))
        if values is None:
            return None
        shapes = {name: vector.shape for name, vector in values.items() if name in applied}
        if any(applied[name].shape != shape for name, shape in shapes.items()):
            return None
        given.append(values)
    return {
        name: np.stack([v.get(name, np.zeros(vector.shape)) for v in given], axis=1, dtype=float)
        for name, vector in applied.items()
        if given
    } or None


def _changes(applied: Vectors, terms: Vectors) -> dict[str, Change]:
    """Return by tensor what is not the combination of `terms` that fits most tensors.

    Its sum of the tensors' relative distances is the least, so a few changed tensors don't move it.
    A tensor's norm is taken to be at least 1 / NOISE_SHARE of the norm of all, and of its terms.
    """
    whole = math.sqrt(sum(_norm(vector) ** 2 for vector in applied.values()))
    sizes = {
        name: max(_norm(vector), max(whole, _norm(terms[name])) / closeness.NOISE_SHARE) or 1.0
        for name, vector in applied.items()
    }
    parts = {name: terms[name] / size for name, size in sizes.items()}
    goals = {name: applied[name].astype(np.float64) / size for name, size in sizes.items()}
    products = np.stack([part.T @ part for part in parts.values()])
    sides = np.stack([part.T @ goals[name] for name, part in parts.items()])
    if not (np.isfinite(products).all() and np.isfinite(sides).all()):
        return {}
    weights = np.ones(len(sizes))
    for _ in range(_ROUNDS):
        system = np.tensordot(weights, products, 1), weights @ sides
        shares = np.linalg.lstsq(*system, rcond=1e-12)[0]
        off = [_norm(goals[name] - part @ shares) for name, part in parts.items()]
        weights = 1 / np.maximum(off, _ROUNDED)
    return {
        name: Change(
            size * (parts[name] @ shares), size * (goals[name] - parts[name] @ shares), gap
        )
        for (name, size), gap in zip(sizes.items(), off, strict=True)
    }


def _is_in(change: Vector, applied: Vector, other: Vector | None) -> bool:
    """Return whether the gradients of two runs differ by a change, and by no more that matters."""
    if other is None or other.shape != change.shape or change.size < _TELLING_MIN:
        return False
    difference = applied - other.astype(np.float64)
    share = float(difference @ change) / float(change @ change)
    rest = _norm(difference - share * change)
    error = rest / _norm(change) / math.sqrt(min(change.size, _INDEPENDENT))
    return abs(share - 1) < 0.5 and error <= _ERROR_MAX


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector))
