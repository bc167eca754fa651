"""Explanations of a relation that fails: one record, and how one is chosen from a closed list.

Where a relation between recorded numbers fails, a script may be wrong, or the relation may
presuppose something that doesn't hold. One exact equation decides: if the numbers follow from the
right ones by an error that people make, within rounding and on all tensors, nothing else has to be
looked for. The lists are by kind of relation: `accumulated.LIST` for a gradient that is not the sum
of its micro-batches', `clipping_errors.LIST` for one that was not clipped as a whole, and
`difference` below for two runs. `divided_inside` and `is_wrong=False` are benign: they come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import combinations
from entrenar_py.check.evidence import closeness, factors, step_sums
from entrenar_py.shared.faults import OF_RECORDS
from entrenar_py.shared.trace import Tensors, Trace
from entrenar_py.shared.wording import listed

_TENSORS_MIN = 2  # with a factor, or without one; a single tensor may have it by chance
_ELEMENTS_MIN = 16  # of all tensors together
_ALIKE = 0.02  # shares closer than this are alike: counts of samples differ by more
_TELLING_MIN = 3  # elements: shorter vectors are multiples of each other by chance


@dataclass(frozen=True)
class Explanation:
    """An equation that fits, in `words` that follow what fails, and a `tensor` that shows it.

    `is_wrong` is False if a right script may do this on purpose; `advice` then says what settles
    it.
    """

    words: str
    is_wrong: bool = True
    advice: str = ""
    tensor: str | None = None


E = TypeVar("E")


def first(explain: Iterable[Callable[[E], Explanation | None]], evidence: E) -> Explanation | None:
    """Return the first explanation that fits, or None. Benign ones stand first in each list."""
    return next(filter(None, (one(evidence) for one in explain)), None)


def difference(model: Trace, trace: Trace, step: int, bound: float) -> Explanation | None:
    """Return why the gradients of two runs differ in `step`, if nothing that is random can be why.

    They follow from each other by a simple factor on all tensors, or on some. Or both follow from
    the micro-batches of one run, which then compute what those of the other do.
    """
    expected, made = evidence.updates(model).get(step), evidence.updates(trace).get(step)
    if not expected or not made:
        return None
    updates = [evidence.any_rank(ranks) for ranks in (expected, made)]
    due, got = (update.gradient for update in updates)
    gaps = _gaps(due, got)
    if not any(gap.distance > bound * gap.size for gap in gaps.values()):
        before = _gaps(*(update.unclipped for update in updates))
        return _by_factor(before, trace, bound) if gaps and before else None
    if sum(gap.expected.size for gap in gaps.values()) < _ELEMENTS_MIN:
        return None
    if (factor := _by_factor(gaps, trace, bound)) is not None:
        return factor
    if _is_given(model) and _is_one_factor(due, got, bound):
        return None  # one worker may divide by a number of its own samples, which was not replaced
    return _by_shares(due, got, trace, step, bound)


def _gaps(due: Tensors, got: Tensors) -> dict[str, closeness.Gap]:
    """Return how far all tensors of two gradients are apart, nothing if that isn't known."""
    gaps = closeness.distances(due, got) or {}
    return gaps if due.keys() == got.keys() == gaps.keys() else {}


def _is_given(model: Trace) -> bool:
    """Return whether one worker was given the batches of several in place of its own."""
    return any(fault.kind in OF_RECORDS for fault in model.scenario.faults)


def _is_one_factor(due: Tensors, got: Tensors, bound: float) -> bool:
    """Return whether one gradient is a multiple of the other, by whichever number."""
    right, applied = evidence.vectors(due), evidence.vectors(got)
    if right is None or applied is None:
        return False
    expected, made = step_sums.joined(right, due), step_sums.joined(applied, due)
    return expected.shape == made.shape and factors.ratio(expected, made, bound) is not None


def _by_factor(gaps: dict[str, closeness.Gap], trace: Trace, bound: float) -> Explanation | None:
    """Return the factor that all tensors have, or that some have while others agree."""
    times, telling = {}, 0
    for name, gap in gaps.items():
        factor = factors.ratio(gap.expected, gap.got, bound)
        if factor is None:
            if gap.distance > bound * gap.size:
                return None
            factor = 1.0  # of rounding noise
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
    """Return that both gradients are combinations of the same micro-batches', if they are."""
    shards = [s for s in evidence.shards(trace).get(step, ()) if s.gradient or s.ids]
    goals = evidence.vectors(due), evidence.vectors(got)
    if goals[0] is None or goals[1] is None:
        return None
    shares = combinations.shares(goals[0], shards, bound)
    if shares is None or not combinations.is_met(goals[1], shards, bound):
        return None
    # Shares that are neither equal nor those of samples may be drawn at random on purpose.
    counts = ([1.0] * len(shards), [s.weight for s in shards], [float(len(s.ids)) for s in shards])
    if not any(_are_alike(shares, count) for count in counts):
        return None
    return Explanation("micro-batches count otherwise")


def _are_alike(shares: step_sums.Vector, counts: Sequence[float]) -> bool:
    """Return whether shares are proportional to positive `counts`."""
    if min(counts) <= 0:
        return False
    each = shares / np.asarray(counts)
    return bool(np.ptp(each) <= _ALIKE * np.abs(each).max())
