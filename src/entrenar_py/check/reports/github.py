"""The report for GitHub's runners: annotations at the script's lines, and a step summary.

Annotations are workflow commands on standard output. The summary is Markdown, appended to the file
that the runner names. Text from a contract is escaped, so that none of it is a command or Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from entrenar_py.check.contract import Position
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Report, ending
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict

SUMMARY = "GITHUB_STEP_SUMMARY"  # a variable of runners: the path of the summary file

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_MARKS = {
    Verdict.FALSIFIED: "❌ falsified",
    Verdict.INCONCLUSIVE: "⚠️ inconclusive",
    Verdict.HELD: "✅ held",
}
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")  # Markdown allows a backslash before each


def summary_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the file for the step summary.

    Raises UsageError outside a workflow's step.
    """
    if not environment.get(SUMMARY):
        raise UsageError(
            f"--github: the variable {SUMMARY} is not set, so this is not a step of a GitHub "
            "workflow; leave --github out",
            field="github",
        )
    path = Path(environment[SUMMARY])
    arguments.require_writable(path, "github", variable=SUMMARY)
    return path


def annotate(report: Report, *, root: Path, allow_inconclusive: bool) -> Iterator[str]:
    """Yield annotations: entries that did not hold, worst first; missing results; an open gate.

    A runner shows only ten of each level. A place outside the checkout `root` is left out.
    """
    for entry in report.ranked:
        level = evidence.level(entry, allow_inconclusive=allow_inconclusive)
        if level is None:
            continue
        lines = [evidence.one_line(entry.finding.reason), *evidence.detail_lines(report, entry)]
        title = f"{entry.invariant.id} {entry.verdict}"
        at = evidence.place(report, entry)
        yield command(level, "\n".join(lines), title=title, at=at, root=root)
    if report.incomplete:
        yield f"::error title=entrenar-check::{_data(report.incomplete)}"
    if report.gate_open:
        level = "note" if allow_inconclusive else "warning"
        text = evidence.one_line(report.gate_open)
        yield command(level, text, title="entrenar-check", at=None, root=root)


def command(level: str, text: str, *, title: str, at: Position | None, root: Path) -> str:
    """Return one annotation. `level` is error, warning or note; `text` is printable lines."""
    path = None if at is None else evidence.below(at.file, root)
    facts: dict[str, object] = {}
    if at is not None and path is not None:
        facts = {"file": path, "line": at.line, "col": at.column}
    facts["title"] = evidence.one_line(title)
    properties = ",".join(f"{name}={_property(str(value))}" for name, value in facts.items())
    return f"::{_COMMANDS[level]} {properties}::{_data(text)}"


def summary(report: Report, *, allow_inconclusive: bool) -> str:
    """Return the step summary in Markdown, with a line end."""
    contract = report.contract
    heading = f"{contract.name} {contract.version}, system {report.system}, seed {report.seed}"
    lines = [f"### {markdown(heading)}", ""]
    if report.entries:
        lines += ["| verdict | id | name | severity | compared |", "|---|---|---|---|---:|"]
        lines += map(_row, report.ranked)
    if report.incomplete:
        lines += ["", f"**{markdown(report.incomplete)}**"]
    for entry in report.ranked:
        if entry.verdict is not Verdict.HELD:
            reason = markdown(f"{entry.invariant.id} {entry.verdict}: {entry.finding.reason}")
            lines += ["", f"**{reason}**", "", _fenced(evidence.detail_lines(report, entry))]
    notes = [line for entry in report.ranked for line in evidence.note_lines(entry)]
    gate = evidence.gate(report)
    for line in (*([gate] if gate else []), *notes, *report.left_out):
        lines += ["", markdown(line)]
    if report.configuration is not None:
        lines += ["", markdown(f"Configured: {report.configuration.told}")]
    closing = ending([report], allow_inconclusive=allow_inconclusive)
    lines += ["", f"**{markdown(str(closing))}**"]
    lines += ["", "Repeat with", "", _fenced([escaping.exact(report.command)])]
    return "\n".join(lines) + "\n"


def append(text: str, path: Path) -> None:
    """Append `text` to the file at `path`. Raises UsageError if that fails."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        problem = f"can't be written ({error.strerror}); set {SUMMARY} to another file"
        raise UsageError(f"step summary {path}: {problem}") from error


def _row(entry: Entry) -> str:
    clause = entry.invariant
    cells = (clause.id, clause.name, clause.severity, f"{entry.finding.compared:,}")
    return f"| {_MARKS[entry.verdict]} | {' | '.join(map(markdown, cells))} |"


def markdown(text: str) -> str:
    """Return `text` on one line, escaped so that none of it is Markdown or HTML."""
    return _PUNCTUATION.sub(r"\\\1", evidence.one_line(text))


def _fenced(lines: list[str]) -> str:
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _data(text: str) -> str:
    return escaping.text(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
