"""Judge how a script clips its gradients, with and without a declared norm. Part of F-TI-008.

**Declared.** No applied gradient may be longer than the declared norm. Each must be the whole
unclipped gradient, either as it is or scaled to the norm. The unclipped gradient is known from
`obs.reduced()`, or from the sum of the micro-batches' gradients. Of that sum only the direction is
known, since scripts divide it by different numbers.

**Undeclared.** Errors are recognised from all steps of a run together, on the assumption that a
limit is a round number, as people write them. After some errors, gradients have this norm that
should not: several groups of tensors each, or only the first step's gradient. After another error,
gradients were clipped while they were still multiplied by the loss scale. Divided by the scale
again, their norm is the limit divided by the scale: the same tiny number in each step, whatever the
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from entrenar_py.check import evidence
from entrenar_py.check.causes import clipping, explanations, rounding_bounds
from entrenar_py.check.causes.clipping import Clipped
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import closeness, missing, step_sums
from entrenar_py.check.evidence.facts import CLIP_NORM, NORMS, values_of
from entrenar_py.shared.trace import Noticed, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

ByRank = Mapping[int, Update]

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; other functions don't.
_EPSILON = 1e-6
_VARIED = 1.01  # the longest whole gradient over the shortest; a larger ratio is no chance
_OTHERWISE = "it was divided after it was clipped"
_SCALES_MIN = 32  # scripts divide by fewer micro-batches and workers than this


def compare(tally: Tally, trace: Trace) -> None:
    """Judge a run's applied gradients by the norm that its script declares.

    Nothing is judged if none is declared.
    """
    if trace.traits.clip_norm is None:
        return
    judged = _Judged(
        tally, trace, trace.traits.clip_norm, rounding_bounds.Bounds.of({}, trace).gradient
    )
    if unseen := evidence.unseen_gradients(trace):
        tally.miss(unseen)
        return
    rested = evidence.skipped_without_gradients(trace)
    since = trace.traits.compressed_from or math.inf  # the steps before this one aren't compressed
    obscured = rounding_bounds.rounded_away(trace)
    is_known = False  # whether the direction of any applied gradient could be judged
    for step, by_rank in evidence.ranks_by_step(trace):
        if step in rested:
            continue
        for update in by_rank.values():
            judged.length(update, by_rank)
        if not obscured or step < since:
            before = tally.compared
            judged.direction(by_rank)
            norms = [update.grad_norm for update in by_rank.values()]
            is_known |= tally.compared > before or None not in norms
    if obscured and (math.isinf(since) or not is_known):
        tally.miss(obscured)
    judged.lengths()


@dataclass(frozen=True)
class _Scaled:
    """A step with an applied gradient of length `norm`: the whole gradient times `factor`."""

    update: Update
    norm: float
    factor: float

    @property
    def whole(self) -> float:
        """The norm of the sum of the micro-batches' gradients."""
        return self.norm / self.factor


