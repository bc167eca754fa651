"""Compare the tensors and learning rates of two runs, bit for bit or within a bound.

The distance of two tensors is measured relative to their own L2 norm. One bound for all tensors
together would hide a small tensor behind a large one, and one for each element would report
rounding noise. A norm below 1 / NOISE_SHARE of the norm of all tensors together is raised to that
value, since the tensor may be only noise. A large tensor has a sketch instead of values: a
projection on 32 directions. The distance of two projections equals that of the tensors, up to a
factor of known distribution (PROJECTED).

Each comparison is counted. A difference is reported at its worst element, with both values. If one
tensor is, for example, twice the other, the report says so in words (`factors`). Exact comparisons
use digests, so they need no values. Results of a device are compared with a rounding bound that was
computed for them (wgpu-backend-v1). Learning rates are products of a few float64 numbers, and have
their own bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import Values, factors
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Explained,
    TensorRecord,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Tally

# A gradient's rounding error is proportional to its terms. In one tensor the terms may cancel
# almost completely, so each tensor's norm is taken as at least 1 / NOISE_SHARE of the norm of all.
NOISE_SHARE = 32


# For a projection P x (`trace.Sketch`), |P x|^2 / |x|^2 has a chi-square distribution with 32
# degrees of freedom, divided by 32, or a narrower one. A projection's distance is more than twice
# the true distance with a probability of 1e-13, and less than half of it with a probability of
# 1e-6. So distances of projections may exceed the bound by this factor.
PROJECTED = 2.0


def norm_l2(tensors: Tensors) -> float | None:
    """Return the L2 norm of all elements of all tensors together.

    None if there are no tensors, or if any has neither values nor a sketch.
    """
    squares = [record.square() for record in tensors.values()]
    known = [square for square in squares if square is not None]
    return math.sqrt(sum(known)) if known and len(known) == len(squares) else None


def norm_rounding(tensors: Tensors) -> float:
    """Return the largest relative error of a norm that was computed in float32.

    On CPUs torch adds up the squares of a tensor in eight sums, each rounded once per element. So
    the relative error of the norm of n elements is at most n / 2**28. Unless most elements are
    equal, the norm is too small, and a gradient that is clipped by it remains too long by the same
    fraction. Measured errors are 0.02 % with 2**19 elements, 0.6 % with 2**24 (where a few large
    elements hide the rest, as in the last layer of a language model), and 0.9 % with 2**26. The
    returned bound is about twice the last value, and grows as n**1.5 above that size.
    """
    size = max((record.size or 0 for record in tensors.values()), default=0)
    return min(size / 2**28, 0.02 * math.pow(max(1.0, size / 2**26), 1.5))


def compare_close(
    tally: Tally,
    expected: Tensors,
    got: Tensors,
    bound: float,
    message: str,
    floor: float = 0.0,
    *,
    explain: Callable[[], str] = str,
    of_gradients: bool = False,
    cancelled: Mapping[str, float] | None = None,
    **place: Any,
) -> bool:
    """Count one comparison per tensor: |got - expected| <= bound |expected| + floor, in L2 norms.

    |expected| is the tensor's own norm, so that a small tensor can't hide behind a large one. It
    counts as at least 1 / NOISE_SHARE of the norm over all tensors, so that a tensor of rounding
    noise does not fail. For tensors with sketches, the distance of the projections is compared, and
    the bound is multiplied by PROJECTED. `cancelled` maps tensor names to how many times larger the
    terms are than their sum; the bound is multiplied by this factor, too. If a wrong tensor is not
    a simple multiple of the right one, `explain()` ends the message. Return False and count nothing
    if a tensor has neither values nor a sketch, or if only one side has a sketch of it.
    """
    gaps = distances(expected, got)
    if gaps is None:
        return False
    for name, record in expected.items():
        if name not in gaps:
            if name not in got or got[name].size != record.size:
                what = f"{message}: {name} is missing, or has a different shape"
                tally.check(False, what, tensor=name, **place)
            continue
        gap = gaps[name]
        sketched = record.sketch is not None
        allowed = PROJECTED * bound if sketched else bound
        allowed *= (cancelled or {}).get(name, 1.0)
        near = gap.distance <= allowed * gap.size + (PROJECTED * floor if sketched else floor)
        words = ""
        if not near:
            words = factors.of(
                *(gap.expected, gap.got, place.get("scenario"), bound), of_gradients=of_gradients
            )
            if not words and tally.would_keep(place.get("step", 0)):
                words = explain()
        tally.check(
            near,
            f"{message}: {name} is off by {gap.relative:.2g} of its norm, allowed {allowed:.2g}"
            f"{words and f': {words}'}",
            tensor=name,
            **furthest(record, got[name], gap.elements),
            **place,
        )
    return True


class Gap(NamedTuple):
    """The values or projections of two tensors, flat, and their distance.

    `elements` has the absolute difference of each element, and `distance` is its L2 norm. `size` is
    the norm that the distance is relative to.
    """

    expected: Values
    got: Values
    elements: Values
    distance: float
    size: float

    @property
    def relative(self) -> float:
        """The distance divided by the size, or the distance itself if the size is zero."""
        return self.distance / self.size if self.size else self.distance


def distances(expected: Tensors, got: Tensors) -> dict[str, Gap] | None:
    """Return name -> Gap. Empty tensors, and tensors that differ in size, are left out.

    Return None if a tensor has neither values nor a sketch, or if only one side has a sketch.
    """
    left, right = evidence.vectors(expected), evidence.vectors(got)
    if left is None or right is None or norm_l2(expected) is None:
        return None
    squares = {name: _finite_square(record) for name, record in expected.items()}
    scale = math.sqrt(math.fsum(squares.values()))
    if any(
        (record.sketch is None) != (got[name].sketch is None)
        for name, record in expected.items()
        if name in got
    ):
        return None
    gaps = {}
    for name, value in left.items():
        if name not in right or got[name].size != expected[name].size or not value.size:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(right[name].astype(np.float64) - value)
            apart[right[name] == value] = 0.0  # infinities that are equal, as in an additive mask
            distance = float(np.sqrt(np.square(apart).sum()))
        size = max(math.sqrt(squares[name]), scale / NOISE_SHARE)
        gaps[name] = Gap(value, right[name], apart, distance, size)
    return gaps


def _finite_square(record: TensorRecord) -> float:
    square = record.square() or 0.0
    if math.isfinite(square):
        return square
    values = record.values()
    finite = np.zeros(0) if values is None else values[np.isfinite(values)].astype(np.float64)
    return float(finite @ finite)


def furthest(expected: TensorRecord, got: TensorRecord, gap: Values) -> dict[str, Any]:
    """Return the index of the element with the largest `gap`, and both values of that element.

    If values are unknown, return both norms.
    """
    left, right = expected.values(), got.values()
    if left is None or right is None:
        norms = (math.sqrt(record.square() or 0.0) for record in (expected, got))
        return dict(zip(("expected", "got"), (f"norm {norm:.9g}" for norm in norms), strict=True))
    element = int(gap.argmax()) if np.isfinite(gap).all() else int(np.argmin(np.isfinite(gap)))
    return {"element": element, "expected": str(left[element]), "got": str(right[element])}


# --- bit for bit ----------------------------------------------------------------------------------


def compare_exact(
    tally: Tally, expected: Tensors, got: Tensors, message: str, *, words: str = "", **place: Any
) -> None:
    """Compare tensors bit for bit, with one comparison per tensor.

    A tensor that only one side has counts as a difference. The message ends with `words`, or if
    that is "", with a simple relation between the two tensors (twice as large, shifted), if there
    is one.
    """
    for name in [*expected, *(name for name in got if name not in expected)]:
        left, right = expected.get(name), got.get(name)
        if left is None or right is None:
            holder = "expected" if right is None else "got"
            tally.check(False, f"{message}: only {holder} holds {name}", tensor=name, **place)
        elif left.digest == right.digest:
            tally.compared += 1
        else:
            shown = difference(left, right)
            told = f": {words}" if words else _relation(left, right, place.get("scenario"))
            tally.check(False, f"{message}: {name} differs{told}", tensor=name, **shown, **place)


def _relation(expected: TensorRecord, got: TensorRecord, scenario: Scenario | None) -> str:
    left, right = expected.vector(), got.vector()
    if left is None or right is None:
        return ""
    words = factors.of(left, right, scenario)
    return f": {words}" if words else ""


def compare_updates(
    tally: Tally, model: Trace, trace: Trace, part: str, message: str, *, before: float = math.inf
) -> None:
    """Compare `part` of each update before step `before` with that of `model`, bit for bit.

    In `model`, the update of the lowest rank stands for all ranks.
    """
    expected = evidence.updates(model)
    for step, by_rank in evidence.ranks_by_step(trace):
        for _, update in sorted(by_rank.items()):
            if step < before and step not in expected:
                tally.check(
                    False, f"step {step} is not in the other run", **evidence.place(trace, update)
                )
            elif step < before:
                wanted, got = (
                    getattr(evidence.any_rank(expected[step]), part),
                    getattr(update, part),
                )
                compare_exact(tally, wanted, got, message, **evidence.place(trace, update))


def compare_steps_made(tally: Tally, lost: Iterable[int], trace: Trace, words: str = "") -> None:
    """Count one comparison, which fails if `lost` has steps: the run did not complete these."""
    steps = sorted(lost)
    message = f"{words}steps {steps[:5]} were never made"
    tally.check(not steps, message, step=min(steps, default=None), scenario=trace.scenario)


def difference(expected: TensorRecord, got: TensorRecord) -> dict[str, Any]:
    """Return the index of the first element that differs, and both values, for a counterexample.

    If values are unknown, return both digests; if sizes or dtypes differ, both sizes or dtypes.
    """
    left, right = expected.values(), got.values()
    if left is None or right is None:
        return {"expected": expected.digest, "got": got.digest}
    if (left.size, left.dtype) != (right.size, right.dtype):
        return {
            "expected": f"{left.size} elements of {left.dtype}",
            "got": f"{right.size} elements of {right.dtype}",
        }
    bits = left.view(np.uint8) != right.view(np.uint8)
    if not bits.any():  # equal values with different digests: one of them was edited
        return {"expected": expected.digest, "got": got.digest}
    element = int(bits.argmax()) // left.itemsize
    return {"element": element, "expected": str(left[element]), "got": str(right[element])}


# --- a device's results, within the rounding bound --------------------------------------------


def judge_explained(tally: Tally, item: Explained, trace: Trace) -> None:
    """Compare a device's tensor with its rounding bound: its worst element, and its sum of errors.

    These are two comparisons. One with an infinite bound, which no error could exceed, is counted
    as missing. A note says how many elements have no bound.
    """
    what = f"{item.of}: {item.tensor}"
    place = {"tensor": item.tensor, **evidence.place(trace, item)}
    if not tally.check(item.finite, f"{what} is not finite", **place):
        return
    if not item.num_bounded or math.isinf(item.bound):
        tally.miss(f"{what}: no element of {item.num_elements} has a bound")
    else:
        if without := item.num_elements - item.num_bounded:
            tally.note(f"{what}: {without} of {item.num_elements} elements have no bound")
        message = (
            f"{what} is off by {item.error:.3g} from float64 at element {item.element}, rounding "
            f"explains at most {item.bound:.3g}"
        )
        tally.at_most(item.bound, item.error, message, form=".3g", element=item.element, **place)
    if math.isinf(item.total_bound):
        tally.miss(f"{what}: its elements together have no bound")
    elif item.total_bound or item.total_error:
        message = (
            f"{what} is off by {item.total_error:.3g} from float64, all elements together; "
            f"rounding explains at most {item.total_bound:.3g}"
        )
        tally.at_most(item.total_bound, item.total_error, message, form=".3g", **place)


# --- learning rates -------------------------------------------------------------------------------


RATE_BOUND = 1e-6  # relative: a rate is the product of a few float64 numbers
Rates = dict[str | None, tuple[float, float]]


def rates_of(model: Update, update: Update) -> Rates:
    """Return parameter -> (rate in `model`, rate in `update`). None is the first parameter group.

    The named tensors are those in later groups. A tensor is left out if either optimizer has states
    but none for this tensor: then the optimizer of another rank updates it.
    """
    rates: Rates = {None: (model.learning_rate, update.learning_rate)}
    names = dict.fromkeys((*model.rates, *update.rates))
    stepped = [{key.rpartition("/")[0] for key in one.optimizer} for one in (model, update)]
    for name in names:
        own = (model.rates, stepped[0]), (update.rates, stepped[1])
        if all(name in given or not held or name in held for given, held in own):
            rates[name] = model.rate_of(name), update.rate_of(name)
    return rates


def first_unlike_rates(model: Update, update: Update) -> tuple[str | None, float, float] | None:
    """Return the first tensor with different rates, and both rates; None if all are equal.

    The name is None for the first parameter group.
    """
    return next(
        (((n, *pair)) for n, pair in rates_of(model, update).items() if pair[0] != pair[1]), None
    )


def is_schedule_elsewhere(straight: Trace, resumed: Trace) -> bool:
    """Return whether a resumed run has a wrong position in its schedule, but still the right rates.

    A rate that was restored with the optimizer's state stays until the schedule's next step.
    """
    expected, elsewhere = evidence.updates(straight), False
    for step, by_rank in evidence.ranks_by_step(resumed):
        for rank, update in by_rank.items():
            if (model := expected.get(step, {}).get(rank)) is None:
                continue
            if first_unlike_rates(model, update) is not None:
                return False
            elsewhere |= None not in (model.schedule, update.schedule) and (
                model.schedule != update.schedule
            )
    return elsewhere


def step_of_rate(
    name: str | None, rate: float, updates: Mapping[int, Mapping[int, Update]]
) -> int | None:
    """Return the only step in which tensor `name` has this rate.

    None if no step or several have it.

    If `name` is None, the rate is that of the first parameter group.
    """
    steps = []
    for step, by_rank in updates.items():
        model = evidence.any_rank(by_rank)
        known = model.learning_rate if name is None else model.rate_of(name)
        if math.isclose(rate, known, rel_tol=RATE_BOUND):
            steps.append(step)
    return steps[0] if len(steps) == 1 else None


def compare_rates(
    tally: Tally,
    model: Update,
    update: Update,
    expected: Mapping[int, Mapping[int, Update]],
    trace: Trace,
    message: str,
) -> None:
    """Compare the learning rates of `update` with those of `model`, in one step.

    The schedule needs no closed form. `expected` has all updates of the run of `model`, so that the
    message can name the step with this rate; `trace` is the run of `update`.
    """
    for name, (due, got) in rates_of(model, update).items():
        right = math.isclose(due, got, rel_tol=RATE_BOUND)
        words = (
            ""
            if right
            else _relation_of_rates(name, due, got, update.step, expected, trace.scenario)
        )
        tally.check(
            right,
            f"{message}{words}",
            tensor=name,
            expected=repr(due),
            got=repr(got),
            **evidence.place(trace, update),
        )


def _relation_of_rates(
    name: str | None,
    due: float,
    got: float,
    step: int,
    expected: Mapping[int, Mapping[int, Update]],
    scenario: Scenario,
) -> str:
    """Return a phrase about a wrong rate: the step that has it, or its factor; "" if unknown."""
    other = step_of_rate(name, got, expected)
    if other is not None and other != step:
        counts = {"worker": scenario.world_size, "micro-batch": scenario.accumulation}
        for_each = [what for what, count in counts.items() if count > 1 and other == step * count]
        moved = f", as if the schedule moved once for each {for_each[0]}" if for_each else ""
        return f": it is step {other}'s{moved}"
    words = factors.of(np.array([due]), np.array([got]), scenario)
    return f": {words}" if words else ""
