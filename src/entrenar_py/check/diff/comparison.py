"""The comparison of two sides: which runs it needs, and what they have shown together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from entrenar_py.check.diff import environment, judge, operations
from entrenar_py.check.diff.judge import Difference, Judgement, Ranks
from entrenar_py.check.diff.operations import Culprit
from entrenar_py.check.diff.runs import Failure, Run, Side
from entrenar_py.check.diff.sources import Source
from entrenar_py.check.rank_files import border_file
from entrenar_py.shared.errors import TraceError

EQUAL, ROUNDING, REAL, UNKNOWN = "equal", "rounding", "real", "unknown"
EXIT_CODES = {EQUAL: 0, ROUNDING: 0, REAL: 1, UNKNOWN: 4}
# Values of an optimizer's groups say nothing of a training that was not seen otherwise.
_NOT_ENOUGH = (border_file.RATE, border_file.PARAMETER, border_file.BUFFER)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known about two trainings.

    - `verdict`: equal, rounding, real or unknown; for unknown, `reason` says why.
    - `surroundings`: what differs outside of the runs, by name, before anything ran.
    - `facts`: what differs between the processes, such as the number of threads.
    - `culprit`: the first operation that differs, if it is known.
    - `source`: why runs of one command differ, as far as it is known.
    - `step_ms`: milliseconds of a step, with the operations as they are and with deterministic
      ones, if these take the difference away.
    - `only_first`, `only_second`: modules that only one run calls right before the difference.
    """

    names: tuple[str, str]
    verdict: str
    reason: str = ""
    surroundings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    facts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    judgement: Judgement | None = None
    culprit: Culprit | None = None
    source: Source | None = None
    step_ms: tuple[float, float] | None = None
    only_first: Sequence[str] = ()
    only_second: Sequence[str] = ()
    losses: tuple[Mapping[int, float], Mapping[int, float]] = field(default=({}, {}))
    num_disturbed: int = 0
    problems: Sequence[str] = ()

    @property
    def difference(self) -> Difference | None:
        """The first real difference; without one, the first difference at all."""
        judgement = self.judgement
        if judgement is None:
            return None
        real = judgement.real if self.verdict == REAL else None
        return real or judgement.bits

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return EXIT_CODES[self.verdict]


def compare(first: Side, second: Side) -> Outcome:
    """Return what two sides have shown; runs are made as they are needed."""
    surroundings = environment.differences(first.environment, second.environment)
    names = (first.name, second.name)
    try:
        runs = [side.plain() for side in (first, second)]
        disturbed = first.disturbed()
    except (Failure, TraceError) as error:
        return Outcome(names=names, verdict=UNKNOWN, reason=str(error), surroundings=surroundings)
    own, far = (run.ranks for run in runs)
    judgement = judge.judge(own, far, disturbed)
    problems = problems_of(names, runs)
    verdict, reason = verdict_of(judgement, disturbed, problems)
    facts = environment.differences(*({} if not one else one[0].facts for one in (own, far)))
    # On other hardware, or with another version, the first operation of all differs in bits.
    is_near = not facts or not surroundings
    sought = judgement.real or (judgement.bits if is_near else None)
    culprit = None if sought is None else _culprit(first, second, sought)
    if verdict != REAL and culprit is not None and culprit.other_factors:
        verdict, reason = REAL, "the same operation with another argument, which rounding hides"
    only = _only(judgement, sought)
    return Outcome(
        names=names,
        verdict=verdict,
        reason=reason,
        surroundings=surroundings,
        facts=facts,
        judgement=judgement,
        culprit=culprit,
        only_first=only[0],
        only_second=only[1],
        losses=(judge.losses(own), judge.losses(far)),
        num_disturbed=len(disturbed),
        problems=problems,
    )


def problems_of(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return how runs ended before their time, each with its name."""
    return [f"{name}: {run.problem}" for name, run in zip(names, runs, strict=True) if run.problem]


def verdict_of(
    judgement: Judgement, disturbed: Sequence[Ranks], problems: Sequence[str]
) -> tuple[str, str]:
    """Return the verdict, and why nothing can be told."""
    if judgement.bits is not None and not any(disturbed):
        return UNKNOWN, "bits differ, and no run with disturbed last bits shows what rounding does"
    if judgement.real is not None:
        return REAL, ""
    compared = [one for one in judgement.differences if one.border.kind not in _NOT_ENOUGH]
    if not compared:
        return UNKNOWN, "; ".join(
            ["both runs have no value in common", *judgement.alignment.notes, *problems]
        )
    if judgement.undecided:
        return UNKNOWN, judgement.undecided
    if problems:
        return UNKNOWN, f"the runs agree as far as they came: {'; '.join(problems)}"
    return EQUAL if judgement.bits is None else ROUNDING, ""


def _culprit(first: Side, second: Side, difference: Difference) -> Culprit | None:
    try:
        step = difference.border.step
        own, far = (side.operations(step) for side in (first, second))
        if not (own and far):
            return None
        if not difference.is_real:
            return operations.culprit(own, far, [], difference, in_bits=True)
        disturbed = first.operations(step, noise=1)
    except (Failure, TraceError):
        return None
    return operations.culprit(own, far, [disturbed], difference) if disturbed else None


def _only(judgement: Judgement, difference: Difference | None) -> tuple[list[str], list[str]]:
    """Return the modules that only one run calls in the module with the difference, before it."""
    if difference is None:
        return [], []
    border, alignment = difference.border, judgement.alignment
    begins = [
        pair
        for pair in alignment.pairs
        if (pair.first.step, pair.first.micro_batch) == (border.step, border.micro_batch)
        and pair.first.order < difference.order
        and pair.first.name == border.where
    ]
    low = (begins[-1].first.order, begins[-1].second.order) if begins else (0, 0)
    high = (difference.order, difference.second.order if difference.second else math.inf)
    own, far = (
        dict.fromkeys(
            each.name
            for _, each in borders
            if each.kind == border_file.OUTPUT
            and each.step == border.step
            and low[side] < each.order < high[side]
        )
        for side, borders in enumerate((alignment.only_first, alignment.only_second))
    )
    return [*own], [*far]
