"""Bounds for comparisons: how far rounding may move two correct runs apart.

Two correct runs add the same terms in different orders. So they differ by roundings, and no two
runs on different numbers of workers have the same bits. Three classes decide how wide the bound of
a comparison is. Each measures the runs themselves:

- `Bounds`: by the arithmetic of the coarsest run. The bounds of float32 were derived from the
  number of terms and measured over thousands of scenarios. They are larger for 16 bits, and for
  later steps under Adam, which moves an element with a gradient of rounding noise as far as any
  other.
- `sent_in`: by the dtype in which gradients pass between ranks, as declared or as their sums show.
- `Sensitivity`: a ReLU, a maximum or a router near its kink turns one rounding into a whole term,
  and a learning rate that is far too high doubles every difference in every step. No static bound
  allows for that. So if two runs differ by little, a third run shows what rounding does: the run on
  one worker, with its first weights nudged by some roundings (`Fault` of kind `nudged_weights`).
  Its distance from the run without the nudge is the sensitivity, step by step.

The alternative, a wider static bound, would hide wrong gradients in all training runs for the sake
of the few that are chaotic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, precision, step_sums
from entrenar_py.check.evidence.factors import Vector
from entrenar_py.check.evidence.needs import NUDGED, Runs
from entrenar_py.check.evidence.step_sums import Vectors
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Update

# Relative L2 distance of two float32 gradients of one batch that were added in different orders.
# Each is within n u |terms| of the exact sum, with u = 2^-24 and n < 300 terms here: 2e-5 times the
# cancellation among the terms. Errors of random sign are far smaller: the largest in 3,000 random
# scenarios was 2.1e-6 (docs/numerics.md). The bound is small enough to detect a gradient that was
# rounded to bf16 (off by 1e-3), fp16 or TF32 (off by 1.4e-4).
GRADIENT_BOUND = 1e-4


# The same for a loss: n u, since its terms have one sign and don't cancel. The largest measured was
# 2.3e-7.
LOSS_BOUND = 2e-5


# A fraction of the largest loss (or gradient) in the first steps. A later loss below it is only
# rounding: the data are learned. Weights are off by some u |w|. A gradient is about proportional to
# their distance from the minimum, so it is off by some u times the largest gradient: 16 u.
LEARNED_AWAY = 2.0**-20


# Initial weights are drawn, not summed: two libraries or devices may differ in the last bits.
START_BOUND = 2.0**-20


# After these first steps, rounding differences grow along the trajectory, faster than any static
# bound allows. Later steps are judged by the published bound only.
ROUNDING_STEPS = 4


# Adam's first step is +-rate even for a gradient that is rounding noise. Weights then differ by up
# to twice the rate, and later gradients with them: by 9.5e-4 by step 3 in 700 random scenarios.
# This bound still detects a gradient that is stale, doubled or of a different step.
ADAM_GRADIENT_BOUND = 1e-2


ADAM_LOSS_BOUND = 1e-3


# For runs in 16 bits, in units of one rounding of that precision. A gradient passes through every
# layer twice, and the rounding of each number depends on the order of a sum. The largest measured
# in 4 seeds of 4 scripts in bfloat16, with and without autocast: 5 for a gradient, 1.1 for a loss.
COARSE_GRADIENT_UNITS = 16


COARSE_LOSS_UNITS = 4


def rounded_away(trace: Trace) -> str:
    """Return why the run's gradients can't be compared within rounding; "" if they can.

    Gradients sent in 16 bits can be compared within the rounding of 16 bits. If nobody declares the
    dtype, only single elements show it, and a sketch of a large tensor has few elements.
    """
    compressed = trace.traits.compressed
    if not compressed and _is_sketched(trace) and (seen := sent_in(trace)):
        return (
            f"sums of gradients are rounded to {seen}, which was not declared: declare "
            f"observe(..., reduce_dtype=torch.{seen}), or torch.float32 if sums must not be rounded"
        )
    if compressed in ("", "float32", *precision.SIXTEEN):
        return ""
    return (
        f"gradients are compressed by {compressed}, which rounds in an unknown way: "
        "leave the hook out, or use fp16_compress_hook"
    )


def _is_sketched(trace: Trace) -> bool:
    first = next(iter(trace.of(Update)), None)
    return first is not None and any(r.sketch is not None for r in first.gradient.values())


def sent_in(trace: Trace) -> str:
    """Return what compresses gradients between ranks, as declared or as their sums show.

    Return "" if nothing does. A script may round them to 16 bits by hand.
    """
    return trace.traits.compressed or undeclared_format(trace, GRADIENT_BOUND)


@dataclass(frozen=True)
class Bounds:
    """The allowed distances of losses, gradients and weights: relative, and absolute floors."""

    loss: float  # relative, in step 0
    loss_moved: float  # relative, in later steps
    gradient: float
    gradient_moved: float
    weights: float
    start: float
    loss_floor: float  # absolute: a smaller distance is only rounding
    gradient_floor: float
    adam: bool  # whether a run uses Adam; then weights can't be compared

    def gradient_at(self, step: int) -> float:
        """Return the allowed relative distance of two gradients of a step."""
        return self.gradient_moved if step else self.gradient

    @classmethod
    def of(cls, expected: Mapping[int, Mapping[int, Update]], *runs: Trace) -> Bounds:
        first = [evidence.any_rank(expected[step]) for step in expected if step < ROUNDING_STEPS]
        losses = (abs(update.loss or 0.0) for update in first)
        norms = (closeness.norm_l2(update.gradient) or 0.0 for update in first)
        adam = any(run.scenario.optimizer == "adamw" for run in runs)
        adam = adam or is_adaptive(*runs)
        own = [run for run in runs if run.scenario.workload == "own"]
        sent = [
            precision.SIXTEEN[name][0] for name in map(sent_in, own) if name in precision.SIXTEEN
        ]
        unit = max(precision.unit(*own), *sent, precision.FLOAT32)
        coarse = unit > precision.FLOAT32
        loss, gradient, floor = LOSS_BOUND, GRADIENT_BOUND, LEARNED_AWAY
        if coarse:
            loss, gradient, floor = COARSE_LOSS_UNITS * unit, COARSE_GRADIENT_UNITS * unit, unit
        return cls(
            loss=loss,
            loss_moved=max(loss, ADAM_LOSS_BOUND) if adam else loss,
            gradient=gradient,
            gradient_moved=max(gradient, ADAM_GRADIENT_BOUND) if adam else gradient,
            weights=gradient,
            start=max(START_BOUND, unit) if coarse else START_BOUND,
            loss_floor=floor * _largest(losses),
            gradient_floor=floor * _largest(norms),
            adam=adam,
        )


def _largest(sizes: Iterable[float]) -> float:
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


# --- gradients that ranks rounded to 16 bits before they added them -------------------------------


_STEPS = 4  # steps to inspect
_TELLING_MIN = 16  # elements: so many hardly look rounded by chance
_EXACT = 2.0**-18  # an element that is off by a smaller fraction of its terms was not rounded
_EXACT_MOST = 0.5  # the largest fraction of exact elements in a tensor that was rounded
# Of the squared errors: a larger part along the sum comes from one factor, not from chance.
_ONE_FACTOR = 0.8
# The smallest number of each dtype, below which rounding is absolute; bfloat16 has float32's.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126}


def undeclared_format(trace: Trace, bound: float) -> str:
    """Return the undeclared dtype to which a run's sums were rounded: `float16` or `bfloat16`.

    Return "" if there is none, if it is unknown, or if local gradients have that dtype themselves.
    `bound` is the relative L2 distance up to which a float32 sum counts as not rounded further.
    """
    if precision.unit(trace) > precision.FLOAT32:
        return ""
    shards = evidence.shards(trace)
    coarsest = ""
    for step, by_rank in sorted(evidence.updates(trace).items())[:_STEPS]:
        rounded = format_of_step(shards.get(step, []), by_rank, bound)
        if rounded is None:
            return ""
        coarsest = max(coarsest, rounded, key=lambda name: precision.SIXTEEN.get(name, (0.0,))[0])
    return coarsest


def format_of_step(shards: list[Shard], by_rank: Mapping[int, Update], bound: float) -> str | None:
    """Return the dtype of a step's sums; "" if they were not rounded, None if nothing fits.

    Sums were not rounded if they are off by less than `bound`, all tensors together.
    """
    update = evidence.any_rank(by_rank)
    known = {
        rank: step_sums.total(
            by_rank, [shard for shard in shards if shard.rank == rank], evidence.elements
        )
        for rank in sorted({shard.rank for shard in shards})
    }
    local = {rank: sums for rank, sums in known.items() if sums}
    applied = evidence.elements(update.gradient)
    if (
        not local
        or applied is None
        or any(step_sums.shapes(s) != step_sums.shapes(applied) for s in local.values())
    ):
        return ""
    whole = {name: np.sum([sums[name] for sums in local.values()], axis=0) for name in applied}
    divisor = _divisor(whole, applied)
    if divisor is None:
        return ""
    off = {
        name: divisor * value.astype(np.float64) - whole[name] for name, value in applied.items()
    }
    if _size(off) <= bound * _size(whole):
        return ""
    fits = (name for name in ("float16", "bfloat16") if _fits(name, off, local))
    return next(fits, None)


def _divisor(whole: Vectors, applied: Vectors) -> float | None:
    sums = np.concatenate([whole[name] for name in applied])
    means = np.concatenate([value.astype(np.float64) for value in applied.values()])
    with np.errstate(invalid="ignore"):  # gradients that are not finite have no divisor
        ratios = sums[means != 0] / means[means != 0]
    number = float(np.median(ratios)) if ratios.size else 0.0
    return number if number and math.isfinite(number) else None


def _fits(name: str, off: Vectors, local: Mapping[int, Vectors]) -> bool:
    """Return whether rounding each rank's term, each sum and the divisor explains `off`."""
    roundings = (2 * len(local) + 1) * precision.SIXTEEN[name][0]
    floor = len(local) * _SMALLEST[name]
    terms = {n: np.sum([np.abs(sums[n]) for sums in local.values()], axis=0) for n in off}
    if not all((np.abs(gap) <= roundings * terms[n] + floor).all() for n, gap in off.items()):
        return False
    whole = {n: np.sum([sums[n] for sums in local.values()], axis=0) for n in off}
    large = [(n,) for n, gap in off.items() if gap.size >= _TELLING_MIN]
    small = tuple(n for n, gap in off.items() if gap.size < _TELLING_MIN)
    return all(
        _is_random(*(np.concatenate([held[n] for n in names]) for held in (off, whole, terms)))
        for names in (*large, small)
        if names
    )


