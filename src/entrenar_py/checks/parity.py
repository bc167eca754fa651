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

from entrenar_py.checks import evidence, missing, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Start, Tensors, Trace, Update
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

ORACLE = "textbook"  # the independent trainer; its ranks draw their own dropout masks

# What may differ between two runs of the same training.
SPLIT = (
    "system",
    "world_size",
    "num_shards",
    "accumulation",
    "backends",
    "faults",
    "stops",
    "mutant",
)


def oracle(scenario: Scenario) -> Scenario:
    """The plain single-device run of the same training, by the independent trainer."""
    return evidence.plain(scenario, system=ORACLE, world_size=1, accumulation=1, backends=("cpu",))


def family(scenario: Scenario) -> list[Scenario]:
    """The run, the same with one worker, and the oracle.

    Where masks are drawn per rank, one worker is another run: then all three without dropout too.
    """
    model = oracle(scenario)
    alone = evidence.plain(scenario, world_size=1, mutant=scenario.mutant)
    runs = [scenario, alone, model]
    if scenario.dropout and scenario.system == ORACLE and scenario != model:
        runs += family(scenario.with_(dropout=0.0))
    return evidence.distinct(runs)


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every run against the oracle; bitwise against one worker where that is promised."""
    tally = Tally(invariant.id)
    kept = evidence.usable(traces, tally)
    tolerance = PUBLISHED_TOLERANCE if invariant.tolerance is None else invariant.tolerance
    compare_with_oracle(tally, kept, tolerance)
    promised = [trace for trace in kept if "bitwise" in trace.promises]
    same_bits.compare_worker_counts(tally, promised)
    return tally.finding(nothing=missing_model(kept))


def missing_model(traces: Sequence[Trace]) -> str:
    """Why `traces` hold no run on a single device to compare with, and what to record; empty if
    they do.
    """
    for group in evidence.groups(traces, *SPLIT):
        for trace in group:
            model = _model_of(trace, group)
            if model is not None and _same_masks(model, trace):
                return ""
            if model is not None:
                return f"{_other_masks(trace)}: use dropout 0 in both runs"
    others = [trace for trace in traces if trace.scenario != oracle(trace.scenario)]
    why = "no run of the same training on one worker to compare with: record one with world_size=1"
    if others and all(trace.scenario.world_size == 1 for trace in others):
        why = "no run on several workers: record the same training with a larger world_size"
    return f"{why}, and all else equal{missing.but_for(traces, family)}"


def compare_with_oracle(tally: Tally, traces: Sequence[Trace], tolerance: float | None) -> int:
    """Compares every trace with its oracle's, if that is among them: the first steps within
    rounding, and from the published step on within `tolerance`, where one is given.

    Of somebody's own trainer, which no oracle can run, the model is its run with one worker.
    How many averaged gradients were compared.
    """
    num_gradients = 0
    for group in evidence.groups(traces, *SPLIT):
        for trace in group:
            model = _model_of(trace, group)
            if model is None:
                continue
            if not _same_masks(model, trace):
                tally.note(_other_masks(trace))
                continue
            if model.scenario != oracle(trace.scenario):
                tally.note("compared with its own run on one worker, which may have the same bug")
            num_gradients += _compare(tally, model, trace, tolerance)
    return num_gradients


def _model_of(trace: Trace, group: Sequence[Trace]) -> Trace | None:
    """What `trace` is compared with; None for a model itself and where there is none."""
    scenario = trace.scenario
    oracles = [other for other in group if other.scenario == oracle(scenario)]
    if oracles:
        return None if trace in oracles else oracles[0]
    alone = [t for t in group if (t.scenario.system, t.scenario.world_size) == (scenario.system, 1)]
    return None if not alone or trace in alone else alone[0]


def _same_masks(model: Trace, trace: Trace) -> bool:
    """Whether dropout, if any, drops in `trace` what it drops in the model.

    A single device draws what its logical shards would draw; who promises bits keys its dropout by
    shard too. Of others the first stream tells, if it was recorded. Micro-batches draw in another
    order.
    """
    if not trace.scenario.dropout:
        return True
    if trace.scenario.accumulation > 1:
        return False
    mine, theirs = ({s.draws for s in one.of(Shard)[:1]} for one in (trace, model))
    known = trace.scenario.workload != "own" or None not in mine
    return "bitwise" in trace.promises or (mine == theirs and known)


def _other_masks(trace: Trace) -> str:
    if "bitwise" in trace.promises:
        return "not compared with a single device, whose dropout draws other masks"
    system = trace.scenario.system
    if all(shard.draws is None for shard in trace.of(Shard)):
        return f"under dropout {system} was not compared with one worker, since no Shard has draws"
    return (
        f"under dropout {system} draws its masks per rank: on one worker it is another run, and "
        "was not compared"
    )


def _compare(tally: Tally, model: Trace, trace: Trace, tolerance: float | None) -> int:
    if not missing.require_updates(tally, model, trace):
        return 0
    _compare_starts(tally, model, trace)
    expected = evidence.updates(model)
    floors = _Floors.of(expected, trace.scenario)
    samples, model_samples = _samples(trace), _samples(model)
    num_gradients = 0
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            tally.miss(f"the single-device run has no step {step}")
            continue
        if not samples.get(step) or not model_samples.get(step):
            missing.ask(tally, f"the samples of step {step} are unknown", "Shard.ids in both runs")
            continue
        if samples.get(step) != model_samples.get(step):
            tally.miss(f"step {step} draws other samples than the single device's: see F-DP-002")
            break
        one = evidence.any_rank(expected[step])
        for rank, update in by_rank.items():
            place = {"step": step, "rank": rank, "scenario": trace.scenario.to_dict()}
            if step < ROUNDING_STEPS:
                adam_moved = step > 0 and trace.scenario.optimizer == "adamw"
                allowed = ADAM_LOSS_BOUND if adam_moved else LOSS_BOUND
                _compare_losses(tally, one, update, allowed, floors.loss, place)
                allowed = ADAM_GRADIENT_BOUND if adam_moved else GRADIENT_BOUND
                num_gradients += _compare_tensors(tally, one, update, allowed, floors, place)
            elif step >= PUBLISHED_FROM_STEP and tolerance is not None:
                _compare_losses(tally, one, update, tolerance, floors.loss, place)
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
        losses = (abs(update.loss) for update in first)
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


def _compare_tensors(
    tally: Tally,
    one: Update,
    update: Update,
    allowed: float,
    floors: _Floors,
    place: Mapping[str, Any],
) -> bool:
    """Gradient, weights and buffers of one rank; whether the gradient could be compared."""
    message = "averaged gradient is not the single device's"
    compared = evidence.compare_close(
        tally, one.gradient, update.gradient, allowed, message, floors.gradient, **place
    )
    if not floors.adam:
        message = "weights after the step are not the single device's"
        evidence.compare_close(tally, one.weights, update.weights, GRADIENT_BOUND, message, **place)
    message = "buffers after the step are not the single device's"
    mine, theirs = _floats(one.buffers), _floats(update.buffers)
    evidence.compare_close(tally, mine, theirs, GRADIENT_BOUND, message, **place)
    return compared


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
        scenario=trace.scenario.to_dict(),
    )


def _samples(trace: Trace) -> dict[int, Counter[int]]:
    """Step -> how often each sample was used in it."""
    return {
        step: Counter(i for shard in shards for i in shard.ids)
        for step, shards in evidence.shards(trace).items()
    }


def _floats(buffers: Tensors) -> Tensors:
    """Running means; counters may count micro-batches."""
    return {name: record for name, record in buffers.items() if record.dtype.startswith("float")}


def _compare_starts(tally: Tally, model: Trace, trace: Trace) -> None:
    """Every rank's weights before the first step: a trainer that was only built has not trained."""
    one = next((start for start in model.of(Start) if start.step == 0), None)
    for start in trace.of(Start):
        if one is not None and start.step == 0 and not start.resumed:
            evidence.compare_close(
                tally,
                one.weights,
                start.weights,
                START_BOUND,
                "weights before the first step are not the single device's",
                step=-1,
                rank=start.rank,
                scenario=trace.scenario.to_dict(),
            )


def _largest(sizes: Iterable[float]) -> float:
    return max((size for size in sizes if math.isfinite(size)), default=0.0)
