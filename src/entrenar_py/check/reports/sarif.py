"""The report as SARIF 2.1.0, for code scanning: a rule per clause, a result per clause not held.

A falsified clause is an `error`, or a `note` if the failure is accepted. An inconclusive clause is
a `warning`, or a `note` with `--allow-inconclusive`. Clauses that do not apply, and notes, are
notifications, since readers show a result of any kind as an alert. A run that was interrupted or
selected no clause is marked as not successful. So the exit code is 0 exactly if the run is
successful and the log has no errors and no warnings.

If a user's script was run, a result is located at one of its lines, and the place of the clause is
a related location.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blake3 import blake3

import entrenar_py
from entrenar_py.check.contract import Invariant, Position
from entrenar_py.check.reports import evidence, json_format
from entrenar_py.check.reports.report import Entry, Report
from entrenar_py.shared.untrusted import escaping

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
ROOT = "SRCROOT"  # names the checkout as the base of paths
FINGERPRINT = "entrenarCheckClause/v1"
# Severity of a clause -> SARIF's level of a failure.
_LEVELS = {"P0": "error", "P1": "warning", "P2": "note"}


def dump(report: Report, *, root: Path, allow_inconclusive: bool) -> dict[str, Any]:
    """Return the SARIF log of a report. Paths below `root` are written relative to it."""
    results = [
        _result(report, entry, number, level, root)
        for number, entry in enumerate(report.entries)
        if (level := evidence.level(entry, allow_inconclusive=allow_inconclusive)) is not None
    ]
    properties = {
        "contract": report.contract.name,
        "contractVersion": report.contract.version,
        "contractDigest": report.contract.digest,
        "system": report.system,
        "seed": report.seed,
        **({"configuration": report.configuration.told} if report.configuration else {}),
        "environment": report.environment,
    }
    return log(
        rules=[_rule(clause) for clause in _clauses(report)],
        invocation=_invocation(report, allow_inconclusive=allow_inconclusive),
        results=results,
        properties=properties,
        root=root,
        about=report.contract.name,
    )


def log(
    *,
    rules: list[dict[str, Any]],
    invocation: dict[str, Any],
    results: list[dict[str, Any]],
    properties: dict[str, Any],
    root: Path,
    about: str,
) -> dict[str, Any]:
    """Return the SARIF log of one run. Paths below the folder `root` are written relative to it.

    `about` is part of the run's category. Some readers keep only one run of each category, so runs
    about different things need different ones.
    """
    driver = {"name": "entrenar-check", "version": entrenar_py.__version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"entrenar-check/{escaping.exact(about)}/"},
        "invocations": [invocation],
        "originalUriBaseIds": {ROOT: {"uri": f"{root.resolve().as_uri()}/"}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": properties,
    }
    record: dict[str, Any] = json_format.plain(
        {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    )
    return record


def fingerprint(*marks: str) -> str:
    """Return 32 hex digits, from `marks`, by which readers recognise a result in a later run."""
    return str(blake3("\0".join(marks).encode("utf-8", "backslashreplace")).hexdigest(16))


def _clauses(report: Report) -> list[Invariant]:
    clauses = [entry.invariant for entry in report.entries]
    clauses += [exclusion.invariant for exclusion in report.excluded]
    return clauses + [skipped.invariant for skipped in report.not_applying]


def _rule(clause: Invariant) -> dict[str, Any]:
    rule = {
        "id": escaping.exact(clause.id),
        "name": evidence.one_line(clause.name),
        "shortDescription": {"text": evidence.one_line(clause.name)},
        "fullDescription": {"text": evidence.one_line(clause.statement)},
        "help": {"text": evidence.one_line(clause.description or clause.statement)},
        "defaultConfiguration": {"level": _LEVELS[clause.severity]},
        "properties": {
            "severity": clause.severity,
            "group": clause.group,
            **({"bound": evidence.one_line(told)} if (told := evidence.bound(clause)) else {}),
        },
    }
    # SARIF requires that an empty description is left out.
    return {name: part for name, part in rule.items() if part not in ("", {"text": ""})}


def _invocation(report: Report, *, allow_inconclusive: bool) -> dict[str, Any]:
    code = report.exit_code(allow_inconclusive=allow_inconclusive)
    invocation: dict[str, Any] = {
        "executionSuccessful": bool(report.entries) and not report.interrupted,
        "exitCode": code,
        "commandLine": escaping.exact(report.command),
    }
    notifications = [*_notes(report)]
    if report.incomplete:
        why = evidence.one_line(report.incomplete)
        notifications.insert(0, {"level": "error", "message": {"text": why}})
    if report.gate_open:
        level = "note" if allow_inconclusive else "warning"
        notifications.insert(
            0, {"level": level, "message": {"text": evidence.one_line(report.gate_open)}}
        )
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    return invocation


def _notes(report: Report) -> Iterator[dict[str, Any]]:
    """Yield a notification for each note and each clause left out, with the index of its rule."""
    notes = [evidence.note_lines(entry) for entry in report.entries]
    for excluded in report.excluded:
        notes.append([evidence.one_line(f"{excluded.named} excluded {excluded.why}")])
    for skipped in report.not_applying:
        line = (
            f"{skipped.invariant.id} ({skipped.invariant.name}) was not applied: {skipped.reason}"
        )
        notes.append([evidence.one_line(line)])
    for number, (clause, lines) in enumerate(zip(_clauses(report), notes, strict=True)):
        rule = {"id": escaping.exact(clause.id), "index": number}
        for line in lines:
            yield {"level": "note", "message": {"text": line}, "associatedRule": rule}


def _result(report: Report, entry: Entry, number: int, level: str, root: Path) -> dict[str, Any]:
    clause, finding = entry.invariant, entry.finding
    heading = f"{clause.id} {str(entry.verdict).upper()}: {finding.reason}"
    details = evidence.detail_lines(report, entry)
    mark = fingerprint(report.contract.name, clause.id, str(entry.verdict))
    at = evidence.place(report, entry)
    stated = {
        "physicalLocation": location(clause.position, root),
        "message": {"text": f"{escaping.exact(clause.id)} is stated here"},
    }
    return {
        "ruleId": escaping.exact(clause.id),
        "ruleIndex": number,
        "level": level,
        "message": {"text": "\n".join([evidence.one_line(heading), *details])},
        "locations": [{"physicalLocation": location(at, root)}],
        **({} if at == clause.position else {"relatedLocations": [stated]}),
        "partialFingerprints": {FINGERPRINT: mark},
        "properties": {"verdict": str(entry.verdict), "compared": finding.compared},
    }


def location(at: Position, root: Path) -> dict[str, Any]:
    """Return a SARIF physicalLocation. Its path is relative to `root` if the file is below it."""
    path = evidence.below(at.file, root)
    artifact = {"uri": Path(at.file).resolve().as_uri()}
    if path is not None:
        artifact = {"uri": quote(path, errors="replace"), "uriBaseId": ROOT}
    return {
        "artifactLocation": artifact,
        "region": {"startLine": at.line, "startColumn": at.column},
    }
