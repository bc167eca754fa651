"""F-TI-001: loss and gradient are weighted by samples or tokens, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import (
    accumulation,
    clipping,
    coupled_samples,
    explanations,
    loss_terms,
    presuppositions,
    rounding_bounds,
)
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import knobs, loss_shares, parity, plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, factors, facts, missing, step_sums
from entrenar_py.check.evidence.needs import (
    ALONE,
    CONTROLLED,
    NUDGED,
    ORACLE,
    REPEATED,
    SHORTENED,
    Traces,
)
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted, listed

RELATIVE = 1e-5  # the default tolerance; a float32 sum of n terms is off by up to n 2^-24


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that losses and gradients are means over samples or tokens, not means of means.

    They are compared with the shards that the run recorded, and with the oracle's run.
    """
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    changed: list[bool] = []
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    # If a worker was given the batches of several, it may divide by the number of its own tokens.
    judged = [trace for trace in runs if not explanations.is_given(trace)]
    for trace in judged:
        missing.require_updates(tally, trace)
        unknown = missing.require_shards(tally, trace)
        compared = Compared(runs=runs, model=trace, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.SUMS, compared)
        if left is not None:
            _weighted_loss(tally, left.trace, relative, unknown)
            changed += _summed_gradient(tally, left.trace, unknown)
            loss_shares.judge(tally, left.trace)
    for trace in runs.witnesses.get(SHORTENED, ()):
        _at_epochs_ends(tally, runs, trace)
    loss_terms.require_other_numbers(tally, judged)
    oracle = runs.of(ORACLE)
    shared = any(trace.of(Update) and not any(trace is one for one in oracle) for trace in runs.own)
    gradients = parity.compare_with_oracle(tally, runs, tolerance=None)
    _by_own_elements(tally, runs)
    if changed:
        _changed_gradient(tally, is_one_workers=bool(gradients) and all(gradients) and all(changed))
    is_told = tally.observed and bool(tally.missing)
    if shared and not is_told and not (gradients and all(gradients)):
        advice = facts.values_of("Update.gradient in both runs").advice(observed=tally.observed)
        few = next(filter(None, (evidence.too_few_left(t, least=2) for t in runs.own)), "")
        reason = (not gradients and parity.missing_model(tally, runs)) or few or advice
        tally.miss(f"the gradient's weighting is unknown: {reason}")
    _left_in_alone(tally, runs)
    reason = "no loss with its weight was recorded"
    return tally.finding(nothing=missing.nothing(tally, reason, facts.LOSS_AND_WEIGHT))


def _at_epochs_ends(tally: Tally, runs: Traces, trace: Trace) -> None:
    """Check the gradients of a run with short epochs, which includes work between epochs.

    What is missing in this run is also missing in the longer runs, and is not reported again.
    """
    trial = Tally(tally.invariant, observed=tally.observed)
    compared = Compared(runs=runs, model=trace, trace=trace)
    is_whole = trace.end.status == "completed"
    if is_whole and presuppositions.comparable(trial, presuppositions.SUMS, compared) is not None:
        _summed_gradient(trial, trace, missing.unknown_steps(trace))
        tally.take(trial)


def _left_in_alone(tally: Tally, runs: Traces) -> None:
    """Check the run on one worker for gradients that several workers don't clear.

    Only the run on one worker is checked, if several workers have recorded uncleared gradients, but
    none of their micro-batches' own: then only that run can show that a step's gradient still
    contains those of earlier steps.
    """
    model = parity.model_of(runs)
    if model is None or not tally.observed:
        return
    for trace in (trace for trace in runs.own if trace is not model):
        kept = {update.step for update in trace.of(Update) if update.kept}
        if kept and not any(shard.gradient for shard in trace.of(Shard)):
            trial = Tally(tally.invariant, observed=True)
            _summed_gradient(trial, model, missing.unknown_steps(model))
            if trial.broken is not None and trial.broken.step in kept:
                tally.take(trial)
            return


def _by_own_elements(tally: Tally, runs: Traces) -> None:
    model = parity.model_of(runs)
    for trace in runs.own:
        if model is not None and trace is not model and evidence.is_as_trained(trace):
            coupled_samples.judge_rank_means(tally, trace, model)


