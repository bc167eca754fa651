"""Judge the runs of a user's own trainer, each by the checks that apply to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.check import clauses as checks
from entrenar_py.check.clauses import Check
from entrenar_py.check.command import asked
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.runs import Run
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    CONTROLLED,
    KILLED,
    NUDGED,
    REPEATED,
    RESUMED,
    SAVED,
    SHORTENED,
    Near,
    Need,
    Runs,
)
from entrenar_py.check.harness import companions, plan, roles, stored
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.harness.runner import Listener, ignore
from entrenar_py.check.reports.report import Entry, NotApplying
from entrenar_py.shared.faults import MERGED, OF_RECORDS, are_of_witnesses, are_shortened, steps_of
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import inconclusive
from entrenar_py.shared.wording import counted

NO_WORKDIR = (
    "the command needs {workdir} (folder of checkpoints), and should have {steps} (steps in all); "
    "put them into it, or exclude the clause"
)
_NO_WORKER = "no worker was killed: that takes two workers or more; raise --world-size"
_BY_PROBES = "decided by a probe that the harness runs itself, not by a script's runs"


def tasks(selected: Sequence[Invariant]) -> list[Task]:
    """Return a task for each clause that applies to a user's trainer: all but `elsewhere`."""
    others = {left_out.invariant.id for left_out in elsewhere(selected)}
    clauses = [clause for clause in selected if clause.id not in others]
    planned, _ = plan.divide(clauses, plan.Plan(is_run=False))
    return list(planned)


def elsewhere(selected: Sequence[Invariant]) -> tuple[NotApplying, ...]:
    """Return the clauses that don't apply to a user's trainer, each with the reason.

    They are bound to systems of the harness, decided by its probes, or about a promise that no
    script makes.
    """
    reasons = ((clause, _why_elsewhere(clause)) for clause in selected)
    return tuple(
        NotApplying(invariant=clause, reason=why, outside=True) for clause, why in reasons if why
    )


def _why_elsewhere(clause: Invariant) -> str:
    """Return why a clause doesn't apply to a user's trainer; "" if it does."""
    if clause.binding is not None and clause.binding.systems:
        return f"its binding is for {', '.join(clause.binding.systems)} only"
    check = checks.bind(clause)
    if check is None:
        return ""
    if check.bitwise:
        return (
            "a script promises agreement within rounding, not the same bits for any number of "
            "workers"
        )
    if check.explores or check.takes_commands:
        return ""
    return check.not_of_commands or _BY_PROBES


def judge(
    tasks: Sequence[Task],
    runs: Mapping[Path, Run],
    *,
    having: Path | None = None,
    on_judged: Listener = ignore,
) -> Iterator[Entry]:
    """Yield an entry per task that has no check, or whose check judges any of `runs` (by file).

    If `having` is given, only judgements in which the run in that file takes part are made.
    """
    for task in tasks:
        check = task.check
        if check is None:
            yield stored.judge_each(task, {}, {})
            continue
        traces = {file: run.trace for file, run in runs.items() if _is_for(check, run)}
        if not traces:
            continue
        spared = [] if having else _spared(check, {file: runs[file] for file in traces})
        groups = {file: _beside(check, file, runs) for file in traces if file not in spared}
        groups = {file: of for file, of in groups.items() if not _is_replaced(check, file, groups)}
        if having is not None:
            groups = {file: of for file, of in groups.items() if having in (file, *of)}
            if not groups:
                continue
        entry = stored.judge_each(
            task,
            {_name(file): group.chosen(_name) for file, group in groups.items()},
            {
                _name(file): run.trace
                for file, run in runs.items()
                if file in traces or are_of_witnesses(run.asked.faults)
            },
            on_judged=on_judged,
            form="{reason} [{files}]",
        )
        asked = [runs[file].asked for file in traces]
        is_base_lost = _is_base_lost([runs[file] for file in traces])
        if not entry.finding.applies:
            yield entry
            continue
        if not is_base_lost and (why := _lacking(check, asked, [*traces.values()])):
            entry = replace(entry, finding=inconclusive(task.invariant.id, why))
        notes = (
            *entry.finding.notes,
            *_unbroken(check, runs.values()),
            *(_not_judged(runs[file]) for file in spared),
        )
        is_bare = is_base_lost or all(run.traits.saves == "nothing" for run in traces.values())
        untried = (*_untried(check, asked), *(() if is_bare else _unresumed(check, asked)))
        yield replace(entry, finding=replace(entry.finding, notes=notes), untried=untried)


