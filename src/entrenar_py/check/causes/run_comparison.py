"""Compare a run with a reference run (`model`), and define what a comparison presupposes.

The reference is the same training on a single device, or with the script's knobs at their usual
values. Samples must be the same. Then the first `ROUNDING_STEPS` steps are compared within rounding
by loss, gradient, weights and buffers, tensor by tensor. Later steps have drifted apart by more
than any static bound allows. In later steps only the learning rates, the published tolerance of
losses, and an error that appears at once (`explanations.LaterSteps`) are judged.

A difference is a counterexample only if nothing else explains it. `Compared` is the pair of runs
that a clause judges, with what is known about both: where they differ, and which equation explains
the difference. `Presupposition` is a row of the table in `presuppositions`: a test on such a pair.
This module judges no clause by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations, rounding_bounds
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.causes.rounding_bounds import (
    GRADIENT_BOUND,
    ROUNDING_STEPS,
    UNKNOWN,
    Bounds,
    Sensitivity,
    rounded_away,
    sent_in,
)
from entrenar_py.check.evidence import closeness, factors, facts, missing, precision, step_sums
from entrenar_py.check.evidence.needs import ALONE, REPEATED, Traces
from entrenar_py.check.evidence.run_names import Words
from entrenar_py.shared.faults import MERGED
from entrenar_py.shared.trace import Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Tally

PUBLISHED_FROM_STEP = 100

# Factors by two different numbers of workers differ by more.
FACTOR_BOUND = 1e-3

# If terms are this many times as large as their sum, their rounding is a larger part of the sum.
CANCELLED_MIN = 8

_NOTHING = (
    "all gradients of the first steps are zero in both runs: nothing was "
    "compared that could differ; is the loss detached from the weights, or the "
    "same for all samples?"
)
# Part of an update that is compared if values were recorded -> words for a finding.
_PARTS = {
    "gradient": "averaged gradient is not",
    "weights": "weights after the step are not",
    "buffers": "buffers after the step are not",
}


SINGLE = Words()


def compare(
    tally: Tally,
    model: Trace,
    trace: Trace,
    tolerance: float | None,
    words: Words = SINGLE,
    *,
    sensitivity: Sensitivity = UNKNOWN,
) -> int:
    """Compare the first steps within rounding. Return the number of averaged gradients compared.

    If `tolerance` is not None, losses from step 100 on are also compared, within `tolerance`. If
    the training run's `sensitivity` was measured, larger distances than by rounding are allowed.
    """
    if not missing.require_updates(tally, model, trace):
        return 0
    if reason := rounded_away(trace) or rounded_away(model):
        tally.miss(reason)
        return 0
    if (sent := sent_in(trace)) in precision.SIXTEEN:
        tally.note(f"gradients are sent in {sent}: compared within the rounding of that")
    model, trace = evidence.with_losses(model), evidence.with_losses(trace)
    gaps = missing.Gaps()
    expected = evidence.updates(model)
    bounds = Bounds.of(expected, model, trace)
    comparison = _Comparison(tally, words, trace, bounds, sensitivity)
    comparison.starts(gaps, model)
    valued = {part for part in _PARTS if _has_values(model, part) and _has_values(trace, part)}
    model_rested, rested = (
        evidence.skipped_without_gradients(model),
        evidence.skipped_without_gradients(trace),
    )
    apart = min(model_rested ^ rested, default=None)
    dropped = step_sums.dropped_otherwise(model, trace) if tally.observed else None
    ends = [step for step in (apart, dropped) if step is not None]
    num_gradients, later = 0, explanations.LaterSteps(model, trace)
    for step, by_rank in _comparable(comparison, model, min(ends, default=None)):
        due = valued - {"gradient"} if step in rested else valued
        model_update = evidence.any_rank(expected[step])
        if reason := _other_rate(model, model_update, trace, evidence.any_rank(by_rank)):
            tally.miss(f"{words.before}{reason}")
            break
        if step >= ROUNDING_STEPS and "gradient" in due and trace.scenario.workload == "own":
            comparison.later_shares(later, evidence.any_rank(by_rank))
        for update in by_rank.values():
            if trace.scenario.workload == "own":
                message = f"{words.before}the learning rate is not {words.its}"
                closeness.compare_rates(tally, model_update, update, expected, trace, message)
            if step < ROUNDING_STEPS:
                num_gradients += comparison.first_step(model_update, update, due, gaps)
                continue
            if step >= PUBLISHED_FROM_STEP and tolerance is not None:
                comparison.losses(model_update, update, tolerance)
    if num_gradients and not tells(model, trace):
        tally.miss(f"{words.before}{_NOTHING}")
        num_gradients = 0
    gaps.tell(tally)
    comparison.ends(apart, dropped, rests=apart in rested, is_enough=num_gradients > 0)
    comparison.steps(model)
    return num_gradients


def _comparable(
    comparison: _Comparison, model: Trace, apart: int | None
) -> Iterator[tuple[int, Mapping[int, Update]]]:
    """Yield the steps that both runs took with the same samples, with the updates by rank.

    Samples that are unknown, or known only by their rows, count as the same if the gradients are.
    Stop at step `apart`, which only one of the runs skipped, since the runs differ from there on.
    """
    tally, words, trace = comparison.tally, comparison.words, comparison.trace
    expected = evidence.updates(model)
    samples, model_samples = _samples(trace), _samples(model)
    unknown = missing.unknown_steps(model) | missing.unknown_steps(trace)
    is_by_rows = "content" in (model.traits.sample_ids, trace.traits.sample_ids)
    alike: set[int] = (
        steps_alike(model, trace) if tally.observed and (unknown or is_by_rows) else set()
    )
    if tally.observed and is_by_rows:
        alike |= steps_combined(model, trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step == apart or comparison.sensitivity.is_chaotic(step):
            return
        if step not in expected:
            tally.miss(f"{words.run} has no step {step}")
        elif step in alike:
            yield step, by_rank
        elif (
            alike
            and step >= ROUNDING_STEPS
            and (step in unknown or (is_by_rows and samples[step] != model_samples[step]))
        ):
            return  # also in the first steps only gradients showed that samples are the same
        elif step in unknown or not samples.get(step) or not model_samples.get(step):
            missing.ask(tally, f"the samples of step {step} are unknown", facts.IDS_IN_BOTH)
        elif samples[step] != model_samples[step]:
            what = missing.other_samples(model, trace)
            tally.miss(f"{words.before}step {step} {what} than {words.its}{words.elsewhere}")
            return
        else:
            yield step, by_rank


def _other_rate(model: Trace, due: Update, trace: Trace, got: Update) -> str:
    """Return why one worker with the batches of several may have a different rate; or "".

    A script that sets the size of one worker's batch may derive its rate from the number of
    workers.
    """
    if not any(fault.kind == MERGED for fault in model.scenario.faults):
        return ""
    pairs = closeness.rates_of(due, got).values()
    apart = next(
        (pair for pair in pairs if not math.isclose(*pair, rel_tol=closeness.RATE_BOUND)), None
    )
    if apart is None:
        return ""
    workers = trace.scenario.world_size
    return (
        f"one worker steps with learning rate {apart[0]:.6g} in step {got.step}, "
        f"{workers} with {apart[1]:.6g}: if it depends on the number of workers, "
        "turn that off for the check"
    )


def steps_alike(model: Trace, trace: Trace) -> set[int]:
    """Return the first steps with averaged gradients that agree within rounding.

    Their samples count as the same, whatever is known about them.
    """
    expected, alike = evidence.updates(model), set[int]()
    bounds = Bounds.of(expected, model, trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step >= ROUNDING_STEPS or step not in expected:
            continue
        tried = Tally("", observed=True)
        due = evidence.any_rank(expected[step]).gradient
        got = evidence.any_rank(by_rank).gradient
        bound = bounds.gradient_at(step)
        if closeness.compare_close(tried, due, got, bound, "", bounds.gradient_floor):
            alike |= {step} if due and tried.broken is None else set()
    return alike


def steps_combined(model: Trace, trace: Trace) -> set[int]:
    """Return the first steps in which `model`'s gradient combines micro-batches of `trace`.

    A combination is a sum of the micro-batches' gradients, each times a number. Gradients of
    different samples have no combination. So the samples count as the same, even if they are known
    only by rows with padding or cut rows, and even if `trace` adds up wrongly.
    """
    expected, shards = evidence.updates(model), evidence.shards(trace)
    bounds = Bounds.of(expected, model, trace)
    alike = set[int]()
    for step in sorted(expected.keys() & shards.keys()):
        goal = evidence.vectors(evidence.any_rank(expected[step]).gradient)
        bound = bounds.gradient_at(step)
        if step >= ROUNDING_STEPS or not goal:
            break
        if explanations.shares_of_combination(goal, shards[step], bound) is not None:
            alike.add(step)
    return alike


def tells(*runs: Trace, floor: float = 0.0) -> bool:
    """Return whether a gradient of the first steps, in any of `runs`, is longer than `floor`.

    Gradients that are all zero are the same in any trainer. A gradient of unknown length counts as
    longer.
    """
    norms = (
        closeness.norm_l2(update.gradient)
        for run in runs
        for update in run.of(Update)
        if update.step < ROUNDING_STEPS and update.gradient
    )
    return any(norm is None or not norm <= floor for norm in norms)


@dataclass(frozen=True)
class _Comparison:
    """The comparison of one run with its reference run, update by update."""

    tally: Tally
    words: Words
    trace: Trace
    bounds: Bounds
    sensitivity: Sensitivity

    def first_step(self, model: Update, update: Update, due: Set[str], gaps: missing.Gaps) -> bool:
        """Compare the loss and the parts of one of the first steps, within rounding.

        Parts in `due` that can't be compared are added to `gaps`. Return whether the gradient was
        compared.
        """
        self.losses(model, update)
        compared = self.tensors(model, update)
        for part in sorted(due - compared):
            fact = facts.values_of(f"Update.{part} in both runs")
            gaps.add(f"was not compared by {part}", fact, rank=update.rank, step=update.step)
        return "gradient" in compared

    def later_shares(self, later: explanations.LaterSteps, update: Update) -> None:
        """Check that no micro-batch counts too much in a step after the first ones.

        Nothing else is judged there, since rounding differences have grown by then. A short last
        batch often comes late. All ranks apply the same gradient, so one rank's update is enough.
        """
        if not self.tally.would_keep(update.step):
            return
        bound = self.sensitivity.allowed("gradient", update.step, self.bounds.gradient_moved)
        floor = closeness.PROJECTED * self.bounds.gradient_floor
        if words := later.explain(update, bound, floor):
            message = f"{self.words.before}{_PARTS['gradient']} {self.words.its}: {words}"
            self.tally.check(False, message, **evidence.place(self.trace, update))

    def losses(self, model: Update, update: Update, tolerance: float | None = None) -> None:
        """Compare the losses within the relative `tolerance`; None means within rounding."""
        if model.loss is None or update.loss is None:
            if model.loss != update.loss:
                why = f"the loss of step {model.step} is known in only one run"
                missing.ask(self.tally, why, facts.LOSS_IN_BOTH)
            return
        if not math.isfinite(model.loss):
            self.tally.miss(f"{self.words.its} loss of step {model.step} is not finite")
            return
        allowed = self.bounds.loss_moved if model.step else self.bounds.loss
        allowed = allowed if tolerance is None else tolerance
        allowed = self.sensitivity.allowed("loss", model.step, allowed)
        gap = allowed * abs(model.loss) + self.bounds.loss_floor
        message = f"{self.words.before}loss is off by more than {allowed:.2g} of {self.words.its}"
        place = evidence.place(self.trace, update)
        self.tally.close(model.loss, update.loss, gap, message, **place)

    def tensors(self, model: Update, update: Update) -> set[str]:
        """Compare one rank's gradient, weights and buffers. Return the parts that are done.

        A part is done if it was compared or must be left out. Under Adam, weights are left out, and
        also a user's buffers, which may depend on weights.
        """
        done = {"weights"} if self.bounds.adam else set()
        if done and self.trace.scenario.workload == "own":
            done.add("buffers")
        for part, message in _PARTS.items():
            if part in done:
                continue
            bound, floor = self.bounds.weights, 0.0
            if part == "gradient":
                bound = self.bounds.gradient_at(model.step)
                floor = self.bounds.gradient_floor
            bound = self.sensitivity.allowed(part, model.step, bound)
            mine, theirs = _tensors(model, part), _tensors(update, part)
            what = f"{self.words.before}{message} {self.words.its}"
            place = evidence.place(self.trace, update)
            place["of_gradients"] = part == "gradient"
            if part == "gradient" and self.trace.scenario.workload == "own":
                place["explain"] = partial(
                    explanations.explain_shares, self.trace, update, mine, bound
                )
                place["cancelled"] = self.cancelled(update)
            if closeness.compare_close(self.tally, mine, theirs, bound, what, floor, **place):
                done.add(part)
            if "explain" in place:
                self.before_clipping(model, update, what)
            if "explain" in place and bound > GRADIENT_BOUND:
                self.sums(model, update, what)
        return done

    def before_clipping(self, model: Update, update: Update, message: str) -> None:
        """Check that gradients before clipping are not multiplied by the number of workers.

        If all gradients are longer than the clipping norm, clipping makes sums over workers equal
        to means.
        """
        times = step_sums.ratio(model.unclipped, update.unclipped, FACTOR_BOUND)
        workers = self.trace.scenario.world_size
        if times is None or workers == 1 or self.trace.traits.shared:
            return
        if math.isclose(times, workers, rel_tol=FACTOR_BOUND):
            words = f"{message}: before it is clipped, it is {times:.6g} times as large"
            self.tally.check(False, words, **evidence.place(self.trace, update))

    def cancelled(self, update: Update) -> dict[str, float]:
        """Return tensor -> how many times larger terms are than their sum, if they mostly cancel.

        Return {} in float32, since its bound has room for cancellation.
        """
        if self.bounds.gradient <= GRADIENT_BOUND:
            return {}
        by_rank = evidence.updates(self.trace)[update.step]
        shards = evidence.shards(self.trace).get(update.step, ())
        times = step_sums.cancelled(by_rank, shards)
        return {name: size for name, size in times.items() if size > CANCELLED_MIN}

    def sums(self, model: Update, update: Update, message: str) -> None:
        """Check that gradients are combinations of their terms, if bounds are wide.

        No tensor may have a part that none of its micro-batches gave.
        """
        place = evidence.place(self.trace, update)
        bound = explanations.allowed_change(update, GRADIENT_BOUND)
        for name, change in explanations.changes(self.trace, update, model, GRADIENT_BOUND).items():
            got, scenario = change.right + change.change, self.trace.scenario
            words = factors.of(change.right, got, scenario, bound, of_gradients=True)
            self.tally.check(
                False,
                f"{message}: {name} is off by {change.relative:.2g} of its norm in a part that "
                "none of its micro-batches contributed, allowed "
                f"{bound:.2g}{words and f': {words}'}",
                tensor=name,
                **closeness.furthest(model.gradient[name], update.gradient[name], change.change),
                **place,
            )

    def ends(self, apart: int | None, dropped: int | None, *, rests: bool, is_enough: bool) -> None:
        """Report where the comparison ended early, and how closely steps were compared.

        It ends at step `apart`, which only one of the runs skipped, or at step `dropped`, in which
        only one run drops a batch because of its loss. `rests` says whether the judged run is the
        one that skipped. If `is_enough`, enough was compared before, so that this is only noted.
        """
        report = self.tally.note if is_enough else self.tally.miss
        before, model = self.words.before, self.words.run
        if apart is not None:
            reason = (
                f"{before}{'this run' if rests else model} alone skipped step {apart}, as a "
                "GradScaler with too large a scale does: steps are not compared from there "
                "on"
            )
            lacking = ", nor before: begin with a smaller scale, or use bfloat16"
            report(reason if is_enough else reason + lacking)
        if dropped is not None:
            report(
                f"{before}in step {dropped} this run and {model} drop different numbers of "
                "batches, as happens with too large a loss: steps are not compared from "
                "there on"
            )
        if reason := self.sensitivity.in_words(ROUNDING_STEPS, self.bounds.gradient):
            report(f"{before}{reason}")

    def steps(self, model: Trace) -> None:
        """Check that the run took every step that `model` took."""
        lacking = evidence.updates(model).keys() - evidence.updates(self.trace).keys()
        if lacking and model.end.status == "halted":
            self.tally.miss(f"{self.words.run} halted: {model.end.reason}")
            return
        closeness.compare_steps_made(self.tally, lacking, self.trace, self.words.before)

    def starts(self, gaps: missing.Gaps, model: Trace) -> None:
        """Compare each rank's weights before the first step with those of `model`."""
        model_start = next((start for start in model.of(Start) if start.step == 0), None)
        starts = [start for start in self.trace.of(Start) if start.step == 0 and not start.resumed]
        valued = any(evidence.has_values(start.weights) for start in starts)
        if model_start is None or not evidence.has_values(model_start.weights):
            return
        message = f"{self.words.before}weights before the first step are not {self.words.its}"
        for start in starts:
            place = {**evidence.place(self.trace, start), "step": -1}
            mine, theirs, bound = model_start.weights, start.weights, self.bounds.start
            compared = closeness.compare_close(self.tally, mine, theirs, bound, message, **place)
            if valued and not compared:
                fact = facts.values_of("Start.weights in both runs")
                gaps.add("was not compared by weights", fact, rank=start.rank, step=-1)