def _weighted_loss(tally: Tally, trace: Trace, relative: float, unknown: Collection[int]) -> None:
    """Check each update's loss and weight by its step's shards, except in `unknown` steps."""
    shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step in unknown:
            continue
        weight = sum(shard.weight for shard in shards[step])
        if not weight:
            missing.ask(tally, f"the micro-batches of step {step} have no weight", facts.WEIGHT)
            continue
        sums = [shard.loss_sum for shard in shards[step] if shard.loss_sum is not None]
        if not sums and trace.traits.losses == "backward":
            continue  # nothing reports a loss, so gradients decide
        if len(sums) < len(shards[step]):
            missing.ask(tally, f"the micro-batches of step {step} have no loss", facts.LOSS)
            continue
        mean = sum(sums) / weight
        # Losses may have both signs, so rounding is relative to their sizes, not to their sum.
        size = sum(map(abs, sums)) / weight
        if not math.isfinite(mean):  # F-DP-003 judges this
            continue
        for update in by_rank.values():
            if update.loss is None:
                continue  # no loss was reported, so none is weighted wrongly
            place = evidence.place(trace, update)
            message = "the step's weight is not the sum of its shards' weights"
            tally.close(weight, update.weight, 1e-9 * abs(weight), message, **place)
            message = "the reported loss is not the weighted mean of the shards' losses"
            tally.close(mean, update.loss, relative * size, message, **place)


def _changed_gradient(tally: Tally, *, is_one_workers: bool) -> None:
    """Note, or count as missing, that a script changes gradients between sum and optimizer.

    It is only noted if one worker, which has nothing to add up, applies the same gradient
    (`is_one_workers`), since the sum is then weighted rightly.
    """
    if is_one_workers:
        tally.note(
            "the script changes gradients before the optimizer gets them, on one worker and on "
            "several: it was not judged whether this is intended"
        )
        return
    tally.miss(
        "the gradient that the optimizer gets is not the sum of its micro-batches' divided by one "
        "number: if the script changes gradients on purpose (noise, a limit for each layer), call "
        "obs.reduced() before it does"
    )


def _summed_gradient(tally: Tally, trace: Trace, unknown: Collection[int]) -> list[bool]:
    """Check that the averaged gradient is the sum of the shards' gradients divided by one number.

    That number must be the same for all tensors. In all steps it must be the same, or the same
    multiple of the step's weight, unless the trait `clipping: other` says that gradients were
    recorded after clipping. This needs no second run. Shards may record their sums with a common
    factor.

    Return one value for each step with a gradient that a user's script may have changed on purpose:
    whether a run on one worker would show that the gradient was added up correctly.
    """
    if why := rounding_bounds.rounded_away(trace):
        tally.miss(why)
        return []
    if trace.traits.steps != "model" and not any(u.gradient for u in trace.of(Update)):
        tally.miss("the optimizer steps copies of the model's weights, with gradients of their own")
        return []
    if _is_rounded(tally, trace):
        return []
    shards = evidence.shards(trace)
    valued = any(evidence.has_values(shard.gradient) for shard in trace.of(Shard))
    rested = evidence.skipped_without_gradients(trace)
    divisions = _Divisions.of(tally, trace)
    loss_terms.judge(tally, trace)
    _none_dropped(tally, trace)
    _note_kept(tally, trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        update = evidence.any_rank(by_rank)
        if not shards.get(step):
            _require_pass(tally, trace, update)
        if step in unknown or step in rested:
            continue
        if (left := accumulation.of_evaluation(by_rank, shards[step], divisions.bound)) is not None:
            name, why_left = left
            message = f"the applied gradient of {name} {why_left.words}"
            tally.check(False, message, tensor=name, **evidence.place(trace, update))
            continue
        total = step_sums.total(by_rank, shards[step])
        mean = evidence.vectors(_by_micro_batch(trace, update))
        earlier = accumulation.of_earlier_steps(trace, update)
        if earlier and total and mean:
            tally.miss(
                f"the gradient of {listed(earlier, most=2)} also contains passes of earlier steps, "
                "in which its optimizer did not step: what is added up over several steps is not "
                "judged"
            )
            total, mean = (
                {n: v for n, v in of.items() if n not in earlier} for of in (total, mean)
            )
        if total and mean is not None and trace.scenario.workload == "own":
            total = _without_taken(tally, total, mean, step)
            # No micro-batch used these tensors. The script may have set their gradients to zero.
            total |= {n: np.zeros(v.shape) for n, v in mean.items() if n not in total}
        if total and mean is not None and step_sums.shapes(total) == step_sums.shapes(mean):
            for names in _apart(by_rank, shards[step], mean):
                sums, applied = ({n: vectors[n] for n in names} for vectors in (total, mean))
                divisions.add(update, by_rank, shards[step], sums, applied)
        elif valued and not _lacks_first_passes(trace, shards[step]):
            fact = facts.values_of("Shard.gradient and Update.gradient of all tensors")
            missing.ask(tally, f"the gradients of step {step} could not be added", fact)
    return divisions.changed


def _lacks_first_passes(trace: Trace, shards: Sequence[Shard]) -> bool:
    lacking = {(shard.step, shard.shard) for shard in shards if not shard.gradient}
    return bool(lacking) and lacking <= evidence.passes_begun_late(trace)


def _apart(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], gradient: Collection[str]
) -> list[list[str]]:
    """Return the tensors of a step's gradient, in one list for each separate loss.

    Two networks may each be clipped by its own norm. Tensors without a loss are in the first list.
    """
    names: list[list[str]] = []
    for part in step_sums.parts(by_rank, shards):
        given = {name for shard in part for name in step_sums.summed(by_rank, shard)}
        names.append([name for name in gradient if name in given])
    known = {name for part in names for name in part}
    rest = [name for name in gradient if name not in known]
    first, *others = [part for part in names if part] or [[]]
    return [first + rest, *others]