def _name(file: Path) -> Path:
    """Return the name of the run in `file`, as findings have it."""
    return Path(file.stem)


def _is_for(check: Check, run: Run) -> bool:
    return asked.judges(check, run.asked)


def _spared(check: Check, runs: Mapping[Path, Run]) -> list[Path]:
    """Return the files of failed runs that were made for other checks, if others did not fail.

    This check judges them, too, but its verdict stands without them.
    """
    failed = [file for file, run in runs.items() if _failed(run)]
    most = max(run.asked.world_size for run in runs.values())
    spare = [file for file in failed if _is_spare(check, runs[file].asked, most)]
    return spare if len(spare) < len(runs) else []


def _failed(run: Run) -> bool:
    return run.trace.end.status == "failed"


def _is_base_lost(runs: Collection[Run]) -> bool:
    """Return whether a run failed after which others would be stopped, or a worker be killed.

    Then those were not launched, whatever the command could say.
    """
    most = max(run.asked.world_size for run in runs)
    failed = [run.asked for run in runs if _failed(run) and run.asked.world_size == most]
    return any(
        one.is_unstruck and not one.repeat and (one.turn is None or one.turn.knob == "accumulation")
        for one in failed
    )


def _is_spare(check: Check, asked: Asked, most: int) -> bool:
    """Return whether a run is none of those that the check needs, or that were requested."""
    if asked.stops:
        return not {RESUMED, SAVED}.intersection(check.needs)
    if asked.turn is not None:
        return asked.turn.knob not in {need.knob for need in check.needs}
    if asked.repeat:
        return REPEATED not in (*check.needs, *check.witnesses)
    return asked.is_plain and asked.world_size == 1 < most and ALONE not in check.needs


def _not_judged(run: Run) -> str:
    return f"not judged: {run_names.of(run.trace.scenario)} failed: {run.trace.end.reason}"


def _beside(check: Check, file: Path, runs: Mapping[Path, Run]) -> Runs[Path]:
    """Return the files of the run in `file` and of the runs that it is compared with.

    A run on one worker that trained on other batches isn't compared: it is only put in `near`.
    """
    files = {run.asked: file for file, run in runs.items()}
    chosen = asked.beside(check.needs, runs[file].asked).chosen(files.get)
    chosen = replace(chosen, witnesses=_witnesses(runs))
    if CONTROLLED in check.witnesses and chosen.of(ALONE):
        replayed = _joined(runs, runs[file].trace, *OF_RECORDS)
        if replayed is not None:
            return replace(chosen, beside={**chosen.beside, ALONE: (replayed,)})
    for alone in chosen.of(ALONE):
        meant = companions.plain(runs[file].trace.scenario, world_size=1)
        fields = roles.differences(runs[alone].trace.scenario, meant)
        unlike = {name: pair for name, pair in fields.items() if name not in roles.free(ALONE)}
        if unlike:
            rest = {need: those for need, those in chosen.beside.items() if need is not ALONE}
            if (merged := _joined(runs, runs[file].trace, MERGED)) is not None:
                return replace(chosen, beside={**rest, ALONE: (merged,)})
            return replace(chosen, beside=rest, near={ALONE: Near(alone, unlike)})
    return chosen


def _is_replaced(check: Check, file: Path, groups: Mapping[Path, Runs[Path]]) -> bool:
    """Return whether a run on one worker is compared with no other, since another takes its place.

    It had the batches of one of several workers, the other one those of all.
    """
    used = {alone for of in groups.values() for alone in of.of(ALONE)}
    is_own = {*groups[file].of(ALONE)} <= {file}
    return CONTROLLED in check.witnesses and is_own and bool(used - groups.keys())