def _samples(trace: Trace) -> dict[int, Counter[int]]:
    """Return step -> how often each sample was used in it.

    A step with inputs that the script made from earlier samples has the samples of the step before.
    """
    samples: dict[int, Counter[int]] = {}
    for step, shards in sorted(evidence.shards(trace).items()):
        ids = Counter(i for shard in shards for i in shard.ids)
        is_made = not ids and all(shard.made for shard in shards)
        samples[step] = samples.get(step - 1, ids) if is_made else ids
    return samples


def _tensors(update: Update, part: str) -> Tensors:
    tensors: Tensors = getattr(update, part)
    if part != "buffers":
        return tensors
    return {name: record for name, record in tensors.items() if record.dtype.startswith("float")}


def _has_values(trace: Trace, part: str) -> bool:
    return any(evidence.has_values(_tensors(update, part)) for update in trace.of(Update))


# --- what is compared, and what that presupposes --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The two runs of a comparison: `trace` is judged by the reference `model`.

    They are the same trace if ranks or steps of one run are compared with each other. `runs` are
    all runs that the check was given.
    """

    runs: Traces
    model: Trace
    trace: Trace

    @property
    def is_one_run(self) -> bool:
        """True if a run is compared with itself."""
        return self.model is self.trace

    def both(self, change: Callable[[Trace], Trace]) -> Compared:
        """Return the comparison with both runs changed. One run stays one."""
        trace = change(self.trace)
        return replace(self, trace=trace, model=trace if self.is_one_run else change(self.model))

    @property
    def plain_runs(self) -> tuple[Trace, ...]:
        """Two runs of the same command with nothing changed between them; () if unknown."""
        runs = self.runs.witnesses.get(REPEATED, ())
        return runs if len(runs) == 2 else ()

    @property
    def sensitivity(self) -> Sensitivity:
        """The distance by which rounding alone moves this training run, if it was measured."""
        return rounding_bounds.sensitivity_of(self.runs)

    @cached_property
    def difference(self) -> Counterexample | None:
        """The place where the runs differ by more than rounding; None if they don't.

        If they don't differ, a presupposition that fails had no effect.
        """
        tried = Tally("", observed=True)
        compare(tried, self.model, self.trace, None, sensitivity=self.sensitivity)
        return tried.broken

    @cached_property
    def explanation(self) -> Explanation | None:
        """The exact equation that explains why the runs differ; None if there is none."""
        step = None if self.is_one_run or self.difference is None else self.difference.step
        if step is None or step < 0:
            return None
        bounds = rounding_bounds.Bounds.of(evidence.updates(self.model), self.model, self.trace)
        bound = bounds.gradient_at(step)
        return explanations.difference(self.model, self.trace, step, bound)

    @property
    def alone(self) -> Trace | None:
        """The run on one worker; None if there is none."""
        return next(iter((*self.runs.of(ALONE), *self.runs.witnesses.get(ALONE, ()))), None)


@dataclass(frozen=True, kw_only=True)
class Presupposition:
    """A condition for comparing two tensors, losses or orders of samples.

    `says` completes "a comparison presupposes that ...". `lacking` tests the condition on the runs:
    it returns why the condition fails or is unknown, and the call that settles it; "" if the
    condition holds. If it fails, `left` returns what can still be compared, or None. `is_explained`
    is true if a difference that has an explanation can't come from this condition. `broken` returns
    a counterexample if the condition fails by the script's own fault; None if that isn't certain.
    """

    says: str
    lacking: Callable[[Compared], str]
    left: Callable[[Compared], Compared | None] = lambda _: None
    is_explained: bool = False
    broken: Callable[[Compared], Mapping[str, Any] | None] = lambda _: None
