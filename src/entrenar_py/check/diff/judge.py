"""The judge of two runs: is a difference rounding, and where is the first that is not?

The first run was repeated with its last bits disturbed. The largest distance of these runs at a
border is the *spread* there: what rounding does to this training up to this place, grown over the
steps. A difference of at most MULTIPLE times the spread is rounding. Where the disturbance happens
to change little, the spread is too small, so the limit is at least FLOOR times the rounding of one
sum: eps of the dtype, times the norm of the value, times the root of the number of terms.

This module is pure: it reads records of runs, and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from entrenar_py.check.diff.alignment import Alignment, Pair, align
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, RankBorders

Ranks = Sequence[RankBorders]

MULTIPLE = 4.0
FLOOR = 2.0
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# These explain differences. Alone they are none: a generator may be used for nothing that matters.
_EXPLAINING = (border_file.GENERATOR, border_file.SAMPLES)
_TURNED = 3  # elements of an update that rounding may turn around; more of a large tensor:
_TURNED_SHARE = 20  # one in this many
_GRADIENTS = (border_file.OUTPUT_GRADIENT, border_file.PARAMETER_GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference at one border. `first` or `second` is None if only the other run has a value.

    - `distance`: the norm of the difference, infinite if the values can't be subtracted.
    - `spread`: the largest distance of the disturbed runs.
    - `limit`: the largest distance that is rounding.
    - `order`: the place in the order of execution of the first run.
    """

    rank: int
    first: Border | None
    second: Border | None
    distance: float
    spread: float
    limit: float
    order: float

    @property
    def border(self) -> Border:
        """The border of the run that has one, the first if both do."""
        border = self.first or self.second
        assert border is not None, "one of both has a value"
        return border

    @property
    def is_real(self) -> bool:
        """True if rounding does not explain the difference."""
        return self.distance > self.limit

    @property
    def ratio(self) -> float:
        """The distance in units of its limit; above 1 it is real."""
        if math.isinf(self.limit) or not self.distance:
            return 0.0
        return self.distance / self.limit if self.limit else math.inf


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the comparison of two runs has shown.

    - `real`: the first difference that rounding does not explain, or None.
    - `bits`: the first difference at all, or None if all compared bits are equal.
    - `differences`: one for each judged border, in order.
    - `alignment`: what was paired, and what can't be compared.
    - `explaining`: samples and generators that differ, up to the first real difference.
    - `undecided`: why the values after a step are not judged, "" if all are.
    """

    real: Difference | None
    bits: Difference | None
    differences: Sequence[Difference]
    alignment: Alignment
    explaining: Sequence[Pair] = field(default=())
    undecided: str = ""


def judge(first: Ranks, second: Ranks, disturbed: Sequence[Ranks]) -> Judgement:
    """Return the judgement of two runs, where `disturbed` are the disturbed runs of the first."""
    paired = align(first, second)
    spreads, unseeded = spread(first, disturbed)
    differences, explaining = list[Difference](), list[Pair]()
    for pair in paired.pairs:
        if pair.first.kind in _EXPLAINING:
            differs = pair.first.digest != pair.second.digest
            explaining += [pair] if differs and pair.first.name not in unseeded else []
        elif is_comparable(pair):
            differences.append(difference(pair, spreads.get((pair.rank, pair.first.order), 0.0)))
    lone = [*_one_sided(paired)]
    differences += [each for each in lone if _reaches_parameters(each, [*differences, *lone])]
    differences.sort(key=lambda each: (each.border.step, each.order, each.rank))
    turned = next((each for each in differences if each.is_real and _is_turned(each)), None)
    judged = [each for each in differences if turned is None or _precedes(each, turned)]
    real = next((each for each in judged if each.is_real and not _is_turned(each)), None)
    undecided = ""
    if turned is not None and real is None:
        undecided = _why_undecided(turned, differences[-1].border.step)
        differences = judged
    if real is not None:
        end = (real.border.step, real.order)
        explaining = [pair for pair in explaining if (pair.first.step, pair.first.order) <= end]
    return Judgement(
        real=real,
        bits=next((each for each in differences if each.distance > 0), None),
        differences=differences,
        alignment=paired,
        explaining=explaining,
        undecided=undecided,
    )


def _why_undecided(turned: Difference, last: int) -> str:
    """Return why the steps after an update that rounding has turned can't be judged.

    Their values differ by the turned elements, and whether by more is not known.
    """
    step, name = turned.border.step, turned.border.name
    if step == last:
        return ""
    later = f"step {last} is" if step + 1 == last else f"steps {step + 1} to {last} are"
    return (
        f"{later} not judged: rounding turns elements of the update of {name} around in step "
        f"{step}, where the gradient is nearly zero; --steps {step + 1} judges what comes before, "
        f"and runs that begin at a checkpoint of step {step + 1} what comes after"
    )


def _is_turned(difference: Difference) -> bool:
    """Return whether only a few elements of an update differ more than by rounding.

    Adam steps by the sign of a gradient at first, and by rounding in either direction if that is
    nearly zero. This happens to few elements, and seldom to the same ones in a disturbed run.
    """
    first, second = difference.first, difference.second
    if difference.border.kind != border_file.UPDATE or first is None or second is None:
        return False
    if first.numbers is None or second.numbers is None or not math.isfinite(difference.distance):
        return False
    num_elements = _size(first)
    apart = np.abs(first.numbers.astype(np.float64) - second.numbers)
    if len(apart) == num_elements:
        rest = np.sort(apart)[: -max(_TURNED, num_elements // _TURNED_SHARE)]
        return float(np.linalg.norm(rest)) <= difference.limit
    largest = float(np.linalg.norm(first.numbers)) / math.sqrt(num_elements)
    return difference.distance <= 2 * largest * math.sqrt(2 * _TURNED)


def _precedes(difference: Difference, turned: Difference) -> bool:
    """Return whether a difference does not follow from an update that rounding has turned."""
    border, step = difference.border, turned.border.step
    return border.step < step or (border.step == step and border.kind != border_file.PARAMETER)


def spread(
    first: Ranks, disturbed: Sequence[Ranks]
) -> tuple[dict[tuple[int, int], float], set[str]]:
    """Return the largest distance of the `disturbed` runs from the first, by rank and order.

    It is infinite where rounding decides a choice, such as the experts of a token.
    The second result are the generators that differ without a reason: they have no seed.
    """
    largest: dict[tuple[int, int], float] = {}
    unseeded = set[str]()
    for run in disturbed:
        for pair in align(first, run).pairs:
            place = (pair.rank, pair.first.order)
            away = distance(pair.first, pair.second)
            if pair.first.kind not in _EXPLAINING:
                largest[place] = max(largest.get(place, 0.0), away)
            elif away and pair.first.kind == border_file.GENERATOR:
                unseeded.add(pair.first.name)
    return largest, unseeded


def difference(pair: Pair, spread_here: float) -> Difference:
    """Return the difference of a pair, given the spread at its border."""
    return Difference(
        rank=pair.rank,
        first=pair.first,
        second=pair.second,
        distance=distance(pair.first, pair.second),
        spread=spread_here,
        limit=max(MULTIPLE * spread_here, FLOOR * rounding(pair.first, pair.second)),
        order=pair.first.order,
    )


def distance(first: Border, second: Border) -> float:
    """Return the norm of the difference of two values; infinity if they can't be subtracted."""
    if first.digest == second.digest:
        return 0.0
    if first.numbers is None or second.numbers is None or _size(first) != _size(second):
        return math.inf
    if len(first.numbers) != len(second.numbers):  # only one tensor has infinite elements
        return math.inf
    one, other = first.numbers.astype(np.float64), second.numbers.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, one - other)
        norm = float(np.linalg.norm(apart))
    return norm if math.isfinite(norm) else math.inf


