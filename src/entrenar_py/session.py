"""One call of `entrenar-check`: everything checked that a person can get wrong, then done.

Decides which of the harness's functions a command line means, and what its report says.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from entrenar_py import (
    backends,
    checks,
    console,
    contract,
    counterexamples,
    falsify,
    kill_matrix,
    plan,
    shipped,
    stored,
)
from entrenar_py.command import keeping, ranks, runs, watched
from entrenar_py.contract import Contract, Invariant
from entrenar_py.errors import BackendUnavailable, UsageError
from entrenar_py.options import FILES, PROG
from entrenar_py.reports import (
    curves,
    evidence,
    github,
    html,
    json_format,
    junit,
    output_file,
    sarif,
    terminal,
)
from entrenar_py.reports.report import EXIT_NOTHING_SELECTED, Entry, NotApplying, Report
from entrenar_py.runner import Listener, ignore
from entrenar_py.trace import Trace
from entrenar_py.verdict import Verdict

_WARNINGS_MAX = 5  # a run prints so many of its contract's; --validate all


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What gives the entries of a report, and what the report says about where they come from.

    `environment` is asked for after the entries: only then is it known which devices were opened.
    """

    entries: Callable[[falsify.Progress, Listener], Iterable[Entry]]
    environment: Callable[[], Mapping[str, Any]]
    system: str
    seed: int
    num_traces: int | None = None
    not_applying: tuple[NotApplying, ...] = ()


def prepare(options: argparse.Namespace, arguments: Sequence[str]) -> Callable[[], int]:
    """What is left to do, and then gives the exit code, once everything was looked at.

    Raises ContractError and UsageError; what goes wrong later is the harness's own failure.
    """
    output = console.standard_output(color=not options.no_color)
    if options.mode == "mutants":
        return partial(kill_matrix.show, output)
    loaded = _load(options)
    if options.mode == "validate":
        plan.require_runnable(loaded.invariants)
        return partial(_validated, loaded, output)
    selected = plan.select(
        loaded, only=options.only, exclude=options.exclude, severities=options.severity
    )
    if options.mode == "list":
        return partial(_list, selected, output)
    for name in FILES:
        if getattr(options, name) is not None:
            output_file.require_writable(getattr(options, name), f"--{name}")
    if options.github:
        github.summary_path(os.environ)
    if options.mode == "replay":
        work = _replaying(options, loaded)
    elif options.mode == "judge":
        work = _judging(options, selected)
    elif options.mode == "command":
        work = _watching(options, selected)
    else:
        work = _falsifying(options, selected)
    _make_trace_folder(options.trace_dir)
    return partial(_report, options, shlex.join((PROG, *arguments)), loaded, work, output)


def _load(options: argparse.Namespace) -> Contract:
    if options.contract is None:
        names = ", ".join(path.name for path in shipped.shipped_contracts())
        raise UsageError(f"--contract FILE is missing; shipped are {names}")
    path = shipped.contract_path(options.contract)
    loaded = contract.load(path, vocabulary=vocabulary(), strict=options.strict)
    for line in _told(loaded, everything=options.mode == "validate"):
        print(line, file=sys.stderr)
    return loaded


def _told(loaded: Contract, *, everything: bool) -> Iterator[str]:
    """What there is to say about the file: `everything`, or the first warnings and how to get all.

    Contracts that were written for other tools may give rise to hundreds of lines.
    """
    if everything:
        yield from (problem.line for problem in loaded.problems)
        return
    yield from loaded.warnings[:_WARNINGS_MAX]
    counts = _counted(
        (len(loaded.warnings[_WARNINGS_MAX:]), "more warning"), (len(loaded.notes), "note")
    )
    if counts:
        yield f"{loaded.path}: {counts} on how the contract was read; --validate prints them"


def _counted(*counts: tuple[int, str]) -> str:
    """`2 warnings, 1 note`; what there is none of is left out."""
    return ", ".join(f"{num} {noun}{'' if num == 1 else 's'}" for num, noun in counts if num)


def vocabulary() -> contract.Vocabulary:
    """The names that a contract may use beside its own: of checks, and of planted bugs."""
    return contract.Vocabulary(checks=checks.terms(), mutants=_planted_bugs)


def _planted_bugs() -> Collection[str] | None:
    """What a clause may name as its mutants; None where the bugs are not installed."""
    try:
        return kill_matrix.planted_bugs()
    except UsageError:
        return None


def _validated(loaded: Contract, output: Console) -> int:
    counts = ((len(loaded.invariants), "invariant"), (len(loaded.warnings), "warning"))
    found = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    notes = _counted((len(loaded.notes), "note"))
    found += f", {notes}" if notes else ""
    output.print(f"{loaded.name}: valid, {found}", markup=False, soft_wrap=True)
    return 0