@dataclass
class _Judged:
    """The judgement of one run's steps. `bound` is the relative rounding error of a gradient."""

    tally: Tally
    trace: Trace
    limit: float
    bound: float
    scaled: list[_Scaled] = field(default_factory=list)
    # A gradient has the limit's length, and its length before clipping is unknown.
    clips_unseen: bool = False

    def __post_init__(self) -> None:
        self._shards = evidence.shards(self.trace)
        # Without a declaration, the norm is the argument of the script's call of `clip_grad_norm_`.
        # Then only the result of a known error falsifies, as a script may change gradients on
        # purpose after the call.
        source, losses = self.trace.traits.clip_source, self.trace.traits.losses
        self._is_seen = source == "calls" or (not source and losses == "backward")
        self._declared = f"{'max_norm' if self._is_seen else 'clip_norm'}={self.limit:g}"
        # A gradient with a norm below this was not clipped.
        self._below = self.limit * (1 - self.bound - _EPSILON / self.limit)

    def length(self, update: Update, by_rank: ByRank) -> None:
        """Check that an applied gradient is no longer than the limit.

        If `obs.reduced()` recorded the norm before clipping, the applied gradient must have the
        length that clipping gives.
        """
        norm = _length(update)
        if norm is None:
            missing.ask(self.tally, "the norm of gradients is unknown", values_of("gradient"))
        elif not math.isfinite(norm):
            return  # F-DP-003 judges this
        elif norm > self.limit * (1 + self.bound + closeness.norm_rounding(update.gradient)):
            error = explanations.first(clipping.LIST, self._clipped(by_rank, update))
            if error is None and self._is_seen:
                self._unsaid("gradients have a larger norm when they are applied")
                return
            self.tally.check(
                False,
                f"the applied gradient has a larger norm than {self._declared}{_told(error)}",
                tensor=error.tensor if error else None,
                expected=f"<= {self.limit!r}",
                got=repr(norm),
                **evidence.place(self.trace, update),
            )
        elif update.grad_norm is not None:
            self._shortened(update, norm, update.grad_norm)
        else:
            self.tally.compared += 1

    def _shortened(self, update: Update, norm: float, whole: float) -> None:
        due = min(whole, self.limit)
        rounding = self.bound + closeness.norm_rounding(update.gradient)
        allowed = due * (rounding + _EPSILON / whole) if whole else 0.0
        if norm < due - allowed and _is_power_of_two(norm / whole):
            missing.ask(self.tally, "obs.reduced() came before gradients were unscaled", NORMS)
            return
        message = f"the norm of the applied gradient is not min(norm, {self._declared})"
        place = evidence.place(self.trace, update)
        self.tally.close(due, norm, allowed, message, **place)

    def direction(self, by_rank: ByRank) -> None:
        """Check that an applied gradient has the direction of the whole one, if that is known."""
        update = evidence.any_rank(by_rank)
        if self._is_seen and all(map(self._is_as_called, by_rank.values())):
            self.tally.compared += 1
            return
        clipped = self._clipped(by_rank, update)
        norm = _length(update)
        if update.grad_norm is not None or not norm or not math.isfinite(norm):
            return
        if not clipped.whole and update.unclipped:
            if all(map(self._is_as_called, by_rank.values())):
                self.tally.compared += 1
                return
            if (error := clipping.in_pieces(clipped)) is not None:
                what = f"the applied gradient is not the whole gradient clipped to {self._declared}"
                place = evidence.place(self.trace, update)
                self.tally.check(False, f"{what}{_told(error)}", tensor=error.tensor, **place)
                return
            if self._is_seen:
                self._unsaid(f"step {update.step} does not apply the result")
                return
        if not clipped.whole:
            self.clips_unseen |= norm >= self._below
            return
        divisor = step_sums.divisor(clipped.whole, clipped.applied)
        if not divisor:
            return
        allowed = self.bound * abs(divisor) * norm
        off = step_sums.off(clipped.whole, clipped.applied, divisor, allowed)
        if not off:
            self.tally.compared += 1
            self.scaled.append(_Scaled(update, norm, 1 / divisor))
            return
        error = explanations.first(clipping.LIST, clipped)
        if error is None:
            self.tally.miss(
                f"it is unknown whether step {update.step} clips the whole gradient: the "
                "applied gradient is not a multiple of the sum over micro-batches, see "
                "F-TI-001"
            )
            return
        self.tally.check(
            False,
            "the applied gradient is not the whole gradient clipped to "
            f"{self._declared}{_told(error)}",
            tensor=error.tensor or min(off),
            **evidence.place(self.trace, update),
        )

    def _is_as_called(self, update: Update) -> bool:
        """Return whether the applied gradient is the one passed to torch's clipping, clipped.

        If the norm is known from calls only, the script may remove gradients of tensors after the
        call.
        """
        whole, applied = map(evidence.vectors, (update.unclipped, update.gradient))
        if self._is_seen and whole and applied:
            whole = {name: vector for name, vector in whole.items() if name in applied}
        size = closeness.norm_l2(update.unclipped)
        if not (whole and applied and size) or whole.keys() != applied.keys():
            return False
        if step_sums.shapes(whole) != step_sums.shapes(applied):
            return False
        factor = min(1.0, self.limit / (size + _EPSILON))
        rounding = self.bound + closeness.norm_rounding(update.gradient)
        return not step_sums.off(applied, whole, factor, rounding * factor * size)

    def lengths(self) -> None:
        """Check that gradients below the limit are as long as they were before clipping."""
        if self.clips_unseen:
            unknown = f"gradients before they were clipped to {self._declared} are unknown"
            missing.ask(self.tally, unknown, NORMS)
        free = [step for step in self.scaled if step.norm < self._below]
        if self.scaled and len(free) == len(self.scaled):
            self.tally.note(f"no gradient had the norm {self._declared}: nothing was clipped")
        if len(free) < 2 or _agree([step.factor for step in free], self.bound):
            return
        if _agree([step.factor * step.update.weight for step in free], self.bound):
            return
        place = evidence.place(self.trace, free[0].update)
        words = self._constant(free) or self._counted_twice(free)
        if self._is_seen and words.endswith(_OTHERWISE):
            self._unsaid("gradients have a smaller norm when they are applied")
        elif words:
            shown = {"expected": f"{self.limit!r}, or nothing clipped", "got": repr(free[0].norm)}
            self.tally.check(False, words, **shown, **place)
        else:
            unknown = f"it can't be told by how much {self._declared} shortened gradients"
            missing.ask(self.tally, unknown, NORMS)

    def _constant(self, free: Sequence[_Scaled]) -> str:
        """Return a phrase about the error that gives all gradients one norm below the limit.

        Return "" if the script doesn't make this error.
        """
        norms, wholes = [step.norm for step in free], [step.whole for step in free]
        if len(free) < len(self.scaled) or max(norms) > min(norms) * (1 + 4 * self.bound):
            return ""
        if max(wholes) < _VARIED * min(wholes):
            return ""
        ratio = self.limit / norms[0]
        message = f"every gradient is applied with the norm {self._declared} / {ratio:.4g}"
        if _is_power_of_two(ratio) and ratio >= _SCALES_MIN:
            return f"{message}: clipped while it was still scaled by {ratio:.0f}"
        scenario = self.trace.scenario
        for number, noun in (
            (scenario.accumulation, "micro-batches"),
            (scenario.world_size, "workers"),
        ):
            if math.isclose(ratio, number, rel_tol=4 * self.bound):
                return f"{message}: clipped before it was divided by the {number} {noun}"
        if math.isclose(ratio, math.sqrt(2), rel_tol=4 * self.bound):
            return f"{message}: all tensors were counted twice"
        return f"{message}: {_OTHERWISE}"

    def _unsaid(self, what: str) -> None:
        why = f"the script clips to {self._declared}, and {what}"
        missing.ask(self.tally, why, CLIP_NORM)

    def _counted_twice(self, free: Sequence[_Scaled]) -> str:
        """Return a phrase about the error that the norm counts a tensor twice; "" if it doesn't."""
        groups = [names for event in self.trace.of(Noticed) for names in event.shared]
        names = {name for step in free for name in step.update.gradient}
        known = {name for group in groups for name in group}
        for name in sorted(names, key=lambda n: (n not in known, n)):
            if sum(self._is_limit_with(step, name) for step in free) > 1:
                return (
                    f"gradients have a smaller norm than {self._declared}: the norm counts "
                    f"{name} twice"
                )
        return ""

    def _is_limit_with(self, step: _Scaled, name: str) -> bool:
        record = step.update.gradient.get(name)
        again = 0.0 if record is None else record.square() or 0.0
        total = math.sqrt(step.norm**2 + again)
        return math.isclose(total, self.limit, rel_tol=self.bound + _EPSILON / self.limit)

    def _clipped(self, by_rank: ByRank, update: Update) -> Clipped:
        shards = self._shards.get(update.step, [])
        return clipping.of_step(by_rank, update, shards, limit=self.limit, bound=self.bound)


