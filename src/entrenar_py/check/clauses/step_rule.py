"""F-TI-008: learning rate and clipping depend only on the step and the global gradient.

No second run is needed. The schedule's closed form, the clipped norm and the update itself are
recomputed from the run's records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import (
    applied_gradients,
    edits,
    parameter_order,
    presuppositions,
    update_rule,
)
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import clipping, knobs, plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, factors, facts, missing, run_names
from entrenar_py.check.evidence.needs import ALONE, REPEATED, SHORTENED, Need, Traces, turned
from entrenar_py.shared import faults
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Noticed, Ruled, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import listed

# The tolerance if a contract gives none. Rates and norms are sums or products in float32. Their n
# roundings of random sign add up to sqrt(n) 2^-24, which is 6e-6 for n = 10,000 elements.
RELATIVE = 1e-5


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge the learning rate, the clipping and the movement of every update of every rank."""
    tally = missing.tally_for(invariant, runs)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    runs = evidence.usable_runs(runs, tally)
    knobs.compare(tally, runs)
    if tally.observed:
        compare_schedule(tally, runs)
        parameter_order.compare(tally, runs.witnesses.get(REORDERED, ()))
        for trace in (*runs, *runs.witnesses.get(SHORTENED, ())):
            compare_metrics(tally, trace)
    for trace in runs:
        for update in trace.of(Update):
            place = evidence.place(trace, update)
            _rate(tally, trace, update, relative, place)
            _clipping(tally, trace, update, relative, place)
        clipping.compare(tally, trace)
        _undeclared(tally, trace)
        tell_notes(tally, trace)
        edits.judge(tally, trace)
        missing.require_moves(tally, trace)
        if applied_gradients.follow_copies(tally, runs, trace):
            continue
        compared = Compared(runs=runs, model=trace, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.UPDATES, compared)
        if left is not None and not _may_be_changed(tally, trace):
            _follow(tally, trace)
    why = "no step was recorded"
    return tally.finding(nothing=missing.nothing(tally, why, facts.START_AND_UPDATES))


def _may_be_changed(tally: Tally, trace: Trace) -> bool:
    """Return whether a script may have changed gradients on purpose after it reported them.

    If so, count it as missing. Only a clipping norm that is declared, or passed in the command,
    says what happens after `obs.reduced()`. Without one, steps that don't follow from the reported
    gradient may be meant.
    """
    traits = trace.traits
    is_declared = traits.clip_norm is not None and traits.clip_source != "calls"
    known = traits.clipping == "told" or is_declared
    reports = any(update.grad_norm is not None for update in trace.of(Update))
    if trace.scenario.workload != "own" or known or not reports:
        return False
    tried = Tally("", observed=True)
    _follow(tried, trace)
    if tried.broken is not None and not _is_unchanged(trace, tried.broken.step):
        tally.miss(
            f"in step {tried.broken.step} {tried.broken.tensor} does not move by the "
            "gradient that it had at obs.reduced(): if the script only clips the "
            "gradient afterwards, declare observe(..., clip_norm=...); if the script "
            "changes it in another way on purpose, this clause needs a run without "
            "obs.reduced()"
        )
        return True
    return False


def _is_unchanged(trace: Trace, step: int | None) -> bool:
    """Return whether on all ranks a step's applied gradient has the norm that was reported."""
    norms = [(u.grad_norm, u.applied_norm) for u in trace.of(Update) if u.step == step]
    return all(
        reported is not None
        and applied is not None
        and math.isclose(reported, applied, rel_tol=1e-6)
        for reported, applied in norms
    )


def _follow(tally: Tally, trace: Trace) -> None:
    """Recompute all updates. Count as missing each rank's first update that can't be recomputed."""
    is_known = trace.traits.rule == "known" or update_rule.are_known(trace)
    if trace.traits.rule != "known" and update_rule.are_derived(trace):
        is_known = is_known and _is_as_derived(trace)
    if not is_known and trace.traits.rule == "own":
        tally.note("the optimizer has a rule of its own: steps were not recomputed")
        return
    if not is_known:
        tally.miss(
            "the optimizer's rule is not one that is known here"
            + missing.told(
                tally,
                trace=" (traits: rule: other)",
                script=": known are those of torch.optim, except for LBFGS, Rprop, ASGD and a few "
                "rare ones",
            )
        )
        return
    rules: dict[int, update_rule.Rule] = {}
    rested = evidence.skipped_without_gradients(trace)
    lost: set[int] = set()
    gaps = missing.Gaps()
    twice = judge_doubled(tally, trace)
    for event in trace.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        rule = rules.get(event.rank)
        rule_before = None if rule is None else replace(rule)
        if rule is not None:
            for name in _emptied(tally, trace, rule, event, twice):
                del rule.moments[name]
        moved = rule is not None and _moved(tally, trace, rule, event, twice)
        if moved or event.step in rested:  # a wrongly skipped step shows in a later step
            continue
        if event.rank not in lost and (lack := _lack(rule_before, event)):
            gaps.add(*lack, rank=event.rank, step=event.step)
        lost.add(event.rank)
    gaps.tell(tally)
    if rested and rested >= {update.step for update in trace.of(Update)}:
        tally.miss(
            f"nothing was recomputed: the run {evidence.skip_words(rested)}, and made no other step"
        )