def rounding(first: Border, second: Border) -> float:
    """Return the rounding of one sum with the value's norm, in the coarser of both dtypes."""
    eps = max(EPS.get(border.dtype, 0.0) for border in (first, second))
    scale = max(first.scale, second.scale)
    return eps * scale * math.sqrt(first.fan_in) if math.isfinite(scale) else 0.0


def is_comparable(pair: Pair) -> bool:
    """Return whether a difference of a pair would say something.

    Inner modules may be called with other arguments that mean the same, such as a mask of another
    dtype or no mask at all.
    """
    first, second = pair.first, pair.second
    is_inner = first.kind == border_file.INPUT and first.name != ""
    return not is_inner or (
        first.shape == second.shape
        and (first.numbers is None) == (second.numbers is None)
        and (first.numbers is not None or first.dtype == second.dtype)
    )


def _size(border: Border) -> int:
    return math.prod(border.shape)


def _one_sided(paired: Alignment) -> Iterator[Difference]:
    """Yield gradients that only one run has, though both have the value that it belongs to."""
    both = {_place(pair.rank, pair.first): pair for pair in paired.pairs}
    units = {
        (pair.rank, pair.first.step, pair.first.micro_batch, pair.first.kind)
        for pair in both.values()
    }
    orders = sorted(
        (pair.second.step, pair.second.order, pair.first.order) for pair in both.values()
    )
    sides = ((paired.only_first, True), (paired.only_second, False))
    for borders, is_first in sides:
        for rank, border in borders:
            unit = (rank, border.step, border.micro_batch, border.kind)
            if border.kind not in _GRADIENTS or not border.scale or unit not in units:
                continue
            if border.kind == border_file.OUTPUT_GRADIENT:
                output = (
                    rank,
                    border.step,
                    border.micro_batch,
                    border_file.OUTPUT,
                    *border.key[1:],
                )
                if output not in both:
                    continue
            order = float(border.order) if is_first else _order_in_first(border, orders)
            yield Difference(
                rank=rank,
                first=border if is_first else None,
                second=None if is_first else border,
                distance=border.scale,
                spread=0.0,
                limit=0.0,
                order=order,
            )


