"""F-TI-008: learning rate and clipping are functions of the step and the global gradient alone.

This needs no second run: the schedule's closed form, the clipped norm and the update itself are
recomputed from what the run recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import applied_gradients, edits, presuppositions, update_rule
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import (
    declared_clipping,
    knobs,
    own_schedule,
    parameter_order,
    plans,
    step_notes,
    stepped_twice,
    undeclared_clipping,
)
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, factors, facts, missing
from entrenar_py.check.evidence.needs import ALONE, REORDERED, REPEATED, SHORTENED, Traces, turned
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Ruled, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

# The tolerance if a contract gives none. Rates and norms are sums or products in float32. Their n
# roundings of random sign add up to sqrt(n) 2^-24, which is 6e-6 for n = 10,000 elements.
RELATIVE = 1e-5


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge every update of every rank."""
    tally = missing.tally_for(invariant, runs)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    runs = evidence.usable_runs(runs, tally)
    knobs.compare(tally, runs)
    if tally.observed:
        own_schedule.compare(tally, runs)
        parameter_order.compare(tally, runs)
        for trace in (*runs, *runs.witnesses.get(SHORTENED, ())):
            own_schedule.compare_metrics(tally, trace)
    for trace in runs:
        for update in trace.of(Update):
            place = evidence.place(trace, update)
            _rate(tally, trace, update, relative, place)
            _clipping(tally, trace, update, relative, place)
        declared_clipping.compare(tally, trace)
        _undeclared(tally, trace)
        step_notes.tell(tally, trace)
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

    Only a clipping norm that is declared, or that the command is told, says what comes after
    `obs.reduced()`. The steps are then another optimizer's, as it seems.
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
            f"in step {tried.broken.step} {tried.broken.tensor} does not move by the gradient that "
            "there was at obs.reduced(): if the script only clips it afterwards, declare "
            "observe(..., clip_norm=...); if it changes it in another way on purpose, this clause "
            "needs a run without obs.reduced()"
        )
        return True
    return False


def _is_unchanged(trace: Trace, step: int | None) -> bool:
    """Return whether a step's gradient has the norm that it was reported with, on all ranks."""
    norms = [(u.grad_norm, u.applied_norm) for u in trace.of(Update) if u.step == step]
    return all(
        reported is not None
        and applied is not None
        and math.isclose(reported, applied, rel_tol=1e-6)
        for reported, applied in norms
    )


def _follow(tally: Tally, trace: Trace) -> None:
    """Recompute all updates. Count as missing each rank's first one that can't be recomputed."""
    is_known = trace.traits.rule == "known" or update_rule.are_known(trace)
    if trace.traits.rule != "known" and update_rule.are_derived(trace):
        is_known = is_known and _is_as_derived(trace)
    if not is_known and trace.traits.rule == "own":
        tally.note("the optimizer's rule is its own: steps were not recomputed")
        return
    if not is_known:
        tally.miss(
            "the optimizer's rule is not one that is known here"
            + missing.told(
                tally,
                trace=" (traits: rule: other)",
                script=": those of torch.optim's optimizers are, but for LBFGS, Rprop, ASGD and "
                "some that are rare",
            )
        )
        return
    rules: dict[int, update_rule.Rule] = {}
    rested = evidence.skipped_without_gradients(trace)
    lost: set[int] = set()
    gaps = missing.Gaps()
    twice = stepped_twice.judge(tally, trace)
    for event in trace.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        rule = rules.get(event.rank)
        rule_before = None if rule is None else replace(rule)
        if rule is not None and _begins_anew(tally, trace, rule, event, twice):
            rule.moments = {}
        moved = rule is not None and _moved(tally, trace, rule, event, twice)
        if moved or event.step in rested:  # a wrongly skipped step shows in a later one
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
    """Return whether an optimizer of the user's steps by the rule of torch's that it is made of."""
    return update_rule.are_known(trace) and _is_as_derived(trace)


def _is_as_derived(trace: Trace) -> bool:
    """Return whether an optimizer of the user's steps as the class does that it is derived from."""
    plain = [replace(e, derived=False) if isinstance(e, Ruled) else e for e in trace.events]
    tried = Tally("", observed=True)
    _follow(tried, replace(trace, events=tuple(plain)))
    return tried.broken is None


