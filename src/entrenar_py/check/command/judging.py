"""Judging of the runs of a user's own trainer, each by the checks that apply to it.

Verdicts are reported as soon as they are known, while later runs are still to come. A clause that
was declared not to apply is reported, too, if the runs contradict the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from entrenar_py.check import clauses as checks
from entrenar_py.check.clauses import Check
from entrenar_py.check.command import run_settings
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    CONTROLLED,
    KILLED,
    REPEATED,
    RESUMED,
    SAVED,
    Near,
    Need,
    Runs,
    witnesses,
)
from entrenar_py.check.harness import companions, judgement, plan
from entrenar_py.check.harness.judgement import Listener, ignore
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.reports.report import Entry, NotApplying
from entrenar_py.shared.faults import MERGED, OF_RECORDS, are_of_witnesses
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Verdict, inconclusive
from entrenar_py.shared.wording import counted, listed

NO_WORKDIR = (
    "the command needs {workdir} (folder of checkpoints), and should have {steps} (total steps); "
    "put both into it, or exclude the clause"
)
_NO_WORKER = "no worker was killed: that takes two workers or more; raise --world-size"
_BY_PROBES = "decided by a probe that the harness runs itself, not by a script's runs"


def tasks(selected: Sequence[Invariant]) -> list[Task]:
    """Return a task for each clause that applies to a user's trainer (see `elsewhere`)."""
    others = {left_out.invariant.id for left_out in elsewhere(selected)}
    clauses = [clause for clause in selected if clause.id not in others]
    planned, _ = plan.divide(clauses, plan.Plan(is_run=False))
    return list(planned)


def elsewhere(selected: Sequence[Invariant]) -> tuple[NotApplying, ...]:
    """Return the clauses that don't apply to a user's trainer, each with the reason.

    They are bound to systems of the harness, are decided by its probes, or are about a promise that
    no script makes.
    """
    reasons = ((clause, _why_elsewhere(clause)) for clause in selected)
    return tuple(
        NotApplying(invariant=clause, reason=why, outside=True) for clause, why in reasons if why
    )


def _why_elsewhere(clause: Invariant) -> str:
    """Return why a clause doesn't apply to a user's trainer, or "" if it does."""
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
    """Yield an entry for each task without a check, or with a check that judges any of `runs`.

    `runs` maps the file of each trace to its run. Unless `having` is None, only judgements that
    involve the run in that file are made.
    """
    for task in tasks:
        check = task.check
        if check is None:
            yield judgement.judge_each(task, {}, {})
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
        entry = judgement.judge_each(
            task,
            {_name(file): group.chosen(_name) for file, group in groups.items()},
            {
                _name(file): run.trace
                for file, run in runs.items()
                if file in traces or are_of_witnesses(run.settings.faults)
            },
            on_judged=on_judged,
            form="{reason} [{files}]",
        )
        settings = [runs[file].settings for file in traces]
        is_base_lost = _is_base_lost([runs[file] for file in traces])
        if not entry.finding.applies:
            yield entry
            continue
        if not is_base_lost and (why := _lacking(check, settings, [*traces.values()])):
            entry = replace(entry, finding=inconclusive(task.invariant.id, why))
        notes = (
            *entry.finding.notes,
            *_unbroken(check, runs.values()),
            *(_not_judged(runs[file]) for file in spared),
        )
        is_bare = is_base_lost or all(run.traits.saves == "nothing" for run in traces.values())
        untried = (
            *_untried(check, settings),
            *(() if is_bare else _unresumed(check, settings)),
        )
        yield replace(entry, finding=replace(entry.finding, notes=notes), untried=untried)


def _name(file: Path) -> Path:
    return Path(file.stem)


def _is_for(check: Check, run: Run) -> bool:
    return run_settings.judges(check, run.settings)


def _spared(check: Check, runs: Mapping[Path, Run]) -> list[Path]:
    # Failed runs that this check would judge, although its verdict does not depend on them.
    failed = [file for file, run in runs.items() if _failed(run)]
    most = max(run.settings.world_size for run in runs.values())
    spare = [file for file in failed if _is_spare(check, runs[file].settings, most)]
    return spare if len(spare) < len(runs) else []


def _failed(run: Run) -> bool:
    return run.trace.end.status == "failed"


def _is_base_lost(runs: Collection[Run]) -> bool:
    """Return whether a run failed that runs with stops or with a killed worker are compared with.

    Such runs are then not launched, whatever placeholders the command has.
    """
    most = max(run.settings.world_size for run in runs)
    failed = [run.settings for run in runs if _failed(run) and run.settings.world_size == most]
    return any(
        one.is_unstruck and not one.repeat and (one.turn is None or one.turn.knob == "accumulation")
        for one in failed
    )


def _is_spare(check: Check, settings: RunSettings, most: int) -> bool:
    """Return whether a run was neither needed by the check nor requested by the user."""
    if settings.stops:
        return not {RESUMED, SAVED}.intersection(check.needs)
    if settings.turn is not None:
        return settings.turn.knob not in {need.knob for need in check.needs}
    if settings.repeat:
        return REPEATED not in (*check.needs, *check.witnesses)
    return settings.is_plain and settings.world_size == 1 < most and ALONE not in check.needs