def _reaches_parameters(lone: Difference, differences: Sequence[Difference]) -> bool:
    """Return whether a gradient that only one run has makes gradients of parameters differ.

    That of an output doesn't if the loss is computed from it inside of the model, and only one of
    the runs compiles the model: then autograd doesn't know the output within the other's graph.
    """
    of_parameters = [
        each.is_real
        for each in differences
        if (each.rank, each.border.step) == (lone.rank, lone.border.step)
        and each.border.kind in (border_file.PARAMETER_GRADIENT, border_file.APPLIED_GRADIENT)
    ]
    is_output = lone.border.kind == border_file.OUTPUT_GRADIENT
    return not is_output or not of_parameters or any(of_parameters)


def _place(rank: int, border: Border) -> tuple[object, ...]:
    return (rank, border.step, border.micro_batch, *border.key)


def _order_in_first(border: Border, orders: Sequence[tuple[int, int, int]]) -> float:
    """Return the place in the first run that follows the last border before `border` of both."""
    before = [own for step, other, own in orders if (step, other) < (border.step, border.order)]
    return (before[-1] if before else 0) + 0.5


# --- what reports show ----------------------------------------------------------------------------


def losses(ranks: Ranks) -> dict[int, float]:
    """Return by step the mean loss of all micro-batches of all ranks."""
    by_step: dict[int, list[float]] = {}
    for rank in ranks:
        for border in rank.borders:
            if border.kind == border_file.LOSS and border.numbers is not None:
                by_step.setdefault(border.step, []).append(float(border.numbers[0]))
    return {step: math.fsum(values) / len(values) for step, values in sorted(by_step.items())}


def heat(differences: Sequence[Difference]) -> Mapping[tuple[str, int], float]:
    """Return by module and step the largest ratio of a distance to its limit."""
    largest: dict[tuple[str, int], float] = {}
    for difference_here in differences:
        border = difference_here.border
        of_parameter = border.kind in (
            *(border_file.PARAMETER_GRADIENT, border_file.APPLIED_GRADIENT, border_file.UPDATE),
            *(border_file.PARAMETER, border_file.BUFFER),
        )
        module = border.name.rpartition(".")[0] if of_parameter else border.name
        module = border_file.RATE if border.kind == border_file.RATE else module
        place = (module, border.step)
        largest[place] = max(largest.get(place, 0.0), difference_here.ratio)
    return largest