def is_recomputed(trace: Trace) -> bool:
    """Return whether a user's optimizer steps by the rule of torch's class that it derives from."""
    return update_rule.are_known(trace) and _is_as_derived(trace)


def _is_as_derived(trace: Trace) -> bool:
    """Return whether a user's optimizer steps like the class that it is derived from."""
    plain = [replace(e, derived=False) if isinstance(e, Ruled) else e for e in trace.events]
    tried = Tally("", observed=True)
    _follow(tried, replace(trace, events=tuple(plain)))
    return tried.broken is None


def _emptied(
    tally: Tally, trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]
) -> Set[str]:
    """Return the tensors with moments that were emptied before a user's step.

    These are all tensors, or those with a recorded count of 1 step, and none if the step follows
    from the moments as they were. A note names the step: workers that are synchronised now and then
    may start over each time.
    """
    if trace.scenario.workload != "own" or not rule.moments:
        return set()
    every = rule.moments.keys()
    first = {name for name in every if _steps_made(update, name) == 1}
    for emptied in (set[str](), {*every}, *([first] if 0 < len(first) < len(every) else [])):
        left = {name: one for name, one in rule.copied().items() if name not in emptied}
        if not _trial(trace, replace(rule, moments=left), update, twice):
            continue
        if emptied and not any("state was emptied" in note for note in tally.notes):
            part = "" if emptied == every else f" of {listed(sorted(emptied), most=2)}"
            tally.note(
                f"the optimizer's state{part} was emptied before step {update.step}, and later "
                "steps use the emptied state"
            )
        return emptied
    return set()


def _steps_made(update: Update, name: str) -> float | None:
    """Return how many steps the optimizer has made with a tensor, by its own state."""
    record = update.optimizer.get(f"{name}/step")
    counted = None if record is None else record.elements()
    return None if counted is None or counted.size != 1 else float(counted[0])


def _trial(trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]) -> bool:
    trial = Tally("", observed=True)
    return _moved(trial, trace, rule, update, twice) and trial.broken is None


def _lack(rule: update_rule.Rule | None, update: Update) -> tuple[str, facts.Fact] | None:
    """Return why `rule`, as it was before `update`, can't recompute it, and the missing fact.

    Return None if only the norms are missing, which `_clipping` reports.
    """
    what = "made an update that can't be recomputed"
    if rule is None:
        return what, facts.START_WITH_VALUES
    parts = {
        "Start.weights": rule.weights,
        "Update.weights": update.weights,
        "Update.gradient": update.gradient,
    }
    bare = [name for name, tensors in parts.items() if evidence.vectors(tensors) is None]
    scenario = rule.scenario
    if bare:
        return what, facts.values_of(" and ".join(bare))
    if scenario.clip_norm is not None and None in (update.grad_norm, update.applied_norm):
        return None
    if scenario.weight_decay and rule.decayed is None:
        what += f" under weight_decay={scenario.weight_decay}"
        return what, facts.DECAYED
    if not rule.follows(update):
        what += f", since {scenario.optimizer} has state,"
        return what, facts.FROM_STEP_0
    return what, facts.SAME_TENSORS


def expected_rate(scenario: Scenario, step: int) -> float:
    """Return the schedule's learning rate, by a closed form independent of the trainers here.

    A user's trainer with a different schedule declares `traits: {schedule: other}`.
    """
    rate, warmup = scenario.learning_rate, scenario.warmup_steps
    if step < warmup:
        return rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(scenario.num_steps - warmup, 1)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return rate * factor[scenario.schedule]