def _joined(runs: Mapping[Path, Run], base: Trace, *kinds: str) -> Path | None:
    """Return the file of the run on one worker that had the batches of all workers of `base`.

    It came by them by a fault of one of the `kinds`.
    """
    meant = companions.plain(base.scenario, world_size=1)
    due = {*roles.free(ALONE), "faults"}
    for file, run in runs.items():
        faults = run.asked.faults
        if len(faults) != 1 or faults[0].kind not in kinds or _failed(run):
            continue
        if not roles.differences(run.trace.scenario, meant).keys() - due:
            return file
    return None


def _witnesses(runs: Mapping[Path, Run]) -> dict[Need, tuple[Path, ...]]:
    """Return the files of the runs that show whether others can be compared, if there are any.

    REPEATED: two runs that should be equal. ALONE: the run on one worker. NUDGED: a run, and the
    same run with nudged weights. CONTROLLED: all runs with equal random numbers or shares.
    SHORTENED: those with short epochs, or more steps.
    """
    plain = {run.asked: file for file, run in runs.items() if run.asked.is_witness}
    pairs = [(replace(again, repeat=0), again) for again in plain if again.repeat]
    twice = next((pair for pair in pairs if pair[0] in plain), ())
    changed = [(replace(run, faults=()), run) for run in plain if run.faults]
    changed = [pair for pair in changed if pair[0] in plain]
    alone = [run for run in plain if run.is_plain and run.world_size == 1 and not run.repeat]
    short = [run for run in plain if are_shortened(run.faults) or steps_of(run.faults)]
    others = {run for run in plain if run.is_plain or run.is_nudged}
    controlled = [run for run in plain if run not in others and run not in short]
    witnesses = {
        REPEATED: twice,
        ALONE: alone,
        NUDGED: next((pair for pair in changed if pair[1].is_nudged), ()),
        CONTROLLED: controlled,
        SHORTENED: short,
    }
    return {need: tuple(plain[run] for run in some) for need, some in witnesses.items()}


def _unresumed(check: Check, asked: Sequence[Asked]) -> tuple[str, ...]:
    """Return the placeholder by which runs are stopped and resumed, if `check` lacks such a run."""
    stopped = any(run.stops for run in asked)
    return () if stopped or not {RESUMED, SAVED}.intersection(check.needs) else ("workdir",)


def _untried(check: Check, asked: Sequence[Asked]) -> tuple[str, ...]:
    """Return the knobs that `check` needs turned and that no run has turned."""
    tried = {run.turn.knob for run in asked if run.turn is not None}
    return tuple(need.knob for need in check.needs if need.knob and need.knob not in tried)


def _unbroken(check: Check, runs: Iterable[Run]) -> list[str]:
    """Return a note if a run was stopped between epochs only, as with {epochs} and no {steps}."""
    stopped = [run.trace.scenario for run in runs if run.asked.stops]
    within = any(
        stop % math.ceil(scenario.num_samples / scenario.batch_size)
        for scenario in stopped
        for stop in scenario.stops
    )
    if RESUMED not in check.needs or not stopped or within:
        return []
    why = "if a resume loses its place within an epoch, that does not show"
    return [f"the run was stopped between epochs only: {why}; {{steps}} stops it within one"]


def _lacking(check: Check, asked: Sequence[Asked], traces: Sequence[Trace]) -> str:
    """Return why a run that `check` requires was not made, or "" if it was."""
    if RESUMED in check.needs and not any(run.stops for run in asked):
        return f"the run was not stopped and resumed: {_why_unstopped(traces)}"
    if KILLED in check.needs and not any(run.faults for run in asked):
        return _NO_WORKER
    return ""


def _why_unstopped(traces: Sequence[Trace]) -> str:
    steps = max(trace.scenario.num_steps for trace in traces)
    unreached = next((trace.traits.unreached for trace in traces if trace.traits.unreached), "")
    if unreached:
        return (
            f"no checkpoint was written in {counted(steps, 'step')}, and {unreached} may write one "
            "later; make more steps (--steps), or have the script save earlier"
        )
    saved = [step for trace in traces for step in trace.traits.saved_after]
    if saved and min(saved) >= steps:
        return (
            f"weights were saved only when all {counted(steps, 'step')} were made; make more steps "
            "(--steps), or have the script save earlier"
        )
    return NO_WORKDIR