def _length(update: Update) -> float | None:
    known = update.applied_norm
    return closeness.norm_l2(update.gradient) if known is None else known


def _told(error: Explanation | None) -> str:
    return f": {error.words}" if error else ""


def _agree(numbers: Sequence[float], bound: float) -> bool:
    """Return whether all numbers are equal, or differ by powers of two as loss scales do."""
    ratios = [number / numbers[0] for number in numbers]
    return all(ratio > 0 and _is_power_of_two(ratio, 4 * bound) for ratio in ratios)


def _is_power_of_two(ratio: float, bound: float = 1e-4) -> bool:
    exponent = math.log2(ratio) if ratio > 0 else math.nan
    return abs(exponent - round(exponent)) <= bound * 2 if math.isfinite(exponent) else False


# --- clipping that is not declared ----------------------------------------------------------------

_STEPS_MIN = 3  # in fewer steps, equal norms may be chance
_LATER_MIN = 4  # steps with one factor, after a first step with a different one
_TWICE = 2  # groups of one norm in a step, and steps with such groups, at least
_POWERS = (16, *range(8, 16), *range(17, 25))  # loss scales are 2^n; GradScaler begins with 2^16
_ROUND = 1e-4  # relative, of a limit with two digits; clip_grad_norm_ adds 1e-6 to a norm
_EXACT = 2e-5  # the same for a norm above 0.01 that is not divided again
_ALIKE = 1e-3  # relative: factors of steps that divide by the same number differ by less