def _rate(
    tally: Tally, trace: Trace, update: Update, relative: float, place: Mapping[str, Any]
) -> None:
    scenario = trace.scenario
    if trace.traits.schedule == "other":
        if not tally.observed:  # otherwise `compare_schedule` judges it
            tally.miss(
                "the schedule is not one that is known here (traits: schedule: other): the "
                "learning rate was not judged"
            )
        return
    # Runs on other numbers of workers may have other rates: F-DP-005.
    if scenario.workload == "own":
        first = evidence.any_rank(next(by_rank for _, by_rank in evidence.ranks_by_step(trace)))
        scenario = scenario.with_(learning_rate=first.learning_rate)
    expected, allowed = expected_rate(scenario, update.step), relative * scenario.learning_rate
    message = f"learning rate of step {update.step} is not the {scenario.schedule} schedule's"
    tally.close(expected, update.learning_rate, allowed, message, **place)


def _clipping(
    tally: Tally, trace: Trace, update: Update, relative: float, place: Mapping[str, Any]
) -> None:
    scenario = trace.scenario
    if update.grad_norm is None or update.applied_norm is None:
        if scenario.clip_norm is not None:
            why = "the norms before and after clipping were not recorded"
            missing.ask(tally, f"clip_norm={scenario.clip_norm}, and {why}", facts.NORMS)
        return
    if not (math.isfinite(update.grad_norm) and math.isfinite(update.applied_norm)):
        return  # F-DP-003 judges this
    norm = closeness.norm_l2(update.gradient)
    if norm is not None:
        message = "the norm is not the averaged gradient's"
        tally.close(norm, update.grad_norm, relative * norm, message, **place)
    if trace.traits.clipping == "other":  # gradients were clipped to an unknown norm
        tally.check(
            update.applied_norm <= update.grad_norm * (1 + relative),
            "the applied gradient is longer than the averaged one",
            expected=f"at most {update.grad_norm!r}",
            got=repr(update.applied_norm),
            **place,
        )
        return
    limit = math.inf if scenario.clip_norm is None else scenario.clip_norm
    expected = min(update.grad_norm, limit)
    if update.grad_norm > limit:
        relative += knobs.CLIP_EPSILON / update.grad_norm
    message = f"the applied gradient's norm is not min(norm, {scenario.clip_norm})"
    tally.close(expected, update.applied_norm, relative * expected, message, **place)


def _undeclared(tally: Tally, trace: Trace) -> None:
    """Check that a user's gradients were not clipped in parts, while scaled, or once only."""
    if trace.scenario.workload != "own":
        return
    if (error := clipping.first(trace)) is not None:
        step, explanation = error
        update = evidence.any_rank(evidence.updates(trace)[step])
        place = evidence.place(trace, update)
        tally.check(False, explanation.words, tensor=explanation.tensor, **place)


def _moved(
    tally: Tally, trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]
) -> bool:
    """Check, element by element, that each tensor moved as the optimizer's formula says.

    Tensors in `twice`, which are stepped twice, are left out. Return whether tensors were compared,
    including all that have a gradient or may have moved.
    """
    before = rule.weights
    before = {**before, **update.edited}
    compared: set[str] = set()
    rounding = update_rule.rounding(trace, update)
    for name, expected in rule.step(update):
        record = update.weights.get(name)
        after = None if record is None else record.elements()
        if after is None or after.shape != expected.weight.shape:
            continue
        compared.add(name)
        if not after.size or name in twice:
            continue
        # inf - inf gives NaN, which fails the comparison below.
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(after - expected.weight) - update_rule.allowed(rounding, expected)
        element = int(gap.argmax())
        follows = bool((gap <= 0).all())
        is_shown = not follows and tally.would_keep(update.step)
        words = _movement(before[name].elements(), expected.weight, after) if is_shown else ""
        tally.check(
            follows,
            f"{name} did not move by learning rate times clipped gradient, as in {rule.kind(name)}"
            f"{words}",
            tensor=name,
            element=None if record is None or record.sketch else element,
            expected=repr(float(expected.weight[element])),
            got=repr(float(after[element])),
            **evidence.place(trace, update),
        )
    names = set(rule.trainable) or update.weights.keys() | update.gradient.keys()
    return bool(compared) and not any(
        name in update.gradient or _may_have_moved(before, update.weights, name)
        for name in names - compared
    )


