"""Explain an applied gradient that is not the whole gradient, clipped to the declared norm.

Each explanation is a common error, recomputed from the recorded gradients. If one fits, it names
the error. If none fits, the difference may have causes other than clipping.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import step_sums
from entrenar_py.check.evidence.step_sums import Vectors
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.wording import listed

_ALIKE = 1e-3  # relative: factors of tensors that were scaled together differ by less
_PIECES_MAX = 8  # groups that factors can distinguish, at most


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """The gradient `applied` in a step, and the norm `limit` to which it should be clipped.

    `by_rank` has the gradients of each rank's micro-batches in order, and `whole` their sum; both
    are empty if they are unknown. `given` is the gradient that was passed to torch's clipping.
    `sizes` has the squared norm of each applied tensor. If the model is `large`, `applied` has
    projections. `bound` is the relative rounding error.
    """

    applied: Vectors
    sizes: Mapping[str, float]
    large: bool
    limit: float
    bound: float
    whole: Vectors
    by_rank: Mapping[int, Sequence[Vectors]]
    given: Vectors

    def is_limit(self, norm: float) -> bool:
        """Return whether `norm` is the declared limit, within rounding."""
        return math.isclose(norm, self.limit, rel_tol=2 * self.bound + 1e-6 / self.limit)

    def norm(self, names: Iterable[str]) -> float:
        """Return the L2 norm of the applied tensors `names` together."""
        return math.sqrt(math.fsum(self.sizes[name] for name in names))


def of_step(
    by_rank: Mapping[int, Update],
    update: Update,
    shards: Sequence[Shard],
    *,
    limit: float,
    bound: float,
) -> Clipped:
    """Return the records on a step's gradient, before and after clipping."""
    applied = evidence.vectors(update.gradient) or {}
    whole = step_sums.total(by_rank, shards) or {}
    # The gradients of tensors without any term are zeros, unless they were set to None.
    idle = {n: v for n, v in applied.items() if n not in whole and not v.any()}
    whole = {**whole, **idle} if whole else {}
    if not whole or step_sums.shapes(whole) != step_sums.shapes(applied):
        whole, shards = {}, []
    lost = step_sums.dropped(by_rank, shards)
    parts: dict[int, list[Vectors]] = {}
    for shard in shards:
        batch = evidence.vectors(step_sums.summed(by_rank, shard))
        if batch and not any(shard is one for one in lost):
            parts.setdefault(shard.rank, []).append(batch)
    return Clipped(
        applied=applied,
        sizes={name: record.square() or 0.0 for name, record in update.gradient.items()},
        large=any(record.sketch is not None for record in update.gradient.values()),
        limit=limit,
        bound=bound,
        whole=whole,
        by_rank=parts,
        given=evidence.vectors(update.unclipped) or {},
    )


def in_pieces(clipped: Clipped) -> Explanation | None:
    """Return an explanation if parts of one tensor were scaled differently, each to the limit.

    Ranks with pieces of a tensor clip each piece by its own norm, unless norms are added over all
    ranks.
    """
    unclipped, applied = clipped.given, clipped.applied
    if clipped.large or step_sums.shapes(unclipped) != step_sums.shapes(applied):
        return None
    before, after = _flat(unclipped), _flat(applied)
    telling = before != 0
    if not telling.any():
        return None  # the tensor was cleared when it was clipped
    factors = np.divide(after, before, out=np.zeros_like(after), where=telling)
    groups = _alike(factors[telling])
    cut = [factor for factor in groups if factor < 1 - _ALIKE]
    if len(groups) < 2 or not cut:
        return None
    for factor in cut:
        scaled = after[telling & np.isclose(factors, factor, rtol=_ALIKE)]
        if not clipped.is_limit(float(np.linalg.norm(scaled))):
            return None
    owners = np.repeat([*unclipped], [value.size for value in unclipped.values()])
    spread = [np.isclose(factors, factor, rtol=_ALIKE) & telling for factor in groups]
    divided = set.intersection(*({*owners[where].tolist()} for where in spread[:2]))
    if not divided:
        return None
    name = min(divided)
    return Explanation(
        f"elements of {name} are scaled by {len(groups)} different factors, and the elements "
        "with one factor have this norm: each rank clips its pieces by their own norm, not by "
        "the norm of the whole gradient (FullyShardedDataParallel has its own clip_grad_norm_)",
        tensor=name,
    )


