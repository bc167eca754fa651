"""Recognise clipping errors of a script that declares no norm, by all of its steps.

The norm is a number that people write, and gradients have it as they are applied, or a part of them
has it, or the first one alone. Or they were clipped while they were multiplied by the loss scale:
their norm, once they are divided by the scale again, is the limit divided by the scale, the same
tiny number in each step, whatever the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from entrenar_py.check import evidence
from entrenar_py.check.causes import clipping, explanations, rounding_bounds
from entrenar_py.check.causes.clipping import Clipped
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.wording import listed

_STEPS_MIN = 3  # equal norms in fewer steps may be chance
_LATER_MIN = 4  # steps of one factor, after a first one that has another
_TWICE = 2  # steps in which parts have the same norm, and parts that have it
_POWERS = (16, *range(8, 16), *range(17, 25))  # of two: loss scales. GradScaler's is 2^16 at first
_ROUND = 1e-4  # of a limit that people write, in two digits; clip_grad_norm_ adds 1e-6 to a norm
_EXACT = 2e-5  # the same of a norm that is not divided again, and is above 0.01
_ALIKE = 1e-3  # factors of steps that divide by the same number


@dataclass(frozen=True)
class Steps:
    """The gradients that a run applied in its steps, with what they were before clipping."""

    norms: Mapping[int, float]
    clipped: Mapping[int, Clipped]
    weights: Mapping[int, float]


def first(trace: Trace) -> tuple[int, Explanation] | None:
    """Return the first step with a gradient, and how its steps were clipped wrongly; or None."""
    steps = _steps(trace)
    if not steps.norms or not all(map(math.isfinite, steps.norms.values())):
        return None
    why = explanations.first(LIST, steps)
    return None if why is None else (min(steps.norms), why)


def _steps(trace: Trace) -> Steps:
    rested, shards = evidence.skipped_without_gradients(trace), evidence.shards(trace)
    bound = rounding_bounds.Bounds.of({}, trace).gradient
    norms, clipped, weights = {}, {}, {}
    for step, by_rank in evidence.ranks_by_step(trace):
        update = evidence.any_rank(by_rank)
        norm = closeness.norm_l2(update.gradient)
        if step in rested or not norm:
            continue
        norms[step], weights[step] = norm, update.weight
        clipped[step] = clipping.of_step(
            by_rank, update, shards.get(step, []), limit=math.nan, bound=bound
        )
    return Steps(norms, clipped, weights)


def _while_scaled(steps: Steps) -> Explanation | None:
    """All steps have one limit, divided by powers of two."""
    if len(steps.norms) < _STEPS_MIN:
        return None
    norm, *others = steps.norms.values()
    limit = _limit(norm)
    if limit is None or not all(_is_power(norm / other, _ROUND) for other in others):
        return None
    return Explanation(
        f"the norm of the applied gradient is {norm:.3g} in every step, such as {limit:g} divided "
        f"by {round(limit / norm)}, which could mean: clipped while still scaled"
    )


def _by_group(steps: Steps) -> Explanation | None:
    """Several groups of tensors have the same norm, a number that people write, each by itself.

    Networks that are trained together may be clipped apart. But these groups divide a layer, as a
    list of parameters with weight decay does, and have tensors of several layers.
    """
    seen: dict[float, list[tuple[str, ...]]] = {}
    counts: dict[float, int] = {}
    for clipped in steps.clipped.values():
        by_limit: dict[float, list[tuple[str, ...]]] = {}
        for names in clipping.scaled_together(clipped) if clipped.whole else ():
            norm = clipped.norm(names)
            if norm and _is_round(norm, _EXACT) and _are_multiples(clipped, names):
                by_limit.setdefault(float(f"{norm:.2g}"), []).append(names)
        for limit, groups in by_limit.items():
            if len(groups) >= _TWICE and _divide_a_layer(groups):
                seen.setdefault(limit, groups)
                counts[limit] = counts.get(limit, 0) + 1
    for limit, count in counts.items():
        if count >= _TWICE:
            few = min(seen[limit], key=len)
            words = f"the gradients of {listed(few, most=2)} have the norm {limit:g} by themselves"
            return Explanation(
                f"{words}, and so have those of others: each group was clipped by its own norm, "
                "not by that of the whole gradient",
                tensor=few[0],
            )
    return None


def _are_multiples(clipped: Clipped, names: Collection[str]) -> bool:
    """Return whether tensors were applied as their sums over micro-batches, times one number."""
    applied, whole = ({n: one[n] for n in names} for one in (clipped.applied, clipped.whole))
    return clipping.is_multiple(applied, whole, clipped.bound)


def _divide_a_layer(groups: list[tuple[str, ...]]) -> bool:
    layers = [{name.rpartition(".")[0] for name in names} for names in groups]
    is_divided = any(one & other for n, one in enumerate(layers) for other in layers[:n])
    return is_divided and max(map(len, layers)) > 1


def _first_alone(steps: Steps) -> Explanation | None:
    """The first step has a norm that people write, and later ones, which are longer, are whole."""
    known = dict(_factors(steps))
    if len(known) != len(steps.norms) or len(known) <= _LATER_MIN:
        return None
    step, *later = sorted(known)
    limit = steps.norms[step]
    if not _is_round(limit, _EXACT) or all(steps.norms[other] <= 1.01 * limit for other in later):
        return None
    for weights in (steps.weights, dict.fromkeys(known, 1.0)):
        whole = {one: known[one] * (weights[one] or 1.0) for one in known}
        usual = whole[later[0]]
        alike = all(abs(whole[other] / usual - 1) <= _ALIKE for other in later)
        ratio = usual / whole[step]
        if alike and ratio > 1 + 10 * _ALIKE and not _is_power(ratio, _ALIKE):
            return Explanation(
                f"the gradient of step {step} alone is clipped, to {limit:.2g}, and later ones are "
                "longer, which could mean: the parameters to clip are given by a generator, which "
                "the first step has exhausted"
            )
    return None


def _factors(steps: Steps) -> Iterator[tuple[int, float]]:
    """Yield the steps whose gradient is that of its micro-batches times one number, and it."""
    for step, clipped in steps.clipped.items():
        if not clipped.whole or not clipping.is_multiple(
            clipped.applied, clipped.whole, clipped.bound
        ):
            continue
        largest = max(clipped.sizes, key=lambda name: clipped.sizes[name])
        factor = clipping.factor_of(clipped, largest)
        if factor > 0:
            yield step, factor


LIST = (_while_scaled, _by_group, _first_alone)


def _limit(norm: float) -> float | None:
    """Return the clipping limit that `norm` is after division by a usual loss scale; else None.

    A limit is from 0.1 to 10 and has one or two digits. A norm that is so round itself has none.
    """
    if _is_round(norm, _ROUND):
        return None
    limits = [limit for power in _POWERS if _is_round(limit := norm * 2.0**power, _ROUND)]
    likely = [float(f"{limit:.2g}") for limit in limits if 0.1 - _ROUND <= limit <= 10 + _ROUND]
    return next(iter(likely), None)


def _is_power(number: float, bound: float) -> bool:
    """Return whether a number is a power of two: the scale changes by these."""
    return abs(number / 2.0 ** round(math.log2(number)) - 1) <= bound


def _is_round(norm: float, bound: float) -> bool:
    return abs(float(f"{norm:.2g}") - norm) <= bound * norm