@dataclass(frozen=True)
class Steps:
    """Step -> norm of the applied gradient, gradient before clipping, and weight."""

    norms: Mapping[int, float]
    clipped: Mapping[int, Clipped]
    weights: Mapping[int, float]


def first(trace: Trace) -> tuple[int, Explanation] | None:
    """Return the first step with a gradient, and an explanation of wrong clipping.

    Return None if there is no explanation.
    """
    steps = _steps(trace)
    if not steps.norms or not all(map(math.isfinite, steps.norms.values())):
        return None
    why = explanations.first(LIST, steps)
    return None if why is None else (min(steps.norms), why)


def _steps(trace: Trace) -> Steps:
    rested, shards = evidence.skipped_without_gradients(trace), evidence.shards(trace)
    bound = rounding_bounds.Bounds.of({}, trace).gradient
    norms, clipped, weights = {}, {}, {}
    for step, by_rank in evidence.ranks_by_step(trace):
        update = evidence.any_rank(by_rank)
        norm = closeness.norm_l2(update.gradient)
        if step in rested or not norm:
            continue
        norms[step], weights[step] = norm, update.weight
        clipped[step] = clipping.of_step(
            by_rank, update, shards.get(step, []), limit=math.nan, bound=bound
        )
    return Steps(norms, clipped, weights)


def _while_scaled(steps: Steps) -> Explanation | None:
    """Explain steps with one norm, which is a round limit divided by a power of two."""
    if len(steps.norms) < _STEPS_MIN:
        return None
    norm, *others = steps.norms.values()
    limit = _limit(norm)
    if limit is None or not all(_is_power(norm / other, _ROUND) for other in others):
        return None
    return Explanation(
        f"the norm of the applied gradient is {norm:.3g} in every step, such as {limit:g} divided "
        f"by {round(limit / norm)}, which could mean: clipped while still scaled"
    )