def _alike(factors: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    ordered = np.sort(factors)
    bounds = np.flatnonzero(np.diff(ordered) > _ALIKE * np.abs(ordered[1:]))
    groups = np.split(ordered, bounds + 1)
    if len(groups) > _PIECES_MAX or any(np.ptp(one) > _ALIKE * abs(one[-1]) for one in groups):
        return []
    return [float(np.median(one)) for one in groups]


def _by_element(clipped: Clipped) -> Explanation | None:
    if clipped.large:
        return None
    sizes = np.abs(_flat(clipped.applied))
    num_largest = int(np.isclose(sizes, sizes.max(), rtol=clipped.bound).sum()) if sizes.size else 0
    if num_largest and clipped.is_limit(float(sizes.max())):
        if num_largest > 1:
            return Explanation(
                "each element was clipped to this limit, not the norm (clip_grad_value_)"
            )
        return Explanation(
            "its largest element has this size: clipped by the maximum (norm_type=inf)"
        )
    return None


def _in_groups(clipped: Clipped) -> Explanation | None:
    """Return an explanation if tensors were clipped in parts, so that all together are too long."""
    if clipped.norm(clipped.applied) <= clipped.limit * (1 + clipped.bound):
        return None
    for names in scaled_together(clipped):
        apart = len(names) < len(clipped.applied)
        if apart and clipped.is_limit(clipped.norm(names)):
            words = f"{listed(names, most=3)} alone has this norm: clipped in parts, not as a whole"
            return Explanation(words, tensor=names[0])
    return None


def _twice(clipped: Clipped) -> Explanation | None:
    """Return an explanation if a tensor was counted twice in the norm and scaled twice."""
    groups = scaled_together(clipped)
    if len(groups) != 2 or not clipped.whole:
        return None
    many, few = sorted(groups, key=len, reverse=True)
    factors = [factor_of(clipped, names[0]) for names in (many, few)]
    scale = factors[1] / factors[0] if factors[0] else 0.0
    if not 0 < scale < 1:
        return None
    rest, double = clipped.norm(many), clipped.norm(few)
    if clipped.is_limit(scale * math.hypot(rest / scale, math.sqrt(2) * double / scale**2)):
        words = f"{listed(few, most=3)} is listed twice among the tensors that are clipped"
        return Explanation(words, tensor=few[0])
    return None


def _before_the_sum(clipped: Clipped) -> Explanation | None:
    for words, of_rank in _EARLY.items():
        parts = [of_rank(batches, clipped.limit) for batches in clipped.by_rank.values()]
        if parts and is_multiple(clipped.applied, _sum(parts), clipped.bound):
            return Explanation(words)
    return None


def _as_it_grows(batches: Sequence[Vectors], limit: float) -> Vectors:
    grown: Vectors = {}
    for batch in batches:
        grown = _cut(_sum([grown, batch]) if grown else batch, limit)
    return grown


_EARLY: Mapping[str, Callable[[Sequence[Vectors], float], Vectors]] = {
    "each rank clipped its own gradient before the gradients were added": lambda batches, limit: (
        _cut(_sum(batches), limit)
    ),
    "each micro-batch's gradient was clipped before their sum": lambda batches, limit: _sum(
        [_cut(batch, limit) for batch in batches]
    ),
    "the gradient was clipped after each micro-batch": _as_it_grows,
}
LIST = (in_pieces, _by_element, _in_groups, _twice, _before_the_sum)


# --- arithmetic -------------------------------------------------------------------------------


def is_multiple(applied: Vectors, whole: Vectors, bound: float) -> bool:
    """Return whether `applied` is a multiple of `whole`, within `bound` times its own norm."""
    mine = _flat(applied)
    other = _flat({name: whole.get(name, np.zeros_like(v)) for name, v in applied.items()})
    size = float(np.dot(other, other))
    if not size:
        return False
    off = mine - float(np.dot(mine, other)) / size * other
    return float(np.linalg.norm(off)) <= bound * float(np.linalg.norm(mine))


def factor_of(clipped: Clipped, name: str) -> float:
    """Return the applied gradient of a tensor divided by its sum over micro-batches.

    0.0 if unknown.
    """
    whole = clipped.whole[name].astype(np.float64)
    size = float(np.dot(whole, whole))
    return float(np.dot(clipped.applied[name].astype(np.float64), whole)) / size if size else 0.0


def scaled_together(clipped: Clipped) -> list[tuple[str, ...]]:
    """Return groups of tensors with equal factors, or each tensor alone if factors are unknown."""
    if not clipped.whole:
        return [(name,) for name in clipped.applied]
    groups: dict[float, list[str]] = defaultdict(list)
    for name in clipped.applied:
        factor = factor_of(clipped, name)
        known = (other for other in groups if math.isclose(factor, other, rel_tol=_ALIKE))
        groups[next(known, factor)].append(name)
    return [tuple(names) for names in groups.values()]


def _cut(vectors: Vectors, limit: float) -> Vectors:
    size = float(np.linalg.norm(_flat(vectors)))
    scale = min(1.0, limit / size) if size else 1.0
    return {name: scale * value for name, value in vectors.items()}


def _sum(parts: Sequence[Vectors]) -> Vectors:
    names = dict.fromkeys(name for part in parts for name in part)
    return {n: np.sum([part[n] for part in parts if n in part], axis=0) for n in names}


def _flat(vectors: Vectors) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.zeros(0), *(value.astype(np.float64) for value in vectors.values())])


