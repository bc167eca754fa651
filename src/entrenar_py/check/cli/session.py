"""One call of `entrenar-check`: validate everything that a user can get wrong, then run.

This module decides which functions of the harness are called, and what the report contains.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from entrenar_py.check import clauses as checks
from entrenar_py.check import cli, contract
from entrenar_py.check.cli import reporting
from entrenar_py.check.cli.reporting import Work
from entrenar_py.check.contract import Contract, records
from entrenar_py.check.harness import counterexamples, judgement, plan
from entrenar_py.check.project import configuration
from entrenar_py.check.project.command_line import FILES, PROG
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import EXIT_NOTHING_SELECTED, Report
from entrenar_py.shared import mutants, package_data
from entrenar_py.shared.errors import BackendUnavailable, ContractError, UsageError
from entrenar_py.shared.page import arguments, console
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.wording import counted

if TYPE_CHECKING:
    from entrenar_py.check.cli.command_work import Shared

Maker = Callable[[argparse.Namespace, configuration.Standing], Work]

_WARNINGS_MAX = 5  # warnings that a run prints for a contract; --validate prints all


def prepare(options: argparse.Namespace, arguments: Sequence[str]) -> Callable[[], int]:
    """Validate everything, then return a function that does the work and returns the exit code.

    Raises ContractError and UsageError. A later exception is a failure of the harness itself.
    """
    output = console.standard_output(color=not options.no_color)
    if options.mode == "mutants":
        from entrenar_py.check import kill_matrix

        return partial(kill_matrix.show, output)
    called = _called(options, arguments)
    if options.mode == "validate":
        from entrenar_py.check.cli import validation

        return validation.prepare(
            options,
            {
                package_data.contract_path(own.contract): own.bind
                for own in cli.each_contract(options)
            },
            vocabulary=vocabulary(),
            command=called,
            output=output,
        )
    _look(options)
    chosen = [*_chosen(options, _loaded(options))]
    if options.mode == "suggest":
        return lambda: max([_suggested(loaded) for _, loaded in chosen])
    if options.mode == "list":
        return lambda: max([_list(_standing(own, loaded), output) for own, loaded in chosen])
    if options.mode == "command":
        from entrenar_py.check.cli import command_work, last_failed

        shared = command_work.Shared()
        jobs = _of_command(options, chosen, shared)
        conclude = last_failed.Conclusion(options, arguments, shared.runs)
        return partial(
            reporting.run_all, jobs, called, output, runs=shared.stack, conclude=conclude
        )
    jobs = [_prepared(own, loaded, _work(own, loaded)) for own, loaded in chosen]
    return partial(reporting.run_all, jobs, called, output, runs=ExitStack())


def reports_of_command(options: argparse.Namespace, arguments: Sequence[str]) -> list[Report]:
    """Run the command of `options`, print nothing, and return the reports.

    Raises ContractError and UsageError.
    """
    from entrenar_py.check.cli import command_work

    _look(options)
    shared = command_work.Shared()
    jobs = _of_command(options, [*_chosen(options, _loaded(options))], shared)
    with shared.stack:
        called = _called(options, arguments)
        return [report for _, report in reporting.each_report(jobs, called, console.nowhere())]


def _look(options: argparse.Namespace) -> None:
    """Raise UsageError for options that are invalid whatever the contracts contain."""
    if options.mode in (None, "judge"):
        _plan(options)
    elif options.mode == "command":
        from entrenar_py.check.command import launch, placeholders
        from entrenar_py.check.project import commands

        _fill_in_workers(options)
        launch.require_program(options.command[0], options.command_folder)
        commands.require_script(options.command, options.command_folder or Path.cwd())
        placeholders.require_known(options.command)


def _fill_in_workers(options: argparse.Namespace) -> None:
    """Replace the number of workers in the arguments of the command's launcher by {world_size}."""
    from entrenar_py.check.project import commands

    commands.require_one_machine(options.command)
    launched = commands.apart(commands.of(options.command))
    options.command, options.command_changes = launched.command, launched.changes
    if launched.world_size is not None and not options.world_size:
        options.world_size = (launched.world_size,)
    elif not options.world_size and commands.starts_one(options.command):
        options.world_size = (1,)
        options.command_changes = (*launched.changes, commands.ALONE)
    if options.auto and "auto" not in (*options.typed, *options.used):
        options.command_changes += (commands.WITHOUT_LINE,)