def _list(selected: Sequence[Invariant], output: Console) -> int:
    """Prints one line per invariant, in columns; no line is wrapped."""
    rows: list[tuple[str, ...]] = [("id", "name", "severity", "check", "place")]
    for clause in selected:
        check = checks.bind(clause)
        place = f"{clause.position.file}:{clause.position.line}"
        cells = (clause.id, clause.name, clause.severity, check.name if check else "none", place)
        rows.append(tuple(map(evidence.one_line, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.print("  ".join(padded).rstrip(), soft_wrap=True)
    return 0 if selected else EXIT_NOTHING_SELECTED


def _make_trace_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--trace-dir {folder}: {error.strerror}; give a folder") from error
    output_file.require_writable(folder / "trace.jsonl", "--trace-dir")


def _plan(options: argparse.Namespace) -> plan.Plan:
    return plan.Plan(
        system=options.system,
        world_sizes=options.world_size,
        backends=options.backend,
        seed=options.seed,
        num_examples=options.examples,
        timeout_s=options.timeout,
        trace_folder=options.trace_dir,
    )


def _falsifying(options: argparse.Namespace, selected: Sequence[Invariant]) -> _Work:
    wish = _plan(options)
    tasks, not_applying = plan.divide(selected, wish)
    return _Work(
        entries=lambda show, judged: falsify.falsify(
            tasks, wish, on_progress=show, on_judged=judged, stop_early=options.stop_early
        ),
        environment=_environment,
        system=plan.systems_of(one for task in tasks for one in task.scenarios)
        or wish.system
        or "none",
        seed=wish.seed,
        not_applying=not_applying,
    )


def _replaying(options: argparse.Namespace, loaded: Contract) -> _Work:
    saved = counterexamples.load(options.replay)
    plan.require_known(saved.scenario, f"replay file {options.replay}")
    invariant = plan.select(loaded, only=(saved.invariant,))[0]
    task = plan.Task(invariant=invariant, check=checks.bind(invariant), known=(saved.scenario,))
    return _Work(
        entries=lambda show, judged: [
            falsify.replay(task, options.replay, trace_folder=options.trace_dir, on_judged=judged)
        ],
        environment=_environment,
        system=saved.scenario.system,
        seed=saved.scenario.seed,
    )


def _judging(options: argparse.Namespace, selected: Sequence[Invariant]) -> _Work:
    traces = stored.load(options.judge)
    tasks, not_applying = plan.divide(selected, _plan(options))
    return _Work(
        entries=lambda show, judged: stored.judge_stored(tasks, traces, on_judged=judged),
        environment=partial(stored.environment, traces.values()),
        system=plan.systems_of(trace.scenario for trace in traces.values()),
        seed=options.seed,
        num_traces=len(traces),
        not_applying=not_applying,
    )


def _watching(options: argparse.Namespace, selected: Sequence[Invariant]) -> _Work:
    """Somebody's own trainer: its runs, then what the checks find on them.

    Clauses that probes of the harness decide say nothing of it, and are left out.
    """
    tasks = watched.tasks(selected)
    runs.require_program(options.command[0])
    wish = partial(
        runs.Plan,
        command=options.command,
        wanted={one.check.name for one in tasks if one.check is not None},
        world_sizes=options.world_size or runs.WORLD_SIZES,
        seed=options.seed,
        num_steps=options.steps,
        deadline_s=options.deadline,
    )
    wish(folder=Path())  # says what can't be
    traces: dict[Path, Trace] = {}

    def entries(show: falsify.Progress, judged: Listener) -> Iterator[Entry]:
        with keeping.folder(options.trace_dir) as kept:
            if tasks:  # else no run would say anything
                try:
                    told = partial(show, "runs", 0, 0)
                    traces.update(runs.record(wish(folder=kept.path), told))
                except KeyboardInterrupt:  # what was found stays; nothing held for want of runs
                    known = watched.judge(tasks, traces, on_judged=judged)
                    broken = (one for one in known if one.finding.verdict is Verdict.FALSIFIED)
                    yield from map(kept.see, broken)
                    raise
            yield from map(kept.see, watched.judge(tasks, traces, on_judged=judged))

    return _Work(
        entries=entries,
        environment=lambda: stored.environment(traces.values()),
        system=ranks.SYSTEM,
        seed=options.seed,
    )


def _environment() -> dict[str, str]:
    """Versions, and the devices of this machine that can be used."""
    from entrenar_py.systems import environment  # brings torch

    described = environment.describe()
    for name in ("cpu", "cuda"):  # wgpu is described if it was opened, which takes its time
        try:
            described[name] = backends.open_backend(name).device
        except BackendUnavailable:
            described[name] = "none"
    return described


def _report(
    options: argparse.Namespace, command: str, loaded: Contract, work: _Work, output: Console
) -> int:
    """Has the work done, renders what is known of it in every format, and gives the exit code."""
    started = time.monotonic()
    entries: list[Entry] = []
    interrupted = False
    seen = curves.Curves()
    with terminal.Progress(output) as progress:
        try:
            for entry in work.entries(progress.show, seen.see if options.html else ignore):
                entries.append(entry)  # one by one: an interrupt keeps what is known so far
        except KeyboardInterrupt:
            interrupted = True
    report = Report(
        contract=loaded,
        contract_given=options.contract,
        system=work.system,
        seed=work.seed,
        entries=tuple(entries),
        environment=work.environment() if entries else {},
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
        command=command,
        num_traces=work.num_traces,
        curves=seen.found,
        not_applying=work.not_applying,
    )
    terminal.render(report, output, quiet=options.quiet)
    _write(report, options, output)
    return report.exit_code(allow_inconclusive=options.allow_inconclusive)


def _write(report: Report, options: argparse.Namespace, output: Console) -> None:
    """Writes the report in each format that was asked for."""
    allowed: bool = options.allow_inconclusive
    root = Path((options.github and os.environ.get(github.CHECKOUT)) or Path.cwd())
    if options.json is not None:
        json_format.write(report, options.json)
    if options.junit is not None:
        junit.write(report, options.junit, allow_inconclusive=allowed)
    if options.sarif is not None:
        sarif.write(report, options.sarif, root=root, allow_inconclusive=allowed)
    if options.html is not None:
        html.write(report, options.html)
    if options.github:
        for line in github.annotate(report, root=root, allow_inconclusive=allowed):
            output.print(line, markup=False, soft_wrap=True, no_wrap=True)
        github.append(github.summary(report), github.summary_path(os.environ))