def _not_judged(run: Run) -> str:
    return f"not judged: {run_names.of(run.trace.scenario)} failed: {run.trace.end.reason}"


def _beside(check: Check, file: Path, runs: Mapping[Path, Run]) -> Runs[Path]:
    """Return the files of the run in `file` and of the runs that it is compared with.

    A run on one worker with different batches isn't compared: it is only in `near`.
    """
    files = {run.settings: file for file, run in runs.items()}
    chosen = run_settings.beside(check.needs, runs[file].settings).chosen(files.get)
    chosen = replace(chosen, witnesses=_witnesses(check, runs))
    if CONTROLLED in check.witnesses and chosen.of(ALONE):
        replayed = _joined(runs, runs[file].trace, *OF_RECORDS)
        if replayed is not None:
            return replace(chosen, beside={**chosen.beside, ALONE: (replayed,)})
    for alone in chosen.of(ALONE):
        meant = companions.plain(runs[file].trace.scenario, world_size=1)
        fields = companions.differences(runs[alone].trace.scenario, meant)
        unlike = {name: pair for name, pair in fields.items() if name not in companions.free(ALONE)}
        if unlike:
            rest = {need: those for need, those in chosen.beside.items() if need is not ALONE}
            if (merged := _joined(runs, runs[file].trace, MERGED)) is not None:
                return replace(chosen, beside={**rest, ALONE: (merged,)})
            return replace(chosen, beside=rest, near={ALONE: Near(alone, unlike)})
    return chosen


def _is_replaced(check: Check, file: Path, groups: Mapping[Path, Runs[Path]]) -> bool:
    """Return whether a run on one worker is not compared, because another one replaces it.

    This run had the batches of one of several workers. The run that replaces it had the batches of
    all of them.
    """
    used = {alone for of in groups.values() for alone in of.of(ALONE)}
    is_own = {*groups[file].of(ALONE)} <= {file}
    return CONTROLLED in check.witnesses and is_own and bool(used - groups.keys())


def _joined(runs: Mapping[Path, Run], base: Trace, *kinds: str) -> Path | None:
    """Return the file of the run on one worker that had the batches of all workers of `base`.

    A fault of one of the `kinds` gave it these batches. Return None if there is no such run.
    """
    meant = companions.plain(base.scenario, world_size=1)
    due = {*companions.free(ALONE), "faults"}
    for file, run in runs.items():
        faults = run.settings.faults
        if len(faults) != 1 or faults[0].kind not in kinds or _failed(run):
            continue
        if not companions.differences(run.trace.scenario, meant).keys() - due:
            return file
    return None


def _witnesses(check: Check, runs: Mapping[Path, Run]) -> dict[Need, tuple[Path, ...]]:
    """Return need -> the files of runs that show whether other runs can be compared.

    ALONE is answered by runs on one worker, REPEATED by two runs that should be equal, and other
    needs as in `needs.witnesses`.
    """
    plain = {run.settings: file for file, run in runs.items() if run.settings.is_witness}
    pairs = [(replace(again, repeat=0), again) for again in plain if again.repeat]
    twice = next((pair for pair in pairs if pair[0] in plain), ())
    alone = [run for run in plain if run.is_plain and run.world_size == 1 and not run.repeat]
    return {
        REPEATED: tuple(plain[run] for run in twice),
        ALONE: tuple(plain[run] for run in alone),
        **witnesses(
            check.witnesses,
            {file: run.faults for run, file in plain.items()},
            lambda file: plain.get(replace(runs[file].settings, faults=())),
        ),
    }


def _unresumed(check: Check, settings: Sequence[RunSettings]) -> tuple[str, ...]:
    stopped = any(run.stops for run in settings)
    return () if stopped or not {RESUMED, SAVED}.intersection(check.needs) else ("workdir",)


def _untried(check: Check, settings: Sequence[RunSettings]) -> tuple[str, ...]:
    tried = {run.turn.knob for run in settings if run.turn is not None}
    return tuple(need.knob for need in check.needs if need.knob and need.knob not in tried)


def _unbroken(check: Check, runs: Iterable[Run]) -> list[str]:
    """Return a note if the run was stopped only between epochs, as the command has no {steps}."""
    stopped = [run.trace.scenario for run in runs if run.settings.stops]
    within = any(
        stop % math.ceil(scenario.num_samples / scenario.batch_size)
        for scenario in stopped
        for stop in scenario.stops
    )
    if RESUMED not in check.needs or not stopped or within:
        return []
    why = "a resume that loses its position within an epoch would not be found"
    return [f"the run was stopped between epochs only: {why}; {{steps}} stops it within one"]


def _lacking(check: Check, settings: Sequence[RunSettings], traces: Sequence[Trace]) -> str:
    if RESUMED in check.needs and not any(run.stops for run in settings):
        return f"the run was not stopped and resumed: {_why_unstopped(traces)}"
    if KILLED in check.needs and not any(run.faults for run in settings):
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


