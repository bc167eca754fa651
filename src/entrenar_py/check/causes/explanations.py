"""Explanations of a relation that fails: their record, and how one is chosen from fixed lists.

If a relation between recorded numbers fails, a script may be wrong, or the relation may presuppose
something that doesn't hold. One exact equation decides: if the numbers follow from the right ones
by a common error, within rounding and on all tensors, no other cause needs to be searched for.
There is a list for each type of relation: `accumulation.LIST` for a gradient that is not the sum of
its micro-batches, `clipping.LIST` for one that was not clipped as a whole, and `difference` below
for two runs. Divisions by an optimizer (`applied_gradients.undone`) and explanations with
`is_wrong=False` are benign: they are tried first.

Whatever mistake a script makes in adding up micro-batches, each tensor's gradient is some
combination of their gradients. If samples influence each other, or masks or noise differ, there is
no such combination. So combinations distinguish an error from a different training run. They also
show what was added in the reduction or after it: the part of a tensor's gradient that is no
combination of micro-batches (`changes`), even if rounding is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import rounding_bounds
from entrenar_py.check.evidence import closeness, factors, precision, step_sums
from entrenar_py.check.evidence.step_sums import Vector, Vectors
from entrenar_py.shared.faults import OF_RECORDS
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update
from entrenar_py.shared.wording import listed

_TENSORS_MIN = 2  # since a single tensor may have a factor by chance
_ELEMENTS_MIN = 16  # elements of all tensors together
_ALIKE = 0.02  # relative: shares closer than this are equal, since counts of samples differ by more
_TELLING_MIN = 3  # elements: shorter vectors are multiples of each other by chance


@dataclass(frozen=True)
class Explanation:
    """An exact equation for a difference: its `words`, and a `tensor` that shows it.

    The words continue a message on what fails. `is_wrong` is False if a correct script may do this
    on purpose. Then `advice` says what decides.
    """

    words: str
    is_wrong: bool = True
    advice: str = ""
    tensor: str | None = None


E = TypeVar("E")


def first(explain: Iterable[Callable[[E], Explanation | None]], evidence: E) -> Explanation | None:
    """Return the first explanation that fits, or None. Benign ones come first in each list."""
    return next(filter(None, (one(evidence) for one in explain)), None)


def difference(model: Trace, trace: Trace, step: int, bound: float) -> Explanation | None:
    """Return why the gradients of two runs differ in `step`, if nothing random can be the cause.

    Return None otherwise. There are two explanations. The gradients follow from each other by a
    simple factor on all or some tensors. Or both are combinations of the micro-batches of `trace`
    with different shares; then the micro-batches' own gradients are right. `bound` is the allowed
    relative distance.
    """
    expected, updates_of = evidence.updates(model).get(step), evidence.updates(trace).get(step)
    if not expected or not updates_of:
        return None
    updates = [evidence.any_rank(ranks) for ranks in (expected, updates_of)]
    due, got = (update.gradient for update in updates)
    gaps = _gaps(due, got)
    if not any(gap.distance > bound * gap.size for gap in gaps.values()):
        before = _gaps(*(update.unclipped for update in updates))
        return _by_factor(before, trace, bound) if gaps and before else None
    if sum(gap.expected.size for gap in gaps.values()) < _ELEMENTS_MIN:
        return None
    if (factor := _by_factor(gaps, trace, bound)) is not None:
        return factor
    if is_given(model) and step_sums.ratio(due, got, bound) is not None:
        return None  # one worker may divide by its own number of samples, which wasn't replaced
    return _by_shares(due, got, trace, step, bound)


def _gaps(due: Tensors, got: Tensors) -> dict[str, closeness.Gap]:
    gaps = closeness.distances(due, got) or {}
    return gaps if due.keys() == got.keys() == gaps.keys() else {}


def is_given(model: Trace) -> bool:
    """Return whether one worker was given the batches of several workers instead of its own."""
    return any(fault.kind in OF_RECORDS for fault in model.scenario.faults)


def _by_factor(gaps: dict[str, closeness.Gap], trace: Trace, bound: float) -> Explanation | None:
    """Return the common factor of all tensors, or of some while others agree, as an explanation."""
    times, telling = {}, 0
    for name, gap in gaps.items():
        factor = factors.ratio(gap.expected, gap.got, bound)
        if factor is None:
            if gap.distance > bound * gap.size:
                return None
            factor = 1.0  # a tensor of rounding noise has no factor of its own
        telling += int((gap.expected != 0).sum()) >= _TELLING_MIN
        times[name] = factor
    changed = {name: factor for name, factor in times.items() if abs(factor - 1) > bound}
    if telling < _TENSORS_MIN or not changed:
        return None
    factor = next(iter(changed.values()))
    simple = factors.named(factor, trace.scenario, bound)
    if simple is None or any(abs(one - factor) > bound * factor for one in changed.values()):
        return None
    which = (
        "all tensors have"
        if changed.keys() == times.keys()
        else (
            f"{listed([*changed], most=2)} has"
            if len(changed) == 1
            else f"{len(changed)} tensors have"
        )
    )
    shown, reason = simple
    return Explanation(f"{which} the factor {shown}{f' ({reason})' if reason else ''}")


def _by_shares(
    due: Tensors, got: Tensors, trace: Trace, step: int, bound: float
) -> Explanation | None:
    """Explain gradients that are combinations of the same micro-batches, with different shares.

    Return None if they aren't.
    """
    shards = [s for s in evidence.shards(trace).get(step, ()) if s.gradient or s.ids]
    goals = evidence.vectors(due), evidence.vectors(got)
    if goals[0] is None or goals[1] is None:
        return None
    shares = shares_of_combination(goals[0], shards, bound)
    if shares is None or not is_combination(goals[1], shards, bound):
        return None
    # Shares that are neither equal nor in proportion to samples may be drawn at random on purpose.
    counts = ([1.0] * len(shards), [s.weight for s in shards], [float(len(s.ids)) for s in shards])
    if not any(_are_alike(shares, count) for count in counts):
        return None
    return Explanation("micro-batches count differently")


def _are_alike(shares: step_sums.Vector, counts: Sequence[float]) -> bool:
    if min(counts) <= 0:
        return False
    each = shares / np.asarray(counts)
    return bool(np.ptp(each) <= _ALIKE * np.abs(each).max())


# --- combinations of the micro-batches' gradients -------------------------------------------------


# Elements of a tensor per micro-batch: no combination fits this many by chance.
_LARGE = 4


def is_combination(goal: Vectors, shards: Sequence[Shard], bound: float) -> bool | None:
    """Return whether each tensor of `goal` is a combination of the shards'; None if unknown.

    One combination for all tensors is tried, and then the combination that fits each large tensor,
    since a bug may affect only some tensors, by a factor. Tensors that a shard lacks are left out.
    `bound` is the allowed relative L2 distance.
    """
    terms = _terms_of_goal(goal, shards)
    if terms is None:
        return None
    sides = [_together(goal, terms)]
    sides += [(terms[n], goal[n]) for n in terms if goal[n].size >= _LARGE * len(shards)]
    shares_of = [np.linalg.lstsq(*side, rcond=None)[0].astype(np.float64) for side in sides]
    return all(any(_fits_shares(goal, terms, n, one, bound) for one in shares_of) for n in terms)


def shares_of_combination(goal: Vectors, shards: Sequence[Shard], bound: float) -> Vector | None:
    """Return each shard's share in the only combination that gives all of `goal`.

    Return None if there is none, if it is unknown, or if there are so few elements that it may be
    chance.
    """
    terms = _terms_of_goal(goal, shards)
    if terms is None or terms.keys() != goal.keys():
        return None
    together, whole = _together(goal, terms)
    if whole.size < _LARGE * len(shards):
        return None
    solved, _, rank, _ = np.linalg.lstsq(together, whole, rcond=None)
    found = solved.astype(np.float64)
    fits = rank == len(shards) and all(_fits_shares(goal, terms, n, found, bound) for n in terms)
    return found if fits else None


def _terms_of_goal(goal: Vectors, shards: Sequence[Shard]) -> dict[str, Vector] | None:
    """Return tensor -> the shards' gradients, [size, num_shards]; None if unknown or not finite."""
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


