"""Do the work of one call, contract by contract, and report it in every requested format."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from entrenar_py.contract import Contract
from entrenar_py.harness import falsify
from entrenar_py.harness.runner import Listener, ignore
from entrenar_py.project import exclusions
from entrenar_py.reports import (
    curves,
    github,
    html,
    json_format,
    junit,
    output_file,
    sarif,
    terminal,
)
from entrenar_py.reports.report import (
    EXIT_FALSIFIED,
    EXIT_HELD,
    EXIT_INCONCLUSIVE,
    EXIT_NOTHING_SELECTED,
    Configuration,
    Entry,
    NotApplying,
    Report,
)
from entrenar_py.untrusted import printing
from entrenar_py.verdict import Verdict

Job = Callable[[], int]  # the work on one contract, which gives an exit code
_WORST_FIRST = (EXIT_FALSIFIED, EXIT_INCONCLUSIVE, EXIT_NOTHING_SELECTED, EXIT_HELD)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The source of a report's entries, and the facts that the report states about them.

    A later entry of a clause replaces an earlier one. `environment` is called after `entries`, as
    only then the opened devices are known. `foreseen` are lines about the runs to come. After the
    runs `doubts` has, by id, what speaks against the claim that a clause does not apply. With
    `streams` each verdict is printed as it comes, since the runs take long.
    """

    entries: Callable[[falsify.Progress, Listener], Iterable[Entry]]
    environment: Callable[[], Mapping[str, Any]]
    system: str
    seed: int
    num_traces: int | None = None
    not_applying: tuple[NotApplying, ...] = ()
    foreseen: tuple[str, ...] = ()
    doubts: Mapping[str, str] = field(default_factory=dict)
    streams: bool = False


class Interrupted(Exception):
    """Raised by an interrupted job, with its exit code, after it has reported what it knows."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_all(jobs: Sequence[Job]) -> int:
    """Return the worst exit code of all jobs; no job is started after an interrupted one."""
    codes = []
    for number, job in enumerate(jobs, start=1):
        try:
            codes.append(job())
        except Interrupted as stopped:
            codes.append(stopped.code)
            if number < len(jobs):
                left = len(jobs) - number
                told = "1 other contract was" if left == 1 else f"{left} other contracts were"
                printing.warn(f"entrenar-check: interrupted: {told} not begun")
            break
    return min(codes, key=_WORST_FIRST.index)


def report(
    options: argparse.Namespace,
    command: str,
    loaded: Contract,
    work: Work,
    standing: exclusions.Standing,
    output: Console,
) -> int:
    """Do the work, render its results in every format, and return the exit code."""
    started = time.monotonic()
    entries: dict[str, Entry] = {}  # by id
    interrupted = False
    seen = curves.Curves()
    begun = Report(
        contract=loaded,
        contract_given=options.contract,
        system=work.system,
        seed=work.seed,
        entries=(),
        environment={},
        elapsed_s=0.0,
        interrupted=False,
        command=command,
        num_traces=work.num_traces,
        not_applying=(*standing.not_applying, *work.not_applying),
        excluded=standing.excluded,
        configuration=_configuration(options),
        bindings_given=tuple(map(str, options.bind)),
    )
    rows = None
    if work.streams:
        rows = terminal.Rows(output, standing.selected, quiet=options.quiet)
        terminal.begin(begun, output, foreseen=work.foreseen, quiet=options.quiet)
    with terminal.Progress(output) as progress:
        try:
            for entry in work.entries(progress.show, seen.see if options.html else ignore):
                # One by one: an interrupt keeps what is known so far.
                entries[entry.invariant.id] = _noted(entry, standing)
                if rows is not None:
                    rows.show(entry)
        except KeyboardInterrupt:
            interrupted = True
    order = [clause.id for clause in loaded.invariants]
    finished = replace(
        begun,
        entries=tuple(sorted(entries.values(), key=lambda entry: order.index(entry.invariant.id))),
        not_applying=tuple(
            _doubted(left_out, work.doubts)
            for left_out in begun.not_applying
            if left_out.invariant.id not in entries
        ),
        environment=work.environment() if entries else {},
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
        curves=seen.found,
    )
    terminal.render(finished, output, quiet=options.quiet, begun=work.streams)
    _write(finished, options, output)
    code = finished.exit_code(allow_inconclusive=options.allow_inconclusive)
    if finished.interrupted:
        raise Interrupted(code)
    return code


def _noted(entry: Entry, standing: exclusions.Standing) -> Entry:
    """Return `entry` with notes on its clause added, and whether its falsification is accepted."""
    binding = entry.invariant.binding
    told = [f"its binding: {one}" for one in (binding.departures if binding else ())]
    if (note := standing.notes.get(entry.invariant.id)) is not None:
        told.append(note)
    accepted = standing.accepted.get(entry.invariant.id, "")
    if accepted and entry.verdict is Verdict.HELD:
        told.append(f"it held, so that it need not be accepted: {accepted}")
    finding = replace(entry.finding, notes=(*entry.finding.notes, *told))
    return replace(entry, finding=finding, accepted=accepted)


def _doubted(left_out: NotApplying, doubts: Mapping[str, str]) -> NotApplying:
    """Return `left_out`, its reason with what speaks against it."""
    doubt = doubts.get(left_out.invariant.id)
    reason = f"{left_out.reason}; BUT {doubt}: if it does apply, take that out"
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


def _write(report: Report, options: argparse.Namespace, output: Console) -> None:
    allowed: bool = options.allow_inconclusive
    root = checkout(options)
    write_files(
        options,
        {
            "json": lambda: json_format.dump(report),
            "junit": lambda: junit.render(report, allow_inconclusive=allowed),
            "sarif": lambda: sarif.dump(report, root=root, allow_inconclusive=allowed),
            "html": lambda: html.render(report),
        },
    )
    if options.github:
        lines = github.annotate(report, root=root, allow_inconclusive=allowed)
        tell_github(lines, github.summary(report), output)


def require_writable(options: argparse.Namespace, formats: Iterable[str]) -> None:
    """Raise UsageError if a file of these formats, or GitHub's summary, can't be written."""
    for name in formats:
        if getattr(options, name) is not None:
            output_file.require_writable(getattr(options, name), name)
    if options.github:
        github.summary_path(os.environ)


def checkout(options: argparse.Namespace) -> Path:
    """Return the folder to which paths in reports are relative."""
    return Path((options.github and os.environ.get(github.CHECKOUT)) or Path.cwd())


def write_files(
    options: argparse.Namespace, formats: Mapping[str, Callable[[], str | dict[str, Any]]]
) -> None:
    """Write each requested format to the path in the option of its name."""
    for name, render in formats.items():
        path = getattr(options, name)
        if path is not None:
            output_file.write(render(), path)


def tell_github(annotations: Iterable[str], summary: str, output: Console) -> None:
    """Print `annotations`, and append `summary` to the summary of the workflow's step."""
    for line in annotations:
        output.print(line, markup=False, soft_wrap=True, no_wrap=True)
    github.append(summary, github.summary_path(os.environ))