def verdicts_as_known(
    tasks: Sequence[Task],
    recorded: Iterable[tuple[Path, Run]],
    runs: MutableMapping[Path, Run],
    *,
    on_judged: Listener = ignore,
) -> Iterator[Entry]:
    """Yield an entry for each task that applies, and add each recorded run to `runs`, by its file.

    A clause is judged once all runs that it needs were recorded. If a run falsifies it earlier, an
    entry is yielded at once. At the end a second entry, on all runs, replaces it. A run with
    `is_tried` is dropped if it falsifies nothing: the script may not support its number of workers.
    After an interrupt, entries are yielded for the clauses that are falsified so far, and
    KeyboardInterrupt is raised.
    """
    waiting = _Waiting([task for task in tasks if task.check is not None])
    yield from judge([task for task in tasks if task.check is None], runs)
    try:
        for file, run in recorded:
            runs[file] = run
            if run.is_tried and not waiting.is_broken_by(runs, file):
                del runs[file]
                file.unlink(missing_ok=True)
                yield from judge(waiting.decided(run), runs, on_judged=on_judged)
                continue
            yield from judge(waiting.decided(run), runs, on_judged=on_judged)
            yield from waiting.broken(runs, file)
    except KeyboardInterrupt:  # only for falsified clauses: the others need all runs
        known = judge(waiting.tasks, runs, on_judged=on_judged)
        yield from (entry for entry in known if entry.verdict is Verdict.FALSIFIED)
        raise
    yield from judge(waiting.tasks, runs, on_judged=on_judged)


@dataclass
class _Waiting:
    """The tasks that are not decided yet. `told` are the ids of those reported as falsified."""

    tasks: list[Task]
    told: set[str] = field(default_factory=set)

    def decided(self, run: Run) -> list[Task]:
        """Remove the tasks that no run after `run` can change, and return them."""
        done = [task for task in self.tasks if not _is_awaited(task, run)]
        self.tasks = [task for task in self.tasks if task not in done]
        return done

    def is_broken_by(self, runs: Mapping[Path, Run], file: Path) -> bool:
        """Return whether the run in `file`, alone or compared with others, falsifies a task."""
        entries = judge(self.tasks, runs, having=file)
        return any(entry.verdict is Verdict.FALSIFIED for entry in entries)

    def broken(self, runs: MutableMapping[Path, Run], file: Path) -> Iterator[Entry]:
        """Yield an entry for each task that the run in `file` is the first to falsify.

        Nothing is yielded before all witnesses (the plain runs and a nudged one) are recorded,
        because they decide whether runs may be compared.
        """
        if any(ahead.is_witness for ahead in runs[file].ahead):
            return
        for task in self.tasks:
            if task.invariant.id not in self.told:
                for entry in judge([task], runs, having=file):
                    if entry.verdict is Verdict.FALSIFIED:
                        self.told.add(task.invariant.id)
                        yield entry


def _is_awaited(task: Task, run: Run) -> bool:
    return task.check is not None and any(
        ahead.is_witness or run_settings.judges(task.check, ahead) for ahead in run.ahead
    )


_RESTARTS = ("--max-restarts", "--max_restarts")  # options of torchrun
_NAMED_MAX = 3  # files of a checkpoint that a message names, at most


def refuted(
    declared: Sequence[Task], runs: Mapping[Path, Run], reasons: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield an entry for each clause that was declared not to apply, but that `runs` decide.

    No run is launched for these clauses. `reasons` maps clause ids to the declared reasons.
    """
    for entry in judge([task for task in declared if task.check is not None], runs):
        if entry.verdict is not Verdict.INCONCLUSIVE:
            why = reasons[entry.invariant.id]
            note = f"declared not to apply, but the runs decide it; remove the declaration: {why}"
            finding = replace(entry.finding, notes=(*entry.finding.notes, note))
            yield replace(entry, finding=finding)


def doubts(
    declared: Sequence[Task], command: Sequence[str], folders: Collection[Path]
) -> dict[str, str]:
    """Return clause id -> evidence against the declaration that the clause does not apply.

    No run was launched for these clauses. `folders` have the runs that were launched.
    """
    works = [work for folder in folders for work in folder.glob("*/work")]
    saved = sorted({path.name for work in works for path in work.iterdir()})
    signs = {
        RESUMED: saved and f"the script wrote {listed(saved, most=_NAMED_MAX)} to {{workdir}}",
        KILLED: restarts(command) and f"the command has {restarts(command)}",
    }
    return {
        task.invariant.id: str(why)
        for task in declared
        for need, why in signs.items()
        if why and task.check is not None and need in task.check.needs
    }


def restarts(command: Sequence[str]) -> str:
    """Return the launcher's option that restarts workers, with its value; "" if it has none."""
    for at, word in enumerate(command):
        name, _, value = word.partition("=")
        value = value or "".join(command[at + 1 : at + 2])
        if name in _RESTARTS and value not in ("", "0"):
            return f"{name}={value}"
    return ""