def _movement(
    before: NDArray[Any] | None, expected: NDArray[np.float64], after: NDArray[Any]
) -> str:
    """Return how the tensor's movement follows from the expected one, after a colon; or ""."""
    if before is None or before.shape != after.shape:
        return ""
    if np.array_equal(before, after):
        return ": it did not move at all"
    due = expected - before
    noise = 4 * 2.0**-23 * float(np.linalg.norm(expected)) / (float(np.linalg.norm(due)) or 1.0)
    words = factors.multiple(due, after - before.astype(np.float64), None, noise)
    return f": the movement, {words}" if words else ""


def _absent(traces: Sequence[Trace]) -> str:
    """Return why no rule can judge the steps; "" if one can, or if a run declares clipping.

    The reason is that the optimizer is the user's own.
    """
    clips = any(trace.traits.clip_norm is not None for trace in traces)
    if clips or {trace.traits.rule for trace in traces} != {"own"}:
        return ""
    if any(update_rule.are_known(trace) for trace in traces):
        return ""
    return "the optimizer has a rule of its own, which is not known here"


def _may_have_moved(before: Tensors, after: Tensors, name: str) -> bool:
    known = name in before and name in after
    return not known or before[name].digest != after[name].digest


# --- a schedule of the script's own ---------------------------------------------------------------

# Tests whether the learning rate of a script's own schedule is a function of the step alone. Its
# closed form is unknown here. Its values are compared with those of the same steps in a repetition
# of the run, and on one worker. A schedule that follows a metric must get the same metric on all
# ranks. Runs on different numbers of workers are compared up to the step where their metrics
# differ.

RATE_BOUND = 1e-6  # relative: the product of a few float64 numbers
METRIC_BOUND = 1e-3  # relative: an evaluation of the same samples differs by rounding


def compare_schedule(tally: Tally, runs: Traces) -> None:
    """Compare the base's rates with the witnesses'. A rate that differs is missing, not wrong.

    Some scripts scale the rate by the number of workers. If one worker has smaller batches, it has
    more steps in an epoch, and rightly a longer schedule. F-DP-005 compares it with batches of the
    same size.
    """
    base = runs.base
    if base is None or base.traits.schedule != "other":
        return
    others = [run for need in (REPEATED, ALONE) for run in runs.witnesses.get(need, ())]
    others = [run for run in others if run is not base and run.end.status == "completed"]
    if not others:
        tally.miss(
            "the learning rate changes by a schedule that is not known here, and there is no other "
            "run to compare it with"
        )
    for other in others:
        if other.scenario.batch_size != base.scenario.batch_size:
            continue
        divided = applied_gradients.in_rate(Compared(runs=runs, model=other, trace=base))
        _compare_rates(tally, base, other, divided)


def compare_metrics(tally: Tally, trace: Trace) -> None:
    """Check that the schedules of all ranks follow the same metric.

    With different metrics their rates differ sooner or later: perhaps only when the metric of one
    rank still improves and another's does not.
    """
    for _, by_rank in evidence.ranks_by_step(trace):
        known = {rank: u.metric for rank, u in sorted(by_rank.items()) if u.metric is not None}
        if len(known) < trace.scenario.world_size or len(known) < 2:
            continue
        first = min(known)
        for rank, metric in known.items():
            if rank == first:
                continue
            place = evidence.place(trace, by_rank[rank])
            tally.check(
                math.isclose(metric, known[first], rel_tol=METRIC_BOUND),
                f"the schedule of rank {rank} follows a metric with the best value "
                f"{metric:.4g}, and {known[first]:.4g} on rank {first}: once one of them "
                "reduces its learning rate, ranks diverge; take the mean over ranks before "
                "scheduler.step(metric)",
                expected=repr(known[first]),
                got=repr(metric),
                **place,
            )


def _compare_rates(tally: Tally, base: Trace, other: Trace, divided: float) -> None:
    """Compare the rates of two runs.

    `divided` is the number by which `base` divides its rates, in place of gradients.
    """
    expected = evidence.updates(other)
    is_same = other.scenario.world_size == base.scenario.world_size
    for step, by_rank in evidence.ranks_by_step(base):
        if step not in expected:
            continue
        model, update = evidence.any_rank(expected[step]), evidence.any_rank(by_rank)
        if not is_same and _follow_others(model, update):
            return
        due, got = model.learning_rate, update.learning_rate
        if not math.isclose(due, got * divided, rel_tol=RATE_BOUND):
            rates = _told((base.scenario, got), (other.scenario, due))
            tally.miss(
                f"the learning rate of step {step} is {rates}: make the schedule a function of the "
                "step, with the same length in every run"
            )
            return
        tally.compared += 1