def _is_random(gap: Vector, whole: Vector, terms: Vector) -> bool:
    """Return whether errors are scattered over elements like rounding errors.

    Also return True if no element was rounded, or if there are too few elements.
    """
    there = terms > 0
    gap, whole, terms = gap[there], whole[there], terms[there]
    exact = np.abs(gap) <= _EXACT * terms
    if gap.size < _TELLING_MIN or exact.all():
        return True
    along = float(gap @ whole) ** 2
    if along > _ONE_FACTOR * float(gap @ gap) * float(whole @ whole):
        return False
    return bool(exact.mean() <= _EXACT_MOST)


def _size(vectors: Vectors) -> float:
    return math.sqrt(sum(float(np.square(value).sum()) for value in vectors.values()))


# --- optimizers of an unknown rule ----------------------------------------------------------------


# The fraction of a move that gradient and weight may leave unexplained, by rounding. A rule that
# uses only signs leaves more.
_UNEXPLAINED = 1e-2


def is_adaptive(*runs: Trace) -> bool:
    """Return whether optimizers of an unknown rule move weights out of proportion to gradients.

    The answer is no if one run has moves in proportion to gradients: in the others, the recorded
    gradients may not have been reduced yet.
    """
    unknown = [run for run in runs if run.traits.rule != "known" and run.scenario.workload == "own"]
    return bool(unknown) and not any(map(_is_proportional, unknown))


