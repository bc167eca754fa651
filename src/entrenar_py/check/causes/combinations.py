"""Test whether a gradient is a combination of the gradients of micro-batches. Judges nothing.

Whatever a script does wrong in adding them up, each of its tensors is then some combination of the
micro-batches'. Samples that act on each other, other masks, and noise leave none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, step_sums
from entrenar_py.check.evidence.step_sums import Vector, Vectors
from entrenar_py.shared.trace import Shard

# Elements of a tensor, a micro-batch, that no combination meets by chance.
_LARGE = 4


def is_met(goal: Vectors, shards: Sequence[Shard], bound: float) -> bool | None:
    """Return whether each tensor of `goal` is a combination of the shards'; None if unknown.

    The same combination is tried for all tensors, and that of each large one: a bug may concern
    some tensors only, by a factor. Tensors that a shard lacks are left out. `bound` is the relative
    L2 distance that is allowed.
    """
    terms = _terms(goal, shards)
    if terms is None:
        return None
    sides = [_together(goal, terms)]
    sides += [(terms[n], goal[n]) for n in terms if goal[n].size >= _LARGE * len(shards)]
    shares_of = [np.linalg.lstsq(*side, rcond=None)[0].astype(np.float64) for side in sides]
    return all(any(_fits(goal, terms, n, one, bound) for one in shares_of) for n in terms)


def shares(goal: Vectors, shards: Sequence[Shard], bound: float) -> Vector | None:
    """Return the shares of the shards in the one combination that all tensors of `goal` are.

    None if there is none, if it is unknown, or if so few elements are one by chance.
    """
    terms = _terms(goal, shards)
    if terms is None or terms.keys() != goal.keys():
        return None
    together, whole = _together(goal, terms)
    if whole.size < _LARGE * len(shards):
        return None
    solved, _, rank, _ = np.linalg.lstsq(together, whole, rcond=None)
    found = solved.astype(np.float64)
    fits = rank == len(shards) and all(_fits(goal, terms, n, found, bound) for n in terms)
    return found if fits else None


def _terms(goal: Vectors, shards: Sequence[Shard]) -> dict[str, Vector] | None:
    """Return by tensor what the shards gave: [size, num_shards]; None if unknown or not finite."""
    given = [evidence.vectors(shard.gradient) for shard in shards]
    known = [vectors for vectors in given if vectors]
    if not known or len(known) < len(given):
        return None
    names = set(goal).intersection(*known)
    if not names or any(v[name].shape != goal[name].shape for name in names for v in known):
        return None
    terms = {name: np.stack([vectors[name] for vectors in known], axis=1) for name in names}
    is_finite = all(np.isfinite(goal[n]).all() and np.isfinite(t).all() for n, t in terms.items())
    return terms if is_finite else None


def _together(goal: Vectors, terms: Mapping[str, Vector]) -> tuple[Vector, Vector]:
    names = sorted(terms)
    return np.concatenate([terms[n] for n in names]), step_sums.joined(goal, names)


def _fits(
    goal: Vectors, terms: Mapping[str, Vector], name: str, chosen: Vector, bound: float
) -> bool:
    """Return whether a tensor is the combination by the shares `chosen`, within rounding."""
    whole = math.sqrt(sum(float(np.square(goal[n], dtype=np.float64).sum()) for n in terms))
    parts = (goal[name], *(terms[name] * chosen).T)
    size = max(whole / closeness.NOISE_SHARE, *(float(np.linalg.norm(part)) for part in parts))
    return float(np.linalg.norm(terms[name] @ chosen - goal[name])) <= bound * size