def _begins_anew(
    tally: Tally, trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]
) -> bool:
    """Return whether a user's step follows from empty moments only, as of a new optimizer.

    Workers that are brought together now and then may begin anew each time. It is noted.
    """
    if trace.scenario.workload != "own" or not rule.moments:
        return False
    tried = [replace(rule, moments=moments) for moments in (rule.copied(), {})]
    goes_on, is_anew = (_trial(trace, each, update, twice) for each in tried)
    if goes_on or not is_anew:
        return False
    told = f"the optimizer's state was emptied before step {update.step}, and the steps go on so"
    if not any("state was emptied" in note for note in tally.notes):
        tally.note(told)
    return True


def _trial(trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]) -> bool:
    """Return whether an update follows `rule`, which is moved on by it."""
    trial = Tally("", observed=True)
    return _moved(trial, trace, rule, update, twice) and trial.broken is None


def _lack(rule: update_rule.Rule | None, update: Update) -> tuple[str, facts.Fact] | None:
    """Return why `rule`, as it was before `update`, can't recompute it, and the fact it lacks.

    None if only the norms are lacking, which `_clipping` reports.
    """
    why = "made an update that can't be recomputed"
    if rule is None:
        return why, facts.START_WITH_VALUES
    parts = {
        "Start.weights": rule.weights,
        "Update.weights": update.weights,
        "Update.gradient": update.gradient,
    }
    bare = [name for name, tensors in parts.items() if evidence.vectors(tensors) is None]
    scenario = rule.scenario
    if bare:
        return why, facts.values_of(" and ".join(bare))
    if scenario.clip_norm is not None and None in (update.grad_norm, update.applied_norm):
        return None
    if scenario.weight_decay and rule.decayed is None:
        why += f" under weight_decay={scenario.weight_decay}"
        return why, facts.DECAYED
    if not rule.follows(update):
        why += f", since {scenario.optimizer} has state,"
        return why, facts.FROM_STEP_0
    return why, facts.SAME_TENSORS


def expected_rate(scenario: Scenario, step: int) -> float:
    """Return the schedule's learning rate, by a closed form independent of the trainers here.

    A user's trainer with another schedule declares `traits: {schedule: other}`.
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
        if not tally.observed:  # else see `own_schedule`
            tally.miss(
                "the schedule is not one that is known here (traits: schedule: other): the "
                "learning rate was not judged"
            )
        return
    if scenario.workload == "own":  # other numbers of workers may have other rates: see F-DP-005
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
        return  # for F-DP-003 to judge
    norm = closeness.norm_l2(update.gradient)
    if norm is not None:
        message = "the norm is not that of the averaged gradient"
        tally.close(norm, update.grad_norm, relative * norm, message, **place)
    if trace.traits.clipping == "other":  # to an unknown norm
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
    if (error := undeclared_clipping.first(trace)) is not None:
        step, why = error
        update = evidence.any_rank(evidence.updates(trace)[step])
        place = evidence.place(trace, update)
        tally.check(False, why.words, tensor=why.tensor, **place)


def _moved(
    tally: Tally, trace: Trace, rule: update_rule.Rule, update: Update, twice: Set[str]
) -> bool:
    """Check, element by element, that each tensor moved as the optimizer's formula says.

    Those that are stepped `twice` are left out.

    Return True if tensors were compared, among them all with a gradient or that may have moved.
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
    words = factors.of(due, after - before.astype(np.float64), None, noise)
    return f": the movement, {words.removeprefix('it is ')}" if " as large" in words else ""


def _absent(traces: Sequence[Trace]) -> str:
    """Return why there is no rule to judge steps by, if the optimizer is one of the user's own."""
    clips = any(trace.traits.clip_norm is not None for trace in traces)
    if clips or {trace.traits.rule for trace in traces} != {"own"}:
        return ""
    if any(update_rule.are_known(trace) for trace in traces):
        return ""
    return "the optimizer's rule is its own: it is none of torch.optim's that are known here"


def _may_have_moved(before: Tensors, after: Tensors, name: str) -> bool:
    """Return whether a tensor changed, or may have changed unrecorded."""
    known = name in before and name in after
    return not known or before[name].digest != after[name].digest


ROWS = (
    Check(
        name="step_rule",
        id="F-TI-008",
        decides="learning rate, clipping and update follow from the step and the global gradient",
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