def _follow_others(model: Update, update: Update) -> bool:
    if model.metric is None or update.metric is None:
        return False
    return not math.isclose(model.metric, update.metric, rel_tol=METRIC_BOUND)


def _told(*rates: tuple[Scenario, float]) -> str:
    """Return the two runs' rates in the same words, whichever of the two runs is judged.

    Among runs on different numbers of workers, a repeated run is named like the first.
    """
    ordered = sorted(rates, key=lambda pair: (-pair[0].world_size, pair[0].repeat))
    if len({run.world_size for run, _ in rates}) > 1:
        ordered = [(run.with_(repeat=0), rate) for run, rate in ordered]
    return " and ".join(f"{rate:.6g} in {run_names.of(run)}" for run, rate in ordered)


# --- notes, which judge nothing -------------------------------------------------------------------


def tell_notes(tally: Tally, trace: Trace) -> None:
    """Note facts of a user's run that are worth a look: schedule steps, and weight decay."""
    if trace.scenario.workload == "own":
        for fact in (*_schedule(trace), *_decay(trace)):
            tally.note(fact)


def _schedule(trace: Trace) -> Iterator[str]:
    """Yield how far the schedule moves in a step, if it moves further than one position."""
    places = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        place = evidence.any_rank(by_rank).schedule
        if place is not None:
            places[step] = place
    moves = {places[step + 1] - place for step, place in places.items() if step + 1 in places}
    if len(moves) == 1 and (move := moves.pop()) > 1:
        simple = factors.named(move, trace.scenario)
        reason = f" ({simple[1]})" if simple and simple[1] else ""
        yield (
            f"the schedule moves {move} positions in each step{reason}, which could mean: it is "
            "stepped too often"
        )


def _decay(trace: Trace) -> Iterator[str]:
    """Yield the one-dimensional tensors with weight decay, if others have none."""
    starts = [start for start in trace.of(Start) if start.shapes and start.decayed]
    if not starts:
        return
    start = starts[0]
    flat = [name for name in start.trainable if len(start.shapes.get(name, (0, 0))) == 1]
    decayed = [name for name in flat if name in (start.decayed or ())]
    if 0 < len(decayed) < len(flat):
        yield (
            f"weight decay acts on {listed(decayed, most=2)}, which "
            f"{'have' if decayed[1:] else 'has'} one dimension, and not on others with "
            "one dimension"
        )


# --- tensors that an optimizer holds twice --------------------------------------------------------


def judge_doubled(tally: Tally, trace: Trace) -> Set[str]:
    """Check that no tensor is stepped twice. Return the names of tensors that are.

    The steps of these tensors follow no rule. Two parameters in the same memory may be right with
    plain SGD, which adds their gradients.
    """
    noticed = trace.of(Noticed)
    twice = {name for event in noticed for name in event.doubled}
    update = next(iter(trace.of(Update)), None)
    if update is None:
        return twice
    plain = trace.scenario.optimizer == "sgd" and not trace.scenario.weight_decay
    for name in sorted(twice & update.weights.keys()):
        groups = {group for event in noticed for group in event.shared if name in group}
        others = sorted({one for group in groups for one in group} & twice - {name})
        if not others:
            cause = "it occurs twice in the optimizer's parameters"
        elif plain:
            tally.note(f"{name} and {others[0]} are parameters in the same memory: SGD steps both")
            continue
        else:
            cause = f"{others[0]} is a second parameter in the same memory"
        place = evidence.place(trace, update)
        message = f"{name} moves twice in each step: {cause}"
        tally.check(False, message, tensor=name, **place)
    return twice


def _reordered(usual: Trace) -> Fault | None:
    is_own = parameter_order.is_wanted(usual) and not is_recomputed(usual)
    return Fault(kind=faults.REORDERED, step=0) if is_own else None


REORDERED = Need(
    name="reordered",
    says="the same run, with the optimizer's parameters in a different order",
    faults=(faults.REORDERED,),
    is_paired=True,
    planned=_reordered,
)

ROWS = (
    Check(
        name="step_rule",
        id="F-TI-008",
        decides="learning rate, clipping and update follow the written formulas",
        spoken_of="clip clipping clipped norm schedule learning-rate warmup cosine decay",
        judge=judge,
        plan=plans.step_rules,
        explores=True,
        needs=(turned("clip"),),
        witnesses=(REPEATED, ALONE, SHORTENED, REORDERED),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        takes_turned=True,
        absent=_absent,
    ),
)