def _is_rounded(tally: Tally, trace: Trace) -> bool:
    """Return whether sums are rounded to 16 bits although float32 is declared.

    If they are, report a counterexample.
    """
    if trace.traits.compressed != "float32":
        return False
    rounded = rounding_bounds.undeclared_format(trace, rounding_bounds.GRADIENT_BOUND)
    if rounded:
        first = evidence.any_rank(next(by_rank for _, by_rank in evidence.ranks_by_step(trace)))
        message = "sums of gradients are rounded to 16 bits, and float32 is declared for them"
        tally.check(False, message, **evidence.place(trace, first))
    return bool(rounded)


def _by_micro_batch(trace: Trace, update: Update) -> Tensors:
    """Return the gradient without the tensors for which no micro-batch's part is known."""
    if not trace.traits.shared:
        return update.gradient
    return {n: t for n, t in update.gradient.items() if update.summed.get(n) != ()}


def _require_pass(tally: Tally, trace: Trace, update: Update) -> None:
    place = evidence.place(trace, update)
    if (again := accumulation.stepped_again(trace, update)) is not None:
        tally.check(False, f"the applied gradient {again.words}", **place)
    if (moved := accumulation.moved_without_pass(trace, update)) is not None:
        name, message = moved
        tally.check(False, message, tensor=name, **place)


def _without_taken(
    tally: Tally, total: Mapping[str, step_sums.Vector], mean: step_sums.Vectors, step: int
) -> dict[str, step_sums.Vector]:
    taken = sorted(total.keys() - mean.keys())
    if taken and not any("removed the gradient of" in note for note in tally.notes):
        names = listed(taken, most=2)
        tally.note(f"the script removed the gradient of {names} before the update of step {step}")
    return {name: value for name, value in total.items() if name in mean}