# --- element by element, as by clip_grad_value_ ---------------------------------------------------


def limit_of_elements(trace: Trace) -> float | None:
    """Return a run's largest absolute gradient element if it looks like a limit, otherwise None.

    It looks like a limit if several elements have exactly that size, or if it has at most three
    digits, like a number in a script. Without clipping, either happens in about one of 10,000 runs.
    In each step only one rank's gradient counts, since the other ranks have the same one.
    """
    counts: Counter[float] = Counter()
    for by_rank in evidence.updates(trace).values():
        gradient = evidence.any_rank(by_rank).gradient
        sizes = np.abs(_flat(evidence.elements(gradient) or {}))
        if sizes.size:
            largest = float(sizes.max())
            counts[largest] += int((sizes == largest).sum())
    top = max(counts, default=math.nan)
    if not 0 < top < math.inf:
        return None
    return top if counts[top] > 1 or float(np.float32(f"{top:.3g}")) == top else None


def explains_elements(total: Vectors, mean: Vectors, limit: float, bound: float) -> bool:
    """Return whether `mean` is `total` divided by one number and then clipped at `limit`.

    The distance may be up to `bound` times the norm of all elements. Tensors that are missing in
    `total` have a sum of zero.
    """
    applied = _flat(mean)
    terms = _flat({name: total.get(name, np.zeros_like(value)) for name, value in mean.items()})
    cut = np.abs(applied) == limit
    free = applied[~cut]
    size = float(np.dot(free, free))
    if not size:
        return False
    divisor = float(np.dot(terms[~cut], free)) / size
    off = float(np.linalg.norm(terms[~cut] - divisor * free))
    if not divisor or off > bound * abs(divisor) * float(np.linalg.norm(applied)):
        return False
    beyond = np.sign(applied[cut]) * terms[cut] / divisor
    return bool((beyond >= limit * (1 - bound)).all())


def uncut_elements(total: Vectors, mean: Vectors, limit: float) -> tuple[Vectors, Vectors]:
    """Return `total` and `mean` with only those elements of `mean` that were not clipped.

    An element was clipped if its size is `limit`. Tensors without other elements are left out.
    """
    free = {name: np.abs(value) != limit for name, value in mean.items()}
    names = [name for name, chosen in free.items() if chosen.any()]
    return (
        {name: total[name][free[name]] for name in names},
        {name: mean[name][free[name]] for name in names},
    )
