"""Describe how a wrong vector follows from the right one: twice as large, half, shifted, zero.

A relation is described only if it holds for all elements within rounding. Nothing is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import MEANING

Vector = NDArray[Any]

# Two float32 results of the same sum differ by less than EXACT, relative to their norm. Runs in 16
# bits have larger bounds. Beyond _LOOSEST, neighbouring factors can't be distinguished.
EXACT = 1e-5
_LOOSEST = 1e-2
_WHOLE_MAX = 16  # factors up to this (and 1 over them) are named, even without a known reason
_POWERS = range(5, 25)  # exponents of factors beyond _WHOLE_MAX that are named: loss scales
_SHIFT_MAX = 16  # elements: the largest shift, by padding or alignment, that is looked for
_TELLING_MIN = 3  # elements: shorter vectors can be shifted versions or multiples by chance
# Reason of a factor -> the likely cause if a gradient is too large (_ADDED) or too small (_DIVIDED)
# by it.
_ADDED = {
    "world_size": "gradients are added over the workers, not averaged",
    "accumulation": "the loss is not divided by the number of micro-batches",
    "batch_size": "the loss is the sum over samples, not their mean",
}
_DIVIDED = {
    "world_size": "gradients are divided by the number of workers twice",
    "accumulation": "the loss is divided by the number of micro-batches twice",
    "batch_size": "the loss is divided by the number of samples twice",
}


def of(
    expected: Vector,
    got: Vector,
    scenario: Scenario | None = None,
    bound: float = EXACT,
    *,
    of_gradients: bool = False,
) -> str:
    """Return how `got` follows from `expected`, such as `twice as large (world_size)`, or "".

    Both vectors are flat. The result is "" if their sizes differ, if they have NaN or infinities,
    or if they have no simple relation. `bound` is the relative L2 distance that rounding explains.
    With `of_gradients`, a possible cause of the factor is added.
    """
    right, wrong = expected.astype(np.float64), got.astype(np.float64)
    if right.shape != wrong.shape or not (np.isfinite(right).all() and np.isfinite(wrong).all()):
        return ""
    if not right.any():
        return ""
    if not wrong.any():
        return "it is zero"
    allowed = min(max(bound, EXACT), _LOOSEST)
    factor = ratio(right, wrong, allowed)
    if factor is None:
        return _of_order(right, wrong, allowed)
    if abs(factor + 1) <= allowed:
        return "it has the opposite sign"
    words = multiple(right, wrong, scenario, allowed)
    cause = _cause(factor, scenario, allowed) if words and of_gradients else ""
    meaning = f", {MEANING}{cause}" if cause else ""
    return f"it is {words}{meaning}" if words else ""


def multiple(
    expected: Vector,
    got: Vector,
    scenario: Scenario | None = None,
    bound: float = EXACT,
    *,
    measure: str = "large",
) -> str:
    """Return which multiple of `expected` is `got`, such as `twice as large (world_size)`, or "".

    The result is also "" if they are equal or opposite. `measure` replaces the word "large".
    """
    right = expected.astype(np.float64)
    bound = min(max(bound, EXACT), _LOOSEST)
    factor = ratio(right, got, bound)
    if factor is None or abs(abs(factor) - 1) <= bound:
        return ""
    simple = named(abs(factor), scenario, bound)
    sign = " and of the opposite sign" if factor < 0 else ""
    if simple is None:
        if np.count_nonzero(right) < _TELLING_MIN:
            return ""
        return f"{abs(factor):.6g} times as {measure}{sign}, in all elements"
    shown, reason = simple
    size = {"2": "twice", "1/2": "half"}.get(shown, f"{shown} times" if "/" not in shown else shown)
    return f"{size} as {measure}{f' ({reason})' if reason else ''}{sign}"


def ratio(expected: Vector, got: Vector, bound: float = EXACT) -> float | None:
    """Return the factor c with got = c * expected within `bound`, or None if there is none.

    `bound` is the largest L2 distance of the two sides, relative to the norm of `got`.
    """
    right, wrong = expected.astype(np.float64), got.astype(np.float64)
    square, norm = float(np.dot(right, right)), float(np.linalg.norm(wrong))
    if not square or not norm or not math.isfinite(square + norm):
        return None
    factor = float(np.dot(right, wrong)) / square
    return factor if np.linalg.norm(wrong - factor * right) <= bound * norm else None


def named(factor: float, scenario: Scenario | None, bound: float = EXACT) -> tuple[str, str] | None:
    """Return a simple factor as text, and its reason (`1/4`, `1/accumulation`), else None.

    The reason is "" if the number is simple, but nothing in `scenario` explains it.
    """
    for number, shown, reason in _known(scenario):
        if abs(factor - number) <= bound * number:
            return shown, reason
    return None


def _cause(factor: float, scenario: Scenario | None, bound: float) -> str:
    """Return the likely cause if a gradient is `factor` times the right one; "" if unknown."""
    simple = named(factor, scenario, bound)
    if simple is None or "root" in simple[1]:
        return ""
    reason = simple[1]
    table = _DIVIDED if reason.startswith("1/") else _ADDED
    causes = [cause for name, cause in table.items() if name in reason]
    return (" or " if " or " in reason else ", and ").join(causes)


def _of_order(right: Vector, wrong: Vector, bound: float) -> str:
    """Return a phrase if `wrong` has `right`'s elements shifted or in another order, else ""."""
    if right.size < _TELLING_MIN or np.unique(right).size < _TELLING_MIN:
        return ""
    allowed = bound * float(np.linalg.norm(right))
    for places in range(1, min(_SHIFT_MAX, right.size - _TELLING_MIN) + 1):
        for left, moved in ((right[:-places], wrong[places:]), (right[places:], wrong[:-places])):
            near = np.linalg.norm(left - moved) <= bound * np.linalg.norm(left)
            if near and np.unique(left).size >= _TELLING_MIN:
                by = "one element" if places == 1 else f"{places} elements"
                return f"it is shifted by {by}"
    if np.linalg.norm(np.sort(right) - np.sort(wrong)) <= allowed:
        return "it has the same values in another order"
    return ""