def _fits_shares(
    goal: Vectors, terms: Mapping[str, Vector], name: str, chosen: Vector, bound: float
) -> bool:
    whole = math.sqrt(sum(float(np.square(goal[n], dtype=np.float64).sum()) for n in terms))
    parts = (goal[name], *(terms[name] * chosen).T)
    size = max(whole / closeness.NOISE_SHARE, *(float(np.linalg.norm(part)) for part in parts))
    return float(np.linalg.norm(terms[name] @ chosen - goal[name])) <= bound * size


# --- how much each micro-batch counts -------------------------------------------------------------


# With more micro-batches than this, gradients are added up by rank first.
_APART_MAX = 8
# After many steps two correct runs have different weights, and no gradient of one run is exactly a
# sum of the other's. The error of wrong shares must be this many times larger than the part that
# stays unexplained.
_TELLING = 10.0
# The distance of a later gradient (absolute, L2) must be this many times that of any gradient
# before it. Rounding differences grow along the trajectory, while wrong shares appear at once.
_JUMP = 10.0
_EXPLAINED = 1e-3  # relative, L2: the largest part that may stay unexplained
_DIRECTIONS = 2  # elements per micro-batch, so that no gradient is a combination by chance


def explain_shares(trace: Trace, update: Update, due: Tensors, bound: float) -> str:
    """Return a phrase about how often each micro-batch would have to count to give `due`; or "".

    `due` is the right gradient. It is explained if it is a sum of the micro-batches' gradients,
    within `bound` (relative, L2), with other shares than the applied gradient.
    """
    by_rank = evidence.updates(trace).get(update.step, {})
    fit = _fit_of_shares(by_rank, evidence.shards(trace).get(update.step, ()), update, due, bound)
    return "" if fit is None else fit.words