def _called(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    named = options.project is not None and "config" not in options.typed
    told = ("--config", options.project.place.file) if named else ()
    return shlex.join((PROG, *told, *arguments))


def _standing(options: argparse.Namespace, loaded: Contract) -> configuration.Standing:
    """Return which clauses of the contract are selected, and which the configuration leaves out."""
    selected = plan.select(
        loaded, only=options.only, exclude=options.exclude, severities=options.severity
    )
    if options.last is not None:
        selected = [clause for clause in selected if clause.id in options.last.ids]
    return configuration.apply(
        selected,
        options.project.exclusions if options.project and options.mode != "replay" else (),
        options.project.acceptances if options.project else (),
        named=options.only if "only" in options.typed else (),
    )


def _prepared(options: argparse.Namespace, loaded: Contract, make: Maker) -> reporting.Job:
    standing = _standing(options, loaded)
    reporting.require_writable(options, FILES)
    work = make(options, standing)
    _make_trace_folder(options.trace_dir)
    return reporting.Job(options=options, contract=loaded, work=work, standing=standing)


def _work(options: argparse.Namespace, loaded: Contract) -> Maker:
    if options.mode == "replay":
        return partial(_replaying, loaded)
    return _judging if options.mode == "judge" else _falsifying


def _of_command(
    options: argparse.Namespace,
    chosen: Sequence[tuple[argparse.Namespace, Contract]],
    shared: Shared,
) -> list[reporting.Job]:
    """Return the jobs on a user's command, which share its runs.

    If no contract was named, a last job judges the clauses on language models in the same runs.
    With --last-failed, only jobs with clauses that were falsified are returned; they judge the runs
    of the last call if nothing has changed.
    """
    from entrenar_py.check.cli import command_work, last_failed

    make = partial(command_work.work, shared)
    if kept := last_failed.kept(options):
        make = partial(command_work.stored_work, kept)
    jobs = [_prepared(own, loaded, make) for own, loaded in chosen]
    if not (options.only or options.severity) and cli.names_no_contract(options):
        wider = argparse.Namespace(**vars(options))
        wider.contract = (*options.contract, package_data.OF_LANGUAGE)
        own = cli.each_contract(wider)[-1]
        own.trace_dir = next((job.options.trace_dir for job in jobs), None)
        own.only, own.exclude = package_data.NEVER_MEANT, ()
        jobs.append(replace(_prepared(own, _load(own), make), is_aside=options.last is None))
    if options.last is not None:
        jobs = [job for job in jobs if job.standing.selected] or jobs[:1]
    return jobs


def _loaded(options: argparse.Namespace) -> list[tuple[argparse.Namespace, Contract]]:
    """Return each contract with its options. Problems of all contracts are raised at once."""
    contracts, problems = [], []
    for own in cli.each_contract(options):
        try:
            contracts.append((own, _load(own)))
        except ContractError as error:
            problems += error.problems
    if problems:
        raise ContractError(problems)
    return contracts


def _chosen(
    options: argparse.Namespace, loaded: Sequence[tuple[argparse.Namespace, Contract]]
) -> Iterator[tuple[argparse.Namespace, Contract]]:
    """Yield the contracts with a requested clause, each with the requested ids that it has.

    Raises UsageError for an id that is in no contract, and ContractError if the configuration
    excludes a clause that none of its contracts has.
    """
    ids = cli.require_ids(options, [known for _, known in loaded])
    if "contract" in options.used:  # then the contracts are those that the configuration names
        known = options.project
        configuration.require_known(known.exclusions, ids, known.acceptances)
    if len(loaded) == 1:
        yield from loaded
        return
    if options.mode == "replay":
        broken = counterexamples.load(options.replay).invariant
        records.require_ids((broken,), ids, "the contracts")
        loaded = [pair for pair in loaded if broken in {one.id for one in pair[1].invariants}]
    for own, known in loaded:
        present = records.ids_of(known)
        own.only = tuple(clause for clause in options.only if clause in present)
        own.exclude = tuple(clause for clause in options.exclude if clause in present)
        if own.only or not options.only:
            yield own, known


def _load(options: argparse.Namespace) -> Contract:
    path = package_data.contract_path(options.contract)
    loaded = contract.load(path, vocabulary=vocabulary(), strict=options.strict, bind=options.bind)
    for line in _told(loaded):
        printing.warn(line)
    return loaded


def _told(loaded: Contract) -> Iterator[str]:
    """Yield the first warnings about a contract, and a line on how to see all of them.

    A contract that was written for a different tool may cause hundreds.
    """
    yield from loaded.warnings[:_WARNINGS_MAX]
    left = ((len(loaded.warnings[_WARNINGS_MAX:]), "more warning"), (len(loaded.notes), "note"))
    counts = [counted(number, noun) for number, noun in left if number]
    if counts:
        told = "on how the contract was read; --validate prints them"
        yield f"{loaded.path}: {', '.join(counts)} {told}"


def vocabulary() -> contract.Vocabulary:
    """Return the names that a contract may use: the names of checks and of planted bugs."""
    return contract.Vocabulary(checks=checks.terms(), mutants=_planted_bugs)


def _planted_bugs() -> Collection[str] | None:
    try:
        return mutants.names()
    except UsageError:
        return None


def _suggested(loaded: Contract) -> int:
    from entrenar_py.check.contract import suggestions

    printing.say_lines(suggestions.draft(loaded, checks.terms()).rstrip("\n"))
    return 0


def _list(standing: configuration.Standing, output: Console) -> int:
    """Print one unwrapped line per clause, in columns, then the clauses that are left out."""
    selected = standing.selected
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
    for one in standing.excluded:
        output.print(evidence.one_line(f"excluded: {one.invariant.id} {one.why}"), soft_wrap=True)
    for other in standing.not_applying:
        told = f"not applied: {other.invariant.id}: {other.reason}"
        output.print(evidence.one_line(told), soft_wrap=True)
    return 0 if selected else EXIT_NOTHING_SELECTED


def _make_trace_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--trace-dir {folder}: {error.strerror}; give a folder that can be created"
        raise UsageError(message, field="trace_dir") from error
    arguments.require_writable(folder / "trace.jsonl", "trace_dir")


def _plan(options: argparse.Namespace) -> plan.Plan:
    return plan.Plan(
        system=options.system,
        world_sizes=options.world_size,
        backends=options.backend,
        seed=options.seed,
        num_examples=options.examples,
        timeout_s=options.timeout,
        trace_folder=options.trace_dir,
        saved_folder=_saved_folder(options),
    )


def _saved_folder(options: argparse.Namespace) -> Path:
    if options.project is None:
        return counterexamples.FOLDER
    return Path(os.path.relpath(options.project.folder / counterexamples.FOLDER))


def _falsifying(options: argparse.Namespace, standing: configuration.Standing) -> Work:
    from entrenar_py.check.harness import falsify

    search_plan = _plan(options)
    _require_gpu(search_plan.backends)
    tasks, not_applying = plan.divide(standing.selected, search_plan)
    return Work(
        entries=lambda show, judged: falsify.falsify(
            tasks, search_plan, on_progress=show, on_judged=judged, stop_early=options.stop_early
        ),
        environment=_environment,
        system=plan.systems_of(one for task in tasks for one in task.scenarios)
        or search_plan.system
        or "none",
        seed=search_plan.seed,
        not_applying=not_applying,
    )


def _replaying(
    loaded: Contract, options: argparse.Namespace, standing: configuration.Standing
) -> Work:
    from entrenar_py.check.harness import falsify

    saved = counterexamples.load(options.replay)
    plan.require_known(saved.scenario, f"replay file {options.replay}")
    invariant = plan.select(loaded, only=(saved.invariant,))[0]
    task = plan.Task(invariant=invariant, check=checks.bind(invariant), known=(saved.scenario,))
    return Work(
        entries=lambda show, judged: [
            falsify.replay(task, options.replay, trace_folder=options.trace_dir, on_judged=judged)
        ],
        environment=_environment,
        system=saved.scenario.system,
        seed=saved.scenario.seed,
    )


def _judging(options: argparse.Namespace, standing: configuration.Standing) -> Work:
    traces = judgement.load_stored(options.judge)
    if any(trace.scenario.system == OBSERVED for trace in traces.values()):
        from entrenar_py.check.command import run_settings

        if kept := run_settings.stored(traces):
            from entrenar_py.check.cli import command_work

            return command_work.stored_work(kept, options, standing)
    if all(trace.scenario.system == OBSERVED for trace in traces.values()):
        from entrenar_py.check.command import judging

        tasks = tuple(judging.tasks(standing.selected))
        not_applying = judging.elsewhere(standing.selected)
    else:
        only_judged = replace(_plan(options), is_run=False)
        tasks, not_applying = plan.divide(standing.selected, only_judged)
    return Work(
        entries=lambda show, judged: judgement.judge_stored(tasks, traces, on_judged=judged),
        environment=partial(judgement.environment, traces.values()),
        places=partial(judgement.places, traces.values()),
        system=plan.systems_of(trace.scenario for trace in traces.values()),
        seed=options.seed,
        num_traces=len(traces),
        not_applying=not_applying,
    )


def _require_gpu(names: Sequence[str]) -> None:
    """Raise UsageError if all `names` are CUDA devices and none can be opened.

    Otherwise each scenario would fail for this one reason.
    """
    from entrenar_py import compute as backends

    problem = ""
    for name in names:
        if name.partition(":")[0] != "cuda":
            return
        try:
            backends.open_backend(name)
        except BackendUnavailable as error:
            problem = problem or str(error)
        else:
            return
    if problem:
        raise UsageError(f"{problem}; leave --backend out to check on the CPU", field="backend")


def _environment() -> dict[str, str]:
    """Return versions, and the devices of this machine that can be used."""
    from entrenar_py import compute as backends
    from entrenar_py.shared import process

    described = process.environment()
    for name in ("cpu", "cuda"):  # describing wgpu is slow, so only a run that opens it does so
        try:
            described[name] = backends.open_backend(name).device
        except BackendUnavailable:
            described[name] = "none"
    return described
