"""Execution of one call: each contract's work is done and reported in every requested format."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from entrenar_py.check.contract import Contract, Position
from entrenar_py.check.harness.judgement import Listener, ignore
from entrenar_py.check.harness.judgement import Progress as Show
from entrenar_py.check.project import configuration
from entrenar_py.check.project.command_line import FILES
from entrenar_py.check.reports import terminal
from entrenar_py.check.reports.progress import Progress
from entrenar_py.check.reports.report import Configuration, Ending, Entry, NotApplying, Report
from entrenar_py.check.reports.report import ending as end
from entrenar_py.shared.page import arguments, console
from entrenar_py.shared.untrusted import printing
from entrenar_py.shared.verdict import Verdict, inconclusive

if TYPE_CHECKING:
    from entrenar_py.check.reports.html import Curves

CHECKOUT = "GITHUB_WORKSPACE"  # a variable of GitHub's runners: the folder of the checkout


@dataclass(frozen=True, kw_only=True)
class Work:
    """The source of a report's entries, and facts that the report states about them.

    - `entries`: called to yield the entries. A later entry of a clause replaces an earlier one.
    - `environment`: called after `entries`, since only then the opened devices are known.
    - `places`: the lines of the script that was run, also called after `entries`.
    - `runs`, `foreseen`: the names of the planned runs, and lines of text about them.
    - `doubts`: called after the runs. Returns, by clause id, evidence against the declaration that
      the clause does not apply.
    - `streams`: whether verdicts are shown as soon as they are known, since runs take long.
    """

    entries: Callable[[Show, Listener], Iterable[Entry]]
    environment: Callable[[], Mapping[str, Any]]
    system: str
    seed: int
    places: Callable[[], Mapping[str, Position]] = dict
    num_traces: int | None = None
    not_applying: tuple[NotApplying, ...] = ()
    runs: tuple[str, ...] = ()
    foreseen: tuple[str, ...] = ()
    doubts: Mapping[str, str] = field(default_factory=dict)
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work on one contract, with the options for this contract.

    If `is_aside`, the contract is reported only if one of its clauses is falsified.
    """

    options: argparse.Namespace
    contract: Contract
    work: Work
    standing: configuration.Standing
    is_aside: bool = False


def run_all(
    jobs: Sequence[Job],
    command: str,
    output: Console,
    *,
    runs: AbstractContextManager[object],
    conclude: Callable[[Sequence[Report], Ending], str] = lambda reports, ending: "",
) -> int:
    """Do the work on all contracts, report it in every format, and return the exit code.

    After an interrupted job, no other job is started. If a job raises, the jobs before it are
    still reported. `runs` is closed before the report is printed, so that messages of closing don't
    follow the report. Before that, `conclude` gets all reports, and returns the command to run
    next.
    """
    options = jobs[0].options
    style = terminal.Style(quiet=options.quiet and not options.verbose, verbose=options.verbose)
    streams = any(job.work.streams for job in jobs)
    main = [job for job in jobs if not job.is_aside]
    heads = [_begun(job, command) for job in main]
    terminal.begin(heads, output, style=style, foreseen=_foreseen(main))
    reports: list[Report] = []
    ending, after = None, ""
    try:
        with runs:
            rows = streams and style.verbose
            for own, report in each_report(jobs, command, output, rows=rows):
                reports.append(report)
                _write(report, own, output)
            ending = end(reports, allow_inconclusive=options.allow_inconclusive)
            after = "" if reports[-1:] and reports[-1].interrupted else conclude(reports, ending)
        if (left := len(main) - len(reports)) > 0:
            others = "1 other contract was" if left == 1 else f"{left} other contracts were"
            printing.warn(f"entrenar-check: interrupted: {others} not begun")
    finally:
        if reports:
            terminal.render(
                reports, output, style=style, ending=ending, streamed=streams, after=after
            )
    return ending.code


def each_report(
    jobs: Sequence[Job], command: str, output: Console, *, rows: bool = False
) -> Iterator[tuple[argparse.Namespace, Report]]:
    """Do the work of each job, and yield its options with its report.

    The report of a job aside is yielded only if a clause is falsified. No job is started after an
    interrupted one. With `rows`, each verdict is printed as it comes.
    """
    for job in jobs:
        report = _finished(job, _begun(job, command), output, rows=rows and not job.is_aside)
        if job.is_aside:
            report = _broken(report)
            if not report.entries:
                continue
        yield job.options, report
        if report.interrupted:
            break


def _broken(report: Report) -> Report:
    broken = [entry for entry in report.entries if entry.verdict is Verdict.FALSIFIED]
    return replace(report, entries=tuple(broken), not_applying=())


def _foreseen(jobs: Sequence[Job]) -> list[str]:
    lines = [line for job in jobs for line in job.work.foreseen]
    runs = [name for job in jobs for name in job.work.runs]
    told = [f"runs: {', '.join(dict.fromkeys(runs))}"] if runs else []
    return [*told, *dict.fromkeys(lines)]


def _begun(job: Job, command: str) -> Report:
    """Return the report of `job` before its work, without entries."""
    return Report(
        contract=job.contract,
        contract_given=job.options.contract,
        system=job.work.system,
        seed=job.work.seed,
        entries=(),
        environment={},
        elapsed_s=0.0,
        interrupted=False,
        command=command,
        num_traces=job.work.num_traces,
        not_applying=(*job.standing.not_applying, *job.work.not_applying),
        excluded=job.standing.excluded,
        configuration=_configuration(job.options),
        bindings_given=tuple(map(str, job.options.bind)),
    )


