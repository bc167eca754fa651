"""Checking of a user's own trainer: the runs of its command, and the findings on them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from entrenar_py.check import cli
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.cli.reporting import Work
from entrenar_py.check.command import folders, judging, launch, placeholders, run_plan, runs
from entrenar_py.check.command.run_settings import Run, RunSettings, in_words
from entrenar_py.check.contract import Position
from entrenar_py.check.evidence.needs import PROBED
from entrenar_py.check.harness import judgement
from entrenar_py.check.harness.judgement import Listener, Progress
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.project import commands
from entrenar_py.check.project.configuration import Standing
from entrenar_py.check.rank_files import observed_run
from entrenar_py.check.rank_files.arrangements import Arrangement
from entrenar_py.check.reports.progress import Pace
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.trace import Trace, Traits

FINITENESS = "finiteness"  # the check of F-DP-003


class Shared:
    """The runs of a user's command and their folder, shared by all contracts of one call.

    Closing `stack` removes a temporary folder, or prints its path if a finding needs it.
    """

    def __init__(self) -> None:
        self.made: dict[RunSettings, Trace] = {}
        self.arrangements: dict[int, Arrangement] = {}
        self.folders: list[Path] = []
        self.runs: list[Mapping[Path, Run]] = []  # of each contract, by the files of their traces
        self.pace = Pace()
        self._temporary: folders.RunFolder | None = None
        self.stack = ExitStack()

    def folder(self, named: Path | None) -> folders.RunFolder:
        """Return the folder that the user `named`, without the traces of earlier calls.

        If it is None, return the temporary folder of all contracts.
        """
        kept = folders.RunFolder(named) if named is not None else self._temporary
        if named is not None and named not in self.folders:
            runs.forget(named)
        if kept is None:
            kept = self._temporary = self.stack.enter_context(folders.temporary())
        self.folders.append(kept.path)
        return kept


def work(shared: Shared, options: argparse.Namespace, standing: Standing) -> Work:
    """Return the work on the command in `options`. Its runs are taken from `shared` or added to it.

    Clauses that only probes of the harness can decide don't apply, and are left out. If the
    configuration declares that a clause does not apply, the clause is still judged on the runs that
    other clauses need. A verdict on it contradicts the declaration, and is reported. Raises
    UsageError if the command can't be run.
    """
    tasks = judging.tasks(standing.selected)
    added = {PROBED} if cli.names_no_contract(options) else set()
    if options.last is not None:  # the runs in which a clause was falsified, for whatever clause
        added |= options.last.needs
    usual = commands.usual_variables(options.command)
    make_plan = partial(
        run_plan.Plan,
        command=options.command,
        needs={
            need
            for task in tasks
            if task.check is not None
            for need in (*task.check.needs, *task.check.witnesses)
        }
        | added,
        world_sizes=options.world_size or run_plan.WORLD_SIZES,
        seed=options.seed,
        num_steps=options.steps,
        num_epochs=options.epochs,
        deadline_s=options.deadline,
        auto=options.auto,
        launch=partial(
            launch.launch, cwd=options.command_folder, parents=options.parents, usual=usual
        ),
        source=_copied_folder(options),
        spelled=options.knobs,
        made=shared.made,
        arrangements=shared.arrangements,
    )
    changes = "; ".join(options.command_changes)
    foreseen = [f"command: {changes}"] if changes else []
    plan = make_plan(folder=Path())
    planned, more = plan.foreseen(_likely(options))
    shared.pace.foreseen = max(shared.pace.foreseen, len(planned))
    for size in {settings.world_size for settings in plan.plain().values()}:
        command = commands.for_workers(options.command, size)
        words = placeholders.fill(command, {"world_size": str(size)}, {})
        folder = options.command_folder
        options.parents.prepare(words, {**usual, **os.environ, **plan.observing()}, folder)
    foreseen += more
    unnamed = _unnamed(options, tasks)
    checks = [task.check for task in tasks if task.invariant.id not in unnamed]
    if any(check is not None and check.name == FINITENESS for check in checks):
        foreseen += _expected(options)
    runs_by_file: dict[Path, Run] = {}
    declared = {task.invariant.id: task.reason for task in standing.not_applying}
    left_out = judging.tasks([task.invariant for task in standing.not_applying])
    doubts: dict[str, str] = {}

    def begins(show: Progress, settings: RunSettings, num_left: int) -> None:
        done, total, left = shared.pace.begins(num_left)
        show("run", done, total, ", ".join(filter(None, (in_words(settings, plan.most), left))))

    def entries(show: Progress, judged: Listener) -> Iterator[Entry]:
        kept = shared.folder(options.trace_dir)
        shared.runs.append(runs_by_file)
        recorded: Iterable[tuple[Path, Run]] = ()
        if any(task.check is not None for task in tasks):  # otherwise no run is judged
            recorded = runs.record(make_plan(folder=kept.path), partial(begins, show))
        known = judging.verdicts_as_known(tasks, recorded, runs_by_file, on_judged=judged)
        yield from (_advised(kept.see(entry), unnamed) for entry in known)
        yield from map(kept.see, judging.refuted(left_out, runs_by_file, declared))
        doubts.update(judging.doubts(left_out, options.command, shared.folders))

    def environment() -> Mapping[str, object]:
        recorded = judgement.environment(run.trace for run in runs_by_file.values())
        return {**recorded, "launched": options.parents.told()}

    def places() -> Mapping[str, Position]:
        return judgement.places(run.trace for run in runs_by_file.values()) or _beginning(options)

    return Work(
        entries=entries,
        environment=environment,
        places=places,
        system=observed_run.SYSTEM,
        seed=options.seed,
        not_applying=judging.elsewhere(standing.selected),
        runs=planned,
        foreseen=tuple(foreseen),
        doubts=doubts,
        streams=True,
    )


def stored_work(kept: Mapping[Path, Run], options: argparse.Namespace, standing: Standing) -> Work:
    """Return the work on stored runs: `kept` has the runs that an earlier call kept, by folder."""
    traces = [run.trace for run in kept.values()]
    declared = {one.invariant.id: one.reason for one in standing.not_applying}
    left_out = judging.tasks([one.invariant for one in standing.not_applying])
    tasks = judging.tasks(standing.selected)
    unnamed = _unnamed(options, tasks)

    def entries(_: Progress, judged: Listener) -> Iterator[Entry]:
        known = judging.judge(tasks, kept, on_judged=judged)
        yield from (_advised(entry, unnamed) for entry in known)
        yield from judging.refuted(left_out, kept, declared)

    return Work(
        entries=entries,
        environment=partial(judgement.environment, traces),
        places=partial(judgement.places, traces),
        system=observed_run.SYSTEM,
        seed=options.seed,
        num_traces=len(traces),
        not_applying=judging.elsewhere(standing.selected),
    )


def _unnamed(options: argparse.Namespace, tasks: Iterable[Task]) -> dict[str, Check]:
    """Return clause id -> check for the clauses that are judged although the user didn't name them.

    These are clauses of the default contracts. {} if the user named a contract.
    """
    if not cli.names_no_contract(options):
        return {}
    return {
        one.invariant.id: one.check
        for one in tasks
        if one.check is not None and one.invariant.id not in options.only
    }


def _advised(entry: Entry, unnamed: Mapping[str, Check]) -> Entry:
    broken, check = entry.finding.counterexample, unnamed.get(entry.invariant.id)
    why = check.advice(broken) if broken is not None and check is not None else ""
    return replace(entry, accepted=why, advice=True) if why else entry


def _expected(options: argparse.Namespace) -> list[str]:
    path = _script(options)
    told = commands.without_a_test_for_nan(path) if path is not None else ""
    told, _, _ = told.partition(": ")  # the finding itself says what to add
    return [f"expected: {told}"] if told else []


def _likely(options: argparse.Namespace) -> Traits:
    """Return the likely traits of the first run, as far as command and script show them."""
    path, command = _script(options), options.command
    known = commands.read_script(path) if path is not None else None
    starts_again = judging.restarts(command) or not commands.is_torchs(command)
    return Traits(
        saves="weights" if known and known.saves else "",
        loads="" if known and known.loads else "nothing",
        restarts="" if starts_again else "nothing",
    )


def _script(options: argparse.Namespace) -> Path | None:
    if commands.is_for_shell(options.command):
        return None
    return commands.script(options.command, options.command_folder or Path.cwd())[1]


def _beginning(options: argparse.Namespace) -> dict[str, Position]:
    """Return the place of the script's first line, for a report with no better line to point to."""
    path = _script(options)
    return {} if path is None else {"step": Position(str(path), 1, 1)}


def _copied_folder(options: argparse.Namespace) -> Path | None:
    folder: Path = (options.command_folder or Path.cwd()).resolve()
    shared = options.in_place or folders.runs_elsewhere(options.command)
    return None if shared or folder == Path(folder.anchor) else folder
