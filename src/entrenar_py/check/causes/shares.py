"""Explain a wrong gradient by how much each micro-batch counts in it. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, factors, step_sums
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update
from entrenar_py.shared.wording import listed

# Gradients of more micro-batches than this are added up by rank.
_APART_MAX = 8
# Shares closer than this are alike: counts of samples or tokens differ by more.
_ALIKE = 0.02
# After many steps two right runs have other weights, and no gradient of one is quite a sum of the
# other's. What that leaves unexplained is this many times smaller than the error of wrong shares.
_TELLING = 10.0
# A later gradient must be so many times further off (absolute, L2) than any before it. Rounding
# differences grow with the trajectory, and wrong shares come at once.
_JUMP = 10.0
_EXPLAINED = 1e-3  # relative, L2: the most that may be left
_DIRECTIONS = 2  # elements for each micro-batch, so that no gradient is a sum of theirs by chance


def explain(trace: Trace, update: Update, due: Tensors, bound: float) -> str:
    """Return how much the step's micro-batches would have to count to give `due`; "" if unknown.

    `due` is the right gradient. It is explained if it is a sum of the micro-batches' gradients with
    other shares than in the applied one, within `bound` (relative, L2).
    """
    by_rank = evidence.updates(trace).get(update.step, {})
    fit = _fit(by_rank, evidence.shards(trace).get(update.step, ()), update, due, bound)
    return "" if fit is None else fit.words


def explain_later(
    by_rank: Mapping[int, Update],
    shards: Sequence[Shard],
    update: Update,
    due: Tensors,
    bound: float,
    floor: float,
) -> str:
    """Return what `explain` does, unless slightly different weights may explain the difference.

    `by_rank` and `shards` are the step's.

    Two right runs have slightly other weights after many steps. That moves a gradient out of the
    sums of others, and hardly within them, unless each sample has a direction of its own. So the
    applied gradient must also be further off than `bound` (relative, L2), and than `floor`
    (absolute): the gradient of a model that has learned its data is only rounding.
    """
    fit = _fit(by_rank, shards, update, due, _EXPLAINED)
    if fit is None or fit.off * fit.size <= floor:
        return ""
    is_sure = fit.off > max(bound, _TELLING * max(fit.unexplained, _EXPLAINED))
    return fit.words if is_sure else ""


@dataclass(frozen=True)
class LaterSteps:
    """Explains later gradients of `trace`, as `explain_later` does, by those of `model`."""

    model: Trace
    trace: Trace

    def explain(self, update: Update, bound: float, floor: float) -> str:
        """Return how much the micro-batches of the update's step would have to count.

        Return "" if that is unknown, or if the runs may have come apart by rounding alone.
        """
        step, due = update.step, evidence.any_rank(self._due[update.step]).gradient
        words = explain_later(
            self._made[step], self._shards.get(step, ()), update, due, bound, floor
        )
        return words if words and self._comes_at_once(step) else ""

    def _comes_at_once(self, step: int) -> bool:
        """Return whether the gradient is off by _JUMP times what it was in any step before."""
        earlier = (made for made in self._due.keys() & self._made.keys() if made < step)
        return self._apart(step) > _JUMP * max(
            (self._apart(made) for made in earlier), default=math.inf
        )

    def _apart(self, step: int) -> float:
        """Return the L2 distance of the two runs' gradients; 0.0 if it is unknown."""
        due, got = (evidence.any_rank(ranks[step]).gradient for ranks in (self._due, self._made))
        gaps = closeness.distances(due, got) or {}
        return math.hypot(*(gap.distance for gap in gaps.values()))

    @cached_property
    def _due(self) -> Mapping[int, Mapping[int, Update]]:
        return evidence.updates(self.model)

    @cached_property
    def _made(self) -> Mapping[int, Mapping[int, Update]]:
        return evidence.updates(self.trace)

    @cached_property
    def _shards(self) -> Mapping[int, Sequence[Shard]]:
        return evidence.shards(self.trace)


class _Fit(NamedTuple):
    """A gradient as a sum of micro-batches', with other shares than in the applied one.

    `unexplained` is the distance of the two, and `off` that of the nearest multiple of the applied
    gradient, both relative to the gradient's norm, its `size`.
    """

    words: str
    unexplained: float
    off: float
    size: float


def _fit(
    by_rank: Mapping[int, Update],
    shards: Sequence[Shard],
    update: Update,
    due: Tensors,
    bound: float,
) -> _Fit | None:
    held = step_sums.held(by_rank, shards)
    right, applied = evidence.vectors(due), evidence.vectors(update.gradient)
    parts = {key: _sum(by_rank, part, right) for key, part in _parts(held).items()}
    if right is None or applied is None or right.keys() != applied.keys() or len(parts) < 2:
        return None
    terms = [term for term in parts.values() if term is not None]
    if len(terms) < len(parts):
        return None
    goal, got = (step_sums.joined(vectors, right) for vectors in (right, applied))
    now = factors.ratio(np.sum(terms, axis=0), got, bound)
    if not now or not np.isfinite(goal).all():
        return None
    due_shares, _, rank, _ = np.linalg.lstsq(np.stack(terms, axis=1), goal)
    size = float(np.linalg.norm(goal))
    gap = float(np.linalg.norm(np.stack(terms, axis=1) @ due_shares - goal))
    if rank < len(terms) or gap > bound * size:
        return None
    times = due_shares / now
    if np.ptp(times) <= _ALIKE * np.abs(times).max():
        return None
    told = [f"{name} {share:.3g} times" for name, share in zip(parts, times, strict=True)]
    weights = [sum(shard.weight for shard in part) for part in _parts(held).values()]
    words = (
        f"it is right if samples count otherwise, those of {listed(told, most=8)} as much"
        f"{_meaning(times, weights)}"
    )
    is_telling = np.count_nonzero(goal) >= _DIRECTIONS * len(terms)
    nearest = float(np.dot(goal, got) / np.dot(got, got)) * got
    off = float(np.linalg.norm(goal - nearest)) / size if is_telling else 0.0
    return _Fit(words, gap / size, off, size)


def _parts(shards: Sequence[Shard]) -> Mapping[str, list[Shard]]:
    """Return the micro-batches by rank, or one by one if ranks have several, but not many."""
    kept = [shard for shard in shards if shard.gradient]
    by_rank = len(kept) > _APART_MAX or len({shard.rank for shard in kept}) == len(kept)
    parts: dict[str, list[Shard]] = {}
    for index, shard in enumerate(kept):
        own = sum(other.rank == shard.rank for other in kept[:index])
        within = "" if by_rank else f" in micro-batch {own}"
        parts.setdefault(f"rank {shard.rank}{within}", []).append(shard)
    return parts


def _sum(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], like: Mapping[str, NDArray[Any]] | None
) -> step_sums.Vector | None:
    total = step_sums.total(by_rank, shards)
    if total is None or like is None or not total.keys() <= like.keys():
        return None
    whole = {name: total.get(name, np.zeros(vector.shape)) for name, vector in like.items()}
    if any(whole[name].shape != vector.shape for name, vector in like.items()):
        return None
    return step_sums.joined(whole, like)


def _meaning(times: NDArray[Any], weights: Sequence[float]) -> str:
    """Return what it could mean, to end a sentence, if the right shares are those of `weights`."""
    if not all(weights):
        return ""
    per_weight = times / np.asarray(weights)
    if np.ptp(per_weight) > _ALIKE * np.abs(per_weight).max():
        return ""
    return ", as their samples or tokens say, which could mean: a mean of means"