@dataclass
class _Divisions:
    """The numbers by which a run divides sums of gradients to average them, step by step.

    `limit` is the size at which elements are clipped, or None. `first` maps the first tensor of
    each loss to the divisor of the first step: as it is, and divided by the step's weight.
    `changed` is what `_summed_gradient` returns.
    """

    tally: Tally
    trace: Trace
    bound: float
    limit: float | None
    first: dict[str, tuple[float, float]] = field(default_factory=dict)
    changed: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, tally: Tally, trace: Trace) -> _Divisions:
        bound = rounding_bounds.Bounds.of({}, trace).gradient
        if any(
            record.sketch for shard in trace.of(Shard)[:1] for record in shard.gradient.values()
        ):
            bound *= closeness.PROJECTED
        limit = clipping.limit_of_elements(trace) if trace.scenario.workload == "own" else None
        return cls(tally, trace, bound, limit)

    def add(
        self,
        update: Update,
        by_rank: Mapping[int, Update],
        shards: Sequence[Shard],
        total: step_sums.Vectors,
        mean: step_sums.Vectors,
    ) -> None:
        """Check that a step divided all tensors by one number, the same as in earlier steps.

        `total` is the sum of the shards' gradients, and `mean` the update's gradient.
        """
        size = sum(float(np.square(v, dtype=np.float64).sum()) for v in mean.values())
        divisor = step_sums.divisor(total, mean) if size and math.isfinite(size) else None
        if divisor is None:
            return
        place = evidence.place(self.trace, update)
        allowed = self.bound * abs(divisor) * math.sqrt(size)
        off: Collection[str] = step_sums.off(total, mean, divisor, allowed)
        if off and self._is_cut(update, by_rank, shards):
            self.tally.note(f"gradients are clipped element by element, at {self.limit:.3g}")
            off = set()
        explanation = None
        if off:
            off, explanation = self._explained(update, total, mean, divisor, off)
        if off and self._is_open(explanation, update):
            if explanation is None:
                is_plain = _has_one_part(shards) or self._is_scaled(total, mean)
                earlier = accumulation.is_kept(self.trace, update, total, mean, self.bound)
                self.changed.append(is_plain and not earlier)
            return
        for name in mean:
            message = (
                f"the averaged gradient of {name} is not the sum of the shards' gradients divided "
                "by the number that the other tensors were divided by"
                if explanation is None
                else f"the applied gradient of {name} {explanation.words}"
            )
            self.tally.check(name not in off, message, tensor=name, **place)
        # Otherwise these are parts of a penalty.
        if update.mixed and not off and not loss_terms.are_one_mean(shards):
            self._judge_climb(update, mean)
        if self.trace.traits.clipping == "other":
            return  # clipping may have changed each recorded gradient by a different factor
        divided = divisor, divisor / (update.weight or 1.0)
        first = self.first.setdefault(next(iter(mean)), divided)
        is_alike = any(
            abs(now - before) <= self.bound * abs(before)
            for now, before in zip(divided, first, strict=True)
        )
        if not is_alike and self.trace.traits.losses == "backward":
            told = "the gradient was divided by a different number than before, maybe by its weight"
            missing.ask(self.tally, told, facts.LOSS_AND_WEIGHT)
            return
        self.tally.check(
            is_alike,
            "the gradient was divided by a different number than before, and by a "
            "different multiple of the step's weight",
            expected=" or ".join(map(repr, first)),
            got=" or ".join(map(repr, divided)),
            **place,
        )

    def _judge_climb(self, update: Update, mean: step_sums.Vectors) -> None:
        """Judge a gradient that contains the passes before and after weights were moved along it.

        A sharpness-aware step moves all weights, and applies the second gradient alone. Adversarial
        training adds both on purpose: FGM moves the embedding, AWP any weights. Only an optimizer
        with another one inside is known to be sharpness-aware.
        """
        mixed = sorted(mean.keys() & {*update.mixed})
        if not mixed:
            return
        words = (
            f"the applied gradient of {mixed[0]} also contains the gradient of the pass before its "
            "weights were moved"
        )
        if mean.keys() - {*mixed}:
            self.tally.note(f"{words}, as in adversarial training: other weights were not moved")
        elif self.trace.traits.stepped_by == "inner":
            message = f"{words}: clear gradients between the two passes of a sharpness-aware step"
            place = evidence.place(self.trace, update)
            self.tally.check(False, message, tensor=mixed[0], **place)
        else:
            self.tally.miss(
                f"{words}: right in adversarial training (AWP), wrong in a sharpness-aware step, "
                "which clears gradients between its two passes"
            )

    def _is_cut(
        self, update: Update, by_rank: Mapping[int, Update], shards: Sequence[Shard]
    ) -> bool:
        total = step_sums.total(by_rank, shards, evidence.elements)
        mean = evidence.elements(update.gradient)
        if self.limit is None or total is None or mean is None:
            return False
        return clipping.explains_elements(total, mean, self.limit, self.bound)

    def _explained(
        self,
        update: Update,
        total: step_sums.Vectors,
        mean: step_sums.Vectors,
        divisor: float,
        off: Collection[str],
    ) -> tuple[Collection[str], Explanation | None]:
        """Return which tensors are `off`, and what explains their gradient; None if nothing does.

        Wrong tensors that are large may have determined the divisor, so the divisors of other
        tensors are tried, too. If the gradient still has no explanation, elements that may be
        clipped are left out.
        """
        step = accumulation.Applied(self.trace, update, total, mean, divisor, off, self.bound)
        if (explanation := explanations.first(accumulation.LIST, step)) is not None:
            return off, explanation
        for each in step.by_other_divisors():
            if (explanation := explanations.first(accumulation.LEFT_IN, each)) is not None:
                return each.off, explanation
        if not self.limit:
            return off, None
        total, mean = clipping.uncut_elements(total, mean, self.limit)
        if (free := step_sums.divisor(total, mean)) is None:
            return off, None
        size = math.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in mean.values()))
        still = step_sums.off(total, mean, free, self.bound * abs(free) * size)
        step = accumulation.Applied(self.trace, update, total, mean, free, still, self.bound)
        explanation = accumulation.own_factor(step) if still else None
        return (off, None) if explanation is None else (still, explanation)

    def _is_scaled(self, total: step_sums.Vectors, mean: step_sums.Vectors) -> bool:
        moved = [name for name in mean if mean[name].any() or total[name].any()]
        factors_of = [factors.ratio(total[name], mean[name], self.bound) for name in moved]
        return all(factor is not None and factor > 0 for factor in factors_of)

    def _is_open(self, explanation: Explanation | None, update: Update) -> bool:
        """Return whether a user's script may have changed the gradient on purpose.

        If `obs.reduced()` reported the gradient, it is that of the whole batch, and the answer is
        no.
        """
        declared = self.trace.scenario.workload != "own" or update.grad_norm is not None
        if explanation is not None and not explanation.is_wrong:
            self.tally.miss(
                f"the gradient that the optimizer gets {explanation.words}: {explanation.advice}"
            )
            return True
        return explanation is None and not declared


