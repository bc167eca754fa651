"""F-DP-005: training with many workers is training with one.

Three strengths, each where it can be kept: the published bound on the loss (from step 100); the
float32 rounding bound on losses and gradients of the first steps against an independently written
single-device trainer; the same bits, from a trainer that promises them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrenar_py.checks import evidence, missing, oracles, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Tally

PUBLISHED_FROM_STEP = 100
PUBLISHED_TOLERANCE = 0.01  # relative

# Relative L2 distance of two float32 gradients of one batch that were added in different orders.
# Each is within n u |terms| of the exact sum, u = 2^-24, with n < 300 terms here, so 2e-5 times the
# cancellation among them; errors of random sign stay far below: 3,000 random scenarios reached
# 2.1e-6 (docs/numerics.md). Tight enough to see a gradient that was rounded on its way: to bf16 it
# is off by 1e-3, to fp16 or TF32 by 1.4e-4.
GRADIENT_BOUND = 1e-4
# The same for a loss, a sum of terms of one sign: no cancellation, n u. Seen: 2.3e-7.
LOSS_BOUND = 2e-5
RATE_BOUND = 1e-6  # of a learning rate: the product of a few float64 numbers
# Of the largest loss (or gradient) of the first steps: below this a later one is what is left of
# rounding once the data are learned. Weights are off by some u |w|, so that a gradient, which is
# about proportional to their distance from the minimum, is off by some u times the largest: 16 u.
LEARNED_AWAY = 2.0**-20
# Initial weights are drawn, not summed: two libraries or devices may round the last bits apart.
START_BOUND = 2.0**-20
# Past the first steps rounding differences grow with the trajectory itself, at a rate no static
# bound covers; these steps are left to the published bound.
ROUNDING_STEPS = 4
# Adam's first step is +-rate even where a gradient is rounding noise, so that weights differ by up
# to twice the rate there and gradients follow: seen over 700 random scenarios, 9.5e-4 by step 3.
# Wide enough for that, this still sees a gradient that is stale, doubled or another step's.
ADAM_GRADIENT_BOUND = 1e-2
ADAM_LOSS_BOUND = 1e-3

# What an update is compared by where its values were recorded, and what is said if it is off.
_PARTS = {
    "gradient": "averaged gradient is not the single device's",
    "weights": "weights after the step are not the single device's",
    "buffers": "buffers after the step are not the single device's",
}


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every run against the oracle; bitwise against one worker where that is promised."""
    tally = Tally(invariant.id)
    kept = evidence.usable(traces, tally)
    tolerance = PUBLISHED_TOLERANCE if invariant.tolerance is None else invariant.tolerance
    compare_with_oracle(tally, kept, tolerance)
    promised = [trace for trace in kept if "bitwise" in trace.promises]
    same_bits.compare_worker_counts(tally, promised)
    return tally.finding(nothing=oracles.missing_model(kept))


def compare_with_oracle(
    tally: Tally, traces: Sequence[Trace], tolerance: float | None
) -> list[int]:
    """Compares every trace with its oracle's, if that is among them: the first steps within
    rounding, and from the published step on within `tolerance`, where one is given.

    Of somebody's own trainer, which no oracle can run, the model is its run with one worker.
    Of each trace that was compared and made a step, how many averaged gradients were.
    """
    num_gradients: list[int] = []
    followed: set[Scenario] = set()
    masked: list[Trace] = []
    for group in evidence.groups(traces, *oracles.SPLIT):
        for trace in group:
            model = oracles.model_of(trace, group)
            if model is None:
                continue
            if not oracles.same_masks(model, trace):
                masked.append(trace)
                continue
            if model.scenario != oracles.oracle(trace.scenario):
                tally.note("compared with its own run on one worker, which may have the same bug")
            count = _compare(tally, model, trace, tolerance)
            if trace.of(Update):
                num_gradients.append(count)
            followed.add(oracles.without_dropout(trace.scenario))
    for trace in masked:
        excused = trace.draws_by_shard or oracles.without_dropout(trace.scenario) in followed
        if excused or not followed:
            tally.note(oracles.other_masks(trace))
        else:
            tally.miss(oracles.other_masks(trace))
    return num_gradients


def _compare(tally: Tally, model: Trace, trace: Trace, tolerance: float | None) -> int:
    if not missing.require_updates(tally, model, trace):
        return 0
    model, trace = evidence.with_losses(model), evidence.with_losses(trace)
    gaps = missing.Gaps()
    _compare_starts(tally, gaps, model, trace)
    expected = evidence.updates(model)
    floors = _Floors.of(expected, trace.scenario)
    samples, model_samples = _samples(trace), _samples(model)
    valued = {part for part in _PARTS if _has_values(model, part) and _has_values(trace, part)}
    unknown = missing.unknown_steps(model) | missing.unknown_steps(trace)
    num_gradients = 0
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            tally.miss(f"the single-device run has no step {step}")
            continue
        if step in unknown or not samples.get(step) or not model_samples.get(step):
            missing.ask(tally, f"the samples of step {step} are unknown", "Shard.ids in both runs")
            continue
        if samples.get(step) != model_samples.get(step):
            tally.miss(f"step {step} draws other samples than the single device's: see F-DP-002")
            break
        one = evidence.any_rank(expected[step])
        for rank, update in by_rank.items():
            place = {"step": step, "rank": rank, "scenario": trace.scenario}
            if trace.scenario.workload == "own":
                _compare_rates(tally, one, update, place)
            if step < ROUNDING_STEPS:
                adam_moved = step > 0 and trace.scenario.optimizer == "adamw"
                allowed = ADAM_LOSS_BOUND if adam_moved else LOSS_BOUND
                _compare_losses(tally, one, update, allowed, floors.loss, place)
                allowed = ADAM_GRADIENT_BOUND if adam_moved else GRADIENT_BOUND
                compared = _compare_tensors(tally, one, update, allowed, floors, place)
                for part in sorted(valued - compared):
                    what = f"Update.{part} in both runs {missing.WITH_VALUES}"
                    gaps.add(f"was not compared by {part}", what, rank=rank, step=step)
                num_gradients += "gradient" in compared
            elif step >= PUBLISHED_FROM_STEP and tolerance is not None:
                _compare_losses(tally, one, update, tolerance, floors.loss, place)
    gaps.tell(tally)
    _compare_steps(tally, model, trace)
    return num_gradients