@dataclass(frozen=True)
class LaterSteps:
    """Explains gradients of `trace` in later steps by wrong shares of micro-batches.

    Two correct runs have slightly different weights after many steps. Therefore a gradient of
    `model` is no exact sum of the gradients in `trace`, but the shares in the nearest sum hardly
    change, unless each sample has a direction of its own. So the gradients must also be further
    apart than the bounds, and further than in any step before.
    """

    model: Trace
    trace: Trace

    def explain(self, update: Update, bound: float, floor: float) -> str:
        """Return a phrase about how often each micro-batch of the step would have to count.

        Return "" if that is unknown, or if rounding alone may explain the distance: if the gradient
        is not further off than `bound` (relative, L2) and `floor` (absolute). The gradient of a
        model that has learned its data is only rounding.
        """
        step = update.step
        due, shards = evidence.any_rank(self._due[step]).gradient, self._shards.get(step, ())
        fit = _fit_of_shares(self._made[step], shards, update, due, _EXPLAINED)
        if fit is None or fit.off * fit.size <= floor:
            return ""
        is_sure = fit.off > max(bound, _TELLING * max(fit.unexplained, _EXPLAINED))
        return fit.words if is_sure and self._comes_at_once(step) else ""

    def _comes_at_once(self, step: int) -> bool:
        earlier = (made for made in self._due.keys() & self._made.keys() if made < step)
        return self._apart(step) > _JUMP * max(map(self._apart, earlier), default=math.inf)

    def _apart(self, step: int) -> float:
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
    """A gradient as a sum of those of micro-batches, with shares that differ from the applied ones.

    `unexplained` is the distance of the gradient from this sum, and `off` its distance from the
    nearest multiple of the applied gradient. Both are relative to `size`, the gradient's norm.
    """

    words: str
    unexplained: float
    off: float
    size: float


def _fit_of_shares(
    by_rank: Mapping[int, Update],
    shards: Sequence[Shard],
    update: Update,
    due: Tensors,
    bound: float,
) -> _Fit | None:
    applied_shards = step_sums.held(by_rank, shards)
    right, applied = evidence.vectors(due), evidence.vectors(update.gradient)
    parts = {
        key: _sum(by_rank, part, right) for key, part in _parts_of_step(applied_shards).items()
    }
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
    counts = [f"{name} {share:.3g} times" for name, share in zip(parts, times, strict=True)]
    weights = [
        sum(shard.weight for shard in part) for part in _parts_of_step(applied_shards).values()
    ]
    words = (
        f"right if samples have different weights: the samples of {listed(counts, most=8)} as "
        f"much{_meaning(times, weights)}"
    )
    is_telling = np.count_nonzero(goal) >= _DIRECTIONS * len(terms)
    nearest = float(np.dot(goal, got) / np.dot(got, got)) * got
    off = float(np.linalg.norm(goal - nearest)) / size if is_telling else 0.0
    return _Fit(words, gap / size, off, size)