def _has_one_part(shards: Sequence[Shard]) -> bool:
    return len({shard.rank for shard in shards}) == len(shards)


def _note_kept(tally: Tally, trace: Trace) -> None:
    """Note gradients that were not cleared, since they may be too small to show in the sum."""
    for update in trace.standing.of(Update):
        if update.kept:
            names = listed([*update.kept], most=2)
            since = min(update.kept.values())
            tally.note(
                f"gradients of {names} were neither cleared nor overwritten since step {since}"
            )
            return


def _none_dropped(tally: Tally, trace: Trace) -> None:
    """Check that micro-batches' gradients are not cleared before they are applied.

    It is wrong if gradients are cleared in at least half of the steps, and in two or more.

    A script may drop a micro-batch now and then on purpose, after a loss that is too large. It may
    also clear gradients at the beginning of each epoch, if too few micro-batches are left for a
    step.
    """
    by_step = evidence.updates(trace)
    shards = evidence.shards(trace)
    all_lost = {
        step: dropped
        for step, by_rank in sorted(by_step.items())
        if (dropped := step_sums.dropped(by_rank, shards.get(step, ())))
        # Otherwise these are several losses of the same samples.
        and step_sums.are_apart(shards[step])
    }
    lost = {
        step: within
        for step, dropped in all_lost.items()
        if (within := _of_steps_epoch(by_step[step], shards[step], dropped))
    }
    ended = [step for step in all_lost if step not in lost]
    if ended:
        tally.note(
            "gradients of micro-batches that an epoch left for no step were cleared before the "
            f"next epoch's, in {len(ended)} of {counted(len(by_step), 'step')}: their samples are "
            "counted in no step"
        )
    if not lost:
        return
    first = next(iter(lost.values()))
    words = (
        "the gradient of a micro-batch was cleared before the optimizer stepped, in "
        f"{len(lost)} of {counted(len(by_step), 'step')}"
    )
    if len(lost) < 2 or 2 * len(lost) < len(by_step):
        tally.note(f"{words}: its samples are counted in no step")
        return
    message = (
        f"{words}, which could mean: gradients are cleared between the micro-batches of a step"
    )
    tensor = next(iter(first[0].gradient))
    tally.check(False, message, tensor=tensor, **evidence.place(trace, first[0]))


def _of_steps_epoch(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], dropped: Sequence[Shard]
) -> list[Shard]:
    """Return the shards in `dropped` that are not of an earlier epoch than what was applied."""
    first = min((shard.epoch for shard in step_sums.held(by_rank, shards)), default=0)
    return [shard for shard in dropped if shard.epoch >= first]


ROWS = (
    Check(
        name="weighting",
        id="F-TI-001",
        decides="loss and gradient are weighted by samples or tokens, never a mean of means",
        spoken_of="loss scaling mean-of-means weighted tokens micro-batch losses",
        judge=judge,
        plan=plans.weightings,
        explores=True,
        needs=(ALONE, ORACLE, *knobs.TURNED),
        witnesses=(REPEATED, NUDGED, CONTROLLED, SHORTENED),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        in_step=True,
        takes_turned=True,
    ),
)