def _is_proportional(trace: Trace) -> bool:
    """Return whether the first step moved each tensor by multiples of its gradient and weight."""
    start = next((start for start in trace.of(Start) if start.step == 0), None)
    first = evidence.updates(trace).get(0, {})
    if start is None or start.rank not in first:
        return False
    update = first[start.rank]
    shares = [_unexplained(name, start.weights, update) for name in update.gradient]
    known = [share for share in shares if share is not None]
    return bool(known) and max(known) <= _UNEXPLAINED


def _unexplained(name: str, before: Tensors, update: Update) -> float | None:
    """Return the fraction of a tensor's move that its gradient and weight don't explain.

    Return None if values are unknown, or if there are too few.
    """
    held = (before.get(name), update.weights.get(name), update.gradient[name])
    values = [None if record is None else record.values() for record in held]
    known = [value.astype(np.float64) for value in values if value is not None]
    if len(known) < len(values) or known[0].size <= 2 or len({value.size for value in known}) > 1:
        return None
    weight, after, gradient = known
    moved = after - weight
    terms = np.stack([gradient, weight], axis=1)
    if not (np.isfinite(moved).all() and np.isfinite(terms).all() and moved.any()):
        return None
    factors = np.linalg.lstsq(terms, moved, rcond=None)[0]
    return float(np.linalg.norm(moved - terms @ factors) / np.linalg.norm(moved))