def _known(scenario: Scenario | None) -> Iterator[tuple[float, str, str]]:
    """Yield the simple factors: (number, the number as text, the reason in `scenario` or "")."""
    reasons: dict[int, str] = {}
    if scenario is not None:
        reasons = {scenario.batch_size: "batch_size"} if scenario.batch_size > 1 else {}
        reasons |= _reasons(
            {"world_size": scenario.world_size, "accumulation": scenario.accumulation}
        )
    wholes = {*range(2, _WHOLE_MAX + 1), *(2**power for power in _POWERS), *reasons}
    for whole in sorted(wholes):
        power = round(math.log2(whole))
        scale = f"2^{power}" if whole == 2**power and whole > _WHOLE_MAX else ""
        over = f"2^-{power}" if scale else ""
        reason = reasons.get(whole, "")
        yield whole, str(whole), reason or scale
        inverse = f"1/({reason})" if " " in reason else f"1/{reason}"
        yield 1 / whole, f"1/{whole}", inverse if reason else over
    for whole, reason in reasons.items():
        if math.isqrt(whole) ** 2 != whole:
            yield math.sqrt(whole), f"{math.sqrt(whole):.6g}", f"the root of {reason}"
            yield 1 / math.sqrt(whole), f"{1 / math.sqrt(whole):.6g}", f"1/the root of {reason}"


def _reasons(counts: Mapping[str, int]) -> dict[int, str]:
    """Return number -> reason, for each count above 1 and for the product of all counts."""
    reasons: dict[int, str] = {}
    for name, count in counts.items():
        if count > 1:
            reasons[count] = f"{reasons[count]} or {name}" if count in reasons else name
    whole = math.prod(counts.values())
    if whole > 1:
        reasons.setdefault(whole, " * ".join(counts))
    return reasons