def _parts_of_step(shards: Sequence[Shard]) -> Mapping[str, list[Shard]]:
    """Return the micro-batches by rank, or one by one if ranks have only a few."""
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
    if not all(weights):
        return ""
    per_weight = times / np.asarray(weights)
    if np.ptp(per_weight) > _ALIKE * np.abs(per_weight).max():
        return ""
    return ", as their samples or tokens say, which could mean: a mean of means"


# --- parts of a gradient that no micro-batch gave -------------------------------------------------


# A change counts if it is this many times that of most tensors, since rounded sums change all
# tensors.
_OUTLYING = 8.0
_ROUNDS = 10  # rounds of a fit: in each, a tensor counts less the further off it is
_ROUNDED = 2.0**-20  # a relative distance; tensors below it count equally
# The largest standard error of a change, as a fraction of the difference of two runs.
_ERROR_MAX = 0.1
# The most elements of a tensor that count as independent, and the fewest that prove anything.
_INDEPENDENT, _NUMBERS_MIN = 32, 4


class Change(NamedTuple):
    """The part of a tensor's gradient that is no combination of micro-batches, and the rest.

    `change` is this part and `right` the rest. `relative` is the norm of `change`, divided by the
    gradient's norm.
    """

    right: Vector
    change: Vector
    relative: float


def changes(trace: Trace, update: Update, model: Update, bound: float) -> dict[str, Change]:
    """Return tensor -> the part of its gradient that is no combination of micro-batches.

    `model` is the update of the other run. A part counts if it is larger than `bound`, relative to
    the tensor's norm, and if the two runs differ by it. Each micro-batch may have any share, which
    must be the same for all tensors.
    """
    applied, other = evidence.vectors(update.gradient), evidence.vectors(model.gradient)
    bound = allowed_change(update, bound)
    if not applied or not other or trace.traits.compressed:
        return {}
    by_rank = evidence.updates(trace)[update.step]
    shards = evidence.shards(trace).get(update.step, [])
    terms = _terms_of_step(by_rank, shards, applied)
    if terms is None:
        return {}
    is_coarse = precision.unit(trace) > precision.FLOAT32
    if is_coarse and rounding_bounds.format_of_step(shards, by_rank, bound):
        return {}
    changes = _changes(applied, terms)
    usual = median_low([change.relative for change in changes.values()] or [math.inf])
    near = max(bound, _OUTLYING * usual)
    return {
        name: change
        for name, change in changes.items()
        if change.relative > near
        and _is_in_difference(change.change, applied[name], other.get(name))
        and not (is_coarse and precision.may_be_coarse(update.gradient[name]))
    }


def allowed_change(update: Update, bound: float) -> float:
    """Return `bound` for the tensors of `update`, widened if they are projections."""
    is_sketched = any(record.sketch for record in update.gradient.values())
    return closeness.PROJECTED * bound if is_sketched else bound


def _terms_of_step(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], applied: Vectors
) -> Vectors | None:
    """Return tensor -> the contribution of each micro-batch, float64 [size, num_micro_batches].

    Return None if that is unknown, or if sizes of a tensor differ.
    """
    batches = []
    for shard in step_sums.held(by_rank, shards):
        values = evidence.vectors(step_sums.summed(by_rank, shard))
        if values is None:
            return None
        shapes = {name: vector.shape for name, vector in values.items() if name in applied}
        if any(applied[name].shape != shape for name, shape in shapes.items()):
            return None
        batches.append(values)
    return {
        name: np.stack([v.get(name, np.zeros(vector.shape)) for v in batches], axis=1, dtype=float)
        for name, vector in applied.items()
        if batches
    } or None


def _changes(applied: Vectors, terms: Vectors) -> dict[str, Change]:
    """Return tensor -> the remainder of the combination of `terms` that fits most tensors.

    The combination has the least sum of the tensors' relative distances, so a few changed tensors
    don't move it. A tensor's norm counts as at least 1 / NOISE_SHARE of the norm of all tensors,
    and of its terms.
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


def _is_in_difference(change: Vector, applied: Vector, other: Vector | None) -> bool:
    """Return whether the gradients of two runs differ by `change`, and hardly by anything else."""
    if other is None or other.shape != change.shape or change.size < _NUMBERS_MIN:
        return False
    difference = applied - other.astype(np.float64)
    share = float(difference @ change) / float(change @ change)
    rest = _norm(difference - share * change)
    error = rest / _norm(change) / math.sqrt(min(change.size, _INDEPENDENT))
    return abs(share - 1) < 0.5 and error <= _ERROR_MAX


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector))