@dataclass(frozen=True)
class _Floors:
    """What is only rounding in a loss or gradient, and whether weights can be compared."""

    loss: float
    gradient: float
    adam: bool

    @classmethod
    def of(cls, expected: Mapping[int, Mapping[int, Update]], scenario: Scenario) -> _Floors:
        first = [evidence.any_rank(expected[step]) for step in expected if step < ROUNDING_STEPS]
        losses = (abs(update.loss or 0.0) for update in first)
        norms = (evidence.norm_l2(update.gradient) or 0.0 for update in first)
        return cls(
            loss=LEARNED_AWAY * _largest(losses),
            gradient=LEARNED_AWAY * _largest(norms),
            adam=scenario.optimizer == "adamw",
        )


def _compare_losses(
    tally: Tally,
    one: Update,
    update: Update,
    allowed: float,
    floor: float,
    place: Mapping[str, Any],
) -> None:
    if one.loss is None or update.loss is None:
        if one.loss != update.loss:
            what = "Shard.loss_sum, or Update.loss, in both runs"
            missing.ask(tally, f"the loss of step {one.step} is known in one run only", what)
        return
    if not math.isfinite(one.loss):
        tally.miss(f"the single device's loss of step {one.step} is not finite")
        return
    tally.check(
        abs(update.loss - one.loss) <= allowed * abs(one.loss) + floor,
        f"loss is off by more than {allowed:.2g} of the single device's",
        expected=repr(one.loss),
        got=repr(update.loss),
        **place,
    )


def _compare_rates(tally: Tally, one: Update, update: Update, place: Mapping[str, Any]) -> None:
    """A schedule is one of steps: whose closed form is not known here is the single device's."""
    rates = one.learning_rate, update.learning_rate
    tally.check(
        math.isclose(*rates, rel_tol=RATE_BOUND),
        "the learning rate is not the single device's",
        expected=repr(rates[0]),
        got=repr(rates[1]),
        **place,
    )


def _compare_tensors(
    tally: Tally,
    one: Update,
    update: Update,
    allowed: float,
    floors: _Floors,
    place: Mapping[str, Any],
) -> set[str]:
    """Gradient, weights and buffers of one rank; which of them are done with."""
    done = {"weights"} if floors.adam else set()
    for part, message in _PARTS.items():
        if part in done:
            continue
        bound, floor = (allowed, floors.gradient) if part == "gradient" else (GRADIENT_BOUND, 0.0)
        mine, theirs = _tensors(one, part), _tensors(update, part)
        if evidence.compare_close(tally, mine, theirs, bound, message, floor, **place):
            done.add(part)
    return done


def _compare_steps(tally: Tally, model: Trace, trace: Trace) -> None:
    """The run makes every step that the single device made."""
    lacking = sorted(set(evidence.updates(model)) - set(evidence.updates(trace)))
    if lacking and model.end.status == "halted":
        tally.miss(f"the single-device run halted: {model.end.reason}")
        return
    tally.check(
        not lacking,
        f"steps {lacking[:5]} were never made",
        step=lacking[0] if lacking else None,
        scenario=trace.scenario,
    )


def _samples(trace: Trace) -> dict[int, Counter[int]]:
    """Step -> how often each sample was used in it."""
    return {
        step: Counter(i for shard in shards for i in shard.ids)
        for step, shards in evidence.shards(trace).items()
    }


def _tensors(update: Update, part: str) -> Tensors:
    """A part of what a rank holds; of buffers running means, since counters may count
    micro-batches.
    """
    tensors: Tensors = getattr(update, part)
    if part != "buffers":
        return tensors
    return {name: record for name, record in tensors.items() if record.dtype.startswith("float")}


def _has_values(trace: Trace, part: str) -> bool:
    return any(evidence.has_values(_tensors(update, part)) for update in trace.of(Update))


def _compare_starts(tally: Tally, gaps: missing.Gaps, model: Trace, trace: Trace) -> None:
    """Every rank's weights before the first step: a trainer that was only built has not trained."""
    one = next((start for start in model.of(Start) if start.step == 0), None)
    starts = [start for start in trace.of(Start) if start.step == 0 and not start.resumed]
    valued = any(evidence.has_values(start.weights) for start in starts)
    for start in starts:
        if one is not None and evidence.has_values(one.weights):
            compared = evidence.compare_close(
                tally,
                one.weights,
                start.weights,
                START_BOUND,
                "weights before the first step are not the single device's",
                step=-1,
                rank=start.rank,
                scenario=trace.scenario,
            )
            if valued and not compared:
                what = f"Start.weights in both runs {missing.WITH_VALUES}"
                gaps.add("was not compared by weights", what, rank=start.rank, step=-1)


def _largest(sizes: Iterable[float]) -> float:
    return max((size for size in sizes if math.isfinite(size)), default=0.0)