# --- how far rounding alone moves a training run --------------------------------------------------


# Roundings by which each weight is nudged. Two orders of adding differ by a few roundings at each
# kink. A nudge by more roundings meets every kink that these few might meet, while a single
# rounding decides by chance. In 16 bits each operation rounds by so much that one rounding is like
# the runs' own.
_ROUNDINGS = 256
_ROUNDINGS_OF_16_BITS = 1
# Two runs may be this many times further apart than the nudged run is from the one without.
MARGIN = 4.0
# If a nudged run is further off than this, relative, nothing is left to compare.
CHAOTIC = 0.1


@dataclass(frozen=True)
class Sensitivity:
    """The relative distances of a nudged run from the same run without the nudge.

    `moved` maps a part and a step to the largest distance of any tensor. Parts are `loss`,
    `gradient`, `weights` and `buffers`. `moved` is empty if no run was nudged.
    """

    moved: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def allowed(self, part: str, step: int, bound: float) -> float:
        """Return the allowed relative distance of two runs in `part` of `step`: at least `bound`.

        For steps that the nudged run did not take, its last step is used.
        """
        return max(bound, MARGIN * self._until(part, step))

    def is_chaotic(self, step: int) -> bool:
        """Return whether rounding alone can make two gradients of `step` entirely different."""
        return self._until("gradient", step) > CHAOTIC

    def in_words(self, num_steps: int, bound: float) -> str:
        """Return a phrase about how far rounding moves the first steps; "" if within `bound`."""
        for step in range(num_steps):
            if self.is_chaotic(step):
                return (
                    f"rounding alone moves the gradients of step {step} by "
                    f"{self._until('gradient', step):.0%}, as a run with nudged weights shows: "
                    "steps are not compared from there on; a smaller learning rate makes steps "
                    "comparable"
                )
        widest = self.allowed("gradient", num_steps - 1, bound)
        if widest <= bound:
            return ""
        return (
            f"rounding alone moves the gradients of the first {num_steps} steps by up to "
            f"{widest / MARGIN:.1g} of their norm, as a run with nudged weights shows: compared "
            f"within {widest:.1g}"
        )

    def _until(self, part: str, step: int) -> float:
        distances = self.moved.get(part, {})
        return max((size for made, size in distances.items() if made <= step), default=0.0)


UNKNOWN = Sensitivity()


def sensitivity_of(runs: Runs[Trace]) -> Sensitivity:
    """Return the sensitivity that the witnesses in `runs` show; UNKNOWN if none was nudged."""
    pair = runs.witnesses.get(NUDGED, ())
    return _measured(*pair) if len(pair) == 2 else UNKNOWN


def nudge(trace: Trace) -> float:
    """Return the fraction by which to nudge each weight of a run like `trace`."""
    unit = precision.unit(trace)
    return unit * (_ROUNDINGS if unit <= precision.FLOAT32 else _ROUNDINGS_OF_16_BITS)


def may_be_rounding(model: Trace, trace: Trace) -> bool:
    """Return whether two runs that differ are so close that rounding may be the cause.

    The first gradients decide.
    """
    moved = _measured(model, trace)
    step = min(moved.moved["gradient"], default=None)
    return step is not None and not moved.is_chaotic(step)


def _measured(model: Trace, trace: Trace) -> Sensitivity:
    moved: dict[str, dict[int, float]] = {
        part: {} for part in ("loss", "gradient", "weights", "buffers")
    }
    expected = evidence.updates(evidence.with_losses(model))
    got = evidence.updates(evidence.with_losses(trace))
    for step in sorted(expected.keys() & got.keys()):
        first, second = evidence.any_rank(expected[step]), evidence.any_rank(got[step])
        for part, sizes in moved.items():
            distance = _loss_apart(first, second) if part == "loss" else _apart(part, first, second)
            sizes[step] = distance
    return Sensitivity(moved)


def _loss_apart(first: Update, second: Update) -> float:
    if first.loss is None or second.loss is None or not first.loss:
        return 0.0
    return abs(second.loss - first.loss) / abs(first.loss)


def _apart(part: str, first: Update, second: Update) -> float:
    gaps = closeness.distances(getattr(first, part), getattr(second, part)) or {}
    sizes = (gap.relative for gap in gaps.values())
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)
