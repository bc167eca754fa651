"""The comparison of a command with itself: is it deterministic, and if not, why?

Nothing is seeded, and statements are followed. If no value of the script differs before the first
border that does, an operation is the source. Then the runs are made with torch's deterministic
algorithms, and steps are timed both ways with nothing else observed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import median

from entrenar_py.check.diff import comparison, judge, operations, sources
from entrenar_py.check.diff.comparison import REAL, ROUNDING, UNKNOWN, Outcome
from entrenar_py.check.diff.judge import Judgement
from entrenar_py.check.diff.operations import Culprit
from entrenar_py.check.diff.runs import CommandSide, Failure, Run
from entrenar_py.check.diff.sources import Source
from entrenar_py.check.rank_files import border_file, line_file
from entrenar_py.shared.errors import TraceError

REPETITIONS = 3


def repeat(first: CommandSide, second: CommandSide) -> Outcome:
    """Return what runs of one command have shown: the first, and up to REPETITIONS of it.

    The first repetition with other bits is compared. All values before its first difference are
    the same, so that is rounding if one sum may round so much.
    """
    names = (first.name, second.name)
    try:
        run = first.plain()
        for number in range(REPETITIONS):
            other = second.plain() if not number else second.again(number)
            judgement = judge.judge(run.ranks, other.ranks, [])
            if judgement.bits is not None:
                break
    except (Failure, TraceError) as error:
        return Outcome(names=names, verdict=UNKNOWN, reason=str(error))
    problems = comparison.problems_of(names, (run, other))
    bits = judgement.bits
    if bits is None:
        verdict, reason = comparison.verdict_of(judgement, [], problems)
    else:
        verdict, reason = REAL if bits.is_real else ROUNDING, ""
    source, culprit = (
        (None, None) if bits is None else _source(first, second, (run, other), judgement)
    )
    return Outcome(
        names=names,
        verdict=verdict,
        reason=reason,
        judgement=replace(judgement, real=bits if verdict == REAL else None, explaining=()),
        culprit=culprit,
        source=source,
        step_ms=None if culprit is None else _step_ms(first, second),
        losses=(judge.losses(run.ranks), judge.losses(other.ranks)),
        problems=problems,
    )


def _source(
    first: CommandSide, second: CommandSide, runs: tuple[Run, Run], judgement: Judgement
) -> tuple[Source | None, Culprit | None]:
    """Return where runs of one command begin to differ: a statement, or else an operation."""
    difference = judgement.bits
    assert difference is not None, "the runs differ"
    rank, border = difference.rank, difference.border
    generators = any(
        (pair.first.step, pair.first.order) <= (border.step, border.order)
        for pair in judgement.explaining
        if pair.rank == rank and pair.first.kind == border_file.GENERATOR
    )
    source = None
    with suppress(Failure, TraceError):
        own, far = (line_file.load_folder(run.folder, rank) for run in runs)
        source = sources.source(own, far, border, generators=generators)
        by_hash = sources.by_hash(own, far)
        if by_hash and (source is None or source.kind in sources.UNSURE):
            fixed = [side.with_variables(PYTHONHASHSEED="0").ranks for side in (first, second)]
            if judge.judge(fixed[0], fixed[1], []).bits is None:
                source = by_hash
        if source is None:
            recorded = [side.operations(border.step) for side in (first, second)]
            culprit = operations.culprit(recorded[0], recorded[1], [], difference, in_bits=True)
            if culprit is None or not culprit.first_site:  # these two runs may be the same
                culprit = operations.unordered(recorded[0], recorded[1], difference)
            if culprit is not None:
                return sources.of_operation(culprit), culprit
    return source, None


def _step_ms(first: CommandSide, second: CommandSide) -> tuple[float, float] | None:
    """Return the milliseconds of a step as it is and deterministic; None if that doesn't help."""
    with suppress(Failure, TraceError):
        runs = [side.deterministic().ranks for side in (first, second)]
        if judge.judge(runs[0], runs[1], []).bits is None:
            usual, ordered = list[float](), list[float]()
            for side in (first, second):  # in turns, as the machine may have other work at times
                usual += side.step_ms(deterministic=False)
                ordered += side.step_ms(deterministic=True)
            return (median(usual), median(ordered)) if usual and ordered else None
    return None