def _by_group(steps: Steps) -> Explanation | None:
    """Explain groups of tensors with the same round norm: each group was clipped separately.

    Networks that train together may rightly be clipped separately. But these groups divide a layer,
    as a list of parameters with weight decay does, and contain tensors of several layers.
    """
    seen: dict[float, list[tuple[str, ...]]] = {}
    counts: dict[float, int] = {}
    for clipped in steps.clipped.values():
        by_limit: dict[float, list[tuple[str, ...]]] = {}
        for names in clipping.scaled_together(clipped) if clipped.whole else ():
            norm = clipped.norm(names)
            if norm and _is_round(norm, _EXACT) and _are_multiples(clipped, names):
                by_limit.setdefault(float(f"{norm:.2g}"), []).append(names)
        for limit, groups in by_limit.items():
            if len(groups) >= _TWICE and _divide_a_layer(groups):
                seen.setdefault(limit, groups)
                counts[limit] = counts.get(limit, 0) + 1
    for limit, count in counts.items():
        if count >= _TWICE:
            few = min(seen[limit], key=len)
            words = f"the gradients of {listed(few, most=2)} alone have the norm {limit:g}"
            return Explanation(
                f"{words}, and so do the gradients of others: each group was clipped by its own "
                "norm, not by the norm of the whole gradient",
                tensor=few[0],
            )
    return None


def _are_multiples(clipped: Clipped, names: Collection[str]) -> bool:
    applied, whole = ({n: one[n] for n in names} for one in (clipped.applied, clipped.whole))
    return clipping.is_multiple(applied, whole, clipped.bound)


def _divide_a_layer(groups: list[tuple[str, ...]]) -> bool:
    layers = [{name.rpartition(".")[0] for name in names} for names in groups]
    is_divided = any(one & other for n, one in enumerate(layers) for other in layers[:n])
    return is_divided and max(map(len, layers)) > 1


def _first_alone(steps: Steps) -> Explanation | None:
    """Explain a first step with a round norm before longer gradients that are not clipped."""
    known = dict(_factors(steps))
    if len(known) != len(steps.norms) or len(known) <= _LATER_MIN:
        return None
    step, *later = sorted(known)
    limit = steps.norms[step]
    if not _is_round(limit, _EXACT) or all(steps.norms[other] <= 1.01 * limit for other in later):
        return None
    for weights in (steps.weights, dict.fromkeys(known, 1.0)):
        whole = {one: known[one] * (weights[one] or 1.0) for one in known}
        usual = whole[later[0]]
        alike = all(abs(whole[other] / usual - 1) <= _ALIKE for other in later)
        ratio = usual / whole[step]
        if alike and ratio > 1 + 10 * _ALIKE and not _is_power(ratio, _ALIKE):
            return Explanation(
                f"the gradient of step {step} alone is clipped, to {limit:.2g}, and later ones are "
                "longer, which could mean: the parameters to clip are given by a generator, which "
                "the first step has exhausted"
            )
    return None


def _factors(steps: Steps) -> Iterator[tuple[int, float]]:
    """Yield (step, factor) if the step's gradient is its micro-batches' sum times one factor."""
    for step, clipped in steps.clipped.items():
        if not clipped.whole or not clipping.is_multiple(
            clipped.applied, clipped.whole, clipped.bound
        ):
            continue
        largest = max(clipped.sizes, key=lambda name: clipped.sizes[name])
        factor = clipping.factor_of(clipped, largest)
        if factor > 0:
            yield step, factor


LIST = (_while_scaled, _by_group, _first_alone)


def _limit(norm: float) -> float | None:
    # A limit is between 0.1 and 10, and has one or two digits. If the norm itself is round, there
    # is no limit.
    if _is_round(norm, _ROUND):
        return None
    limits = [limit for power in _POWERS if _is_round(limit := norm * 2.0**power, _ROUND)]
    likely = [float(f"{limit:.2g}") for limit in limits if 0.1 - _ROUND <= limit <= 10 + _ROUND]
    return next(iter(likely), None)


def _is_power(number: float, bound: float) -> bool:
    return abs(number / 2.0 ** round(math.log2(number)) - 1) <= bound


def _is_round(norm: float, bound: float) -> bool:
    return abs(float(f"{norm:.2g}") - norm) <= bound * norm