def _finished(job: Job, begun: Report, output: Console, *, rows: bool) -> Report:
    """Do the work of `job` and return its report. With `rows`, print each verdict as it comes."""
    started = time.monotonic()
    work, standing = job.work, job.standing
    entries: dict[str, Entry] = {}  # clause id -> entry
    unapplied: dict[str, NotApplying] = {}  # clause id -> why it doesn't apply
    interrupted = False
    seen = _curves(job.options)
    shown = terminal.Rows(output, standing.selected) if rows else None
    write = printing.warn if work.streams else None
    errors = console.standard_error(color=not job.options.no_color)
    with Progress(errors, write=write, is_quiet=job.options.quiet) as progress:
        try:
            for entry in work.entries(progress.show, seen.see if seen else ignore):
                # Entries are taken one by one, so that an interrupt keeps the entries known so far.
                if shown is not None:
                    with progress.hidden():
                        shown.show(entry)
                if not (entry.finding.applies or _is_named(entry, job.options)):
                    unapplied[entry.invariant.id] = _not_applying(entry)
                    continue
                entries[entry.invariant.id] = _noted(_named(entry), standing)
                progress.know(entry)
        except KeyboardInterrupt:
            interrupted = True
    order = [clause.id for clause in job.contract.invariants]
    return replace(
        begun,
        entries=tuple(sorted(entries.values(), key=lambda entry: order.index(entry.invariant.id))),
        not_applying=tuple(
            _doubted(left_out, work.doubts)
            for left_out in (*begun.not_applying, *unapplied.values())
            if left_out.invariant.id not in entries
        ),
        environment=work.environment() if entries else {},
        places=work.places(),
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
        curves=seen.found if seen else (),
    )


def _is_named(entry: Entry, options: argparse.Namespace) -> bool:
    # If the user named the clause, the report must say that nothing was decided.
    return bool({entry.invariant.id, entry.invariant.item} & {*options.only})


def _not_applying(entry: Entry) -> NotApplying:
    return NotApplying(invariant=entry.invariant, reason=entry.finding.reason, seen=True)


def _named(entry: Entry) -> Entry:
    if entry.finding.applies:
        return entry
    reason = f"not applied: {entry.finding.reason}"
    return replace(entry, finding=inconclusive(entry.invariant.id, reason))


def _noted(entry: Entry, standing: configuration.Standing) -> Entry:
    """Return `entry` with the configuration's notes, and its reason for accepting a failure."""
    binding = entry.invariant.binding
    notes = [f"its binding: {one}" for one in (binding.departures if binding else ())]
    if (note := standing.notes.get(entry.invariant.id)) is not None:
        notes.append(note)
    accepted = standing.accepted.get(entry.invariant.id, entry.accepted)
    if accepted and entry.verdict is Verdict.HELD:
        notes.append(f"it held, so it need not be accepted: {accepted}")
    finding = replace(entry.finding, notes=(*entry.finding.notes, *notes))
    return replace(entry, finding=finding, accepted=accepted)


def _doubted(left_out: NotApplying, doubts: Mapping[str, str]) -> NotApplying:
    doubt = doubts.get(left_out.invariant.id)
    reason = f"{left_out.reason}; BUT {doubt}: if the clause does apply, remove this declaration"
    return replace(left_out, reason=reason) if doubt else left_out


def _configuration(options: argparse.Namespace) -> Configuration | None:
    if options.project is None:
        return None
    return Configuration(
        place=str(options.project.place),
        used=options.used,
        overruled=options.overruled,
        command=options.command if "command" in options.used else (),
    )


def _curves(options: argparse.Namespace) -> Curves | None:
    if options.html is None:
        return None
    from entrenar_py.check.reports.html import Curves

    return Curves()


def _write(report: Report, options: argparse.Namespace, output: Console) -> None:
    """Write the report in the requested formats.

    Formats are imported here, as most calls need none.
    """
    if not options.github and all(getattr(options, name) is None for name in FILES):
        return
    from entrenar_py.check.reports import github, html, json_format, junit, sarif

    allowed: bool = options.allow_inconclusive
    root = checkout(options)
    write_files(
        options,
        {
            "json": lambda: json_format.dump(report, allow_inconclusive=allowed),
            "junit": lambda: junit.render(report, allow_inconclusive=allowed),
            "sarif": lambda: sarif.dump(report, root=root, allow_inconclusive=allowed),
            "html": lambda: html.render(report),
        },
    )
    if options.github:
        lines = github.annotate(report, root=root, allow_inconclusive=allowed)
        tell_github(lines, github.summary(report, allow_inconclusive=allowed), output)


def require_writable(options: argparse.Namespace, formats: Iterable[str]) -> None:
    """Raise UsageError if a file of these formats, or GitHub's summary file, can't be written."""
    for name in formats:
        if getattr(options, name) is not None:
            arguments.require_writable(getattr(options, name), name)
    if options.github:
        from entrenar_py.check.reports import github

        github.summary_path(os.environ)


def checkout(options: argparse.Namespace) -> Path:
    """Return the folder to which paths in reports are relative."""
    return Path((options.github and os.environ.get(CHECKOUT)) or Path.cwd())


def write_files(
    options: argparse.Namespace, formats: Mapping[str, Callable[[], str | dict[str, Any]]]
) -> None:
    """Write each requested format to the path in the option of its name."""
    for name, render in formats.items():
        path = getattr(options, name)
        if path is not None:
            arguments.write_file(render(), path)


def tell_github(annotations: Iterable[str], summary: str, output: Console) -> None:
    """Print `annotations`, and append `summary` to the summary of the workflow's step."""
    from entrenar_py.check.reports import github

    for line in annotations:
        output.print(line, markup=False, soft_wrap=True, no_wrap=True)
    github.append(summary, github.summary_path(os.environ))
