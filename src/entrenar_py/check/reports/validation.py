"""The findings of validation as text lines, as JSON (schema `entrenar-check-validation/1`), and as
annotations and a summary for GitHub's runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import entrenar_py
from entrenar_py.check.contract.validation import Judged, Level, RuleFinding, Validation, count
from entrenar_py.check.reports import evidence, github, json_format
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted

SCHEMA = "entrenar-check-validation/1"
EXIT_VALID, EXIT_INVALID = 0, 2
# Level of a rule -> level in SARIF and in annotations.
LEVELS = {Level.ERROR: "error", Level.WARNING: "warning", Level.INFO: "note"}


def exit_code(validation: Validation) -> int:
    """Return EXIT_VALID if no finding counts as an error, else EXIT_INVALID."""
    return EXIT_VALID if validation.is_valid else EXIT_INVALID


def lines(validation: Validation) -> Iterator[str]:
    """Yield `file:line:column: level: RULE: message` for each finding; suppressed ones say why."""
    for finding in validation.findings:
        place = finding.item if finding.at is None else str(finding.at)
        by = finding.suppressed
        word = str(finding.level) if by is None else "suppressed"
        why = "" if by is None else f" (until {by.until}: {by.reason})"
        message = evidence.one_line(f"{finding.rule.id}: {finding.message}{why}")
        yield f"{escaping.line(place)}: {word}: {message}"


def verdicts(validation: Validation) -> Iterator[str]:
    """Yield `FILE: valid, 6 invariants, 0 warnings` per contract, then `suppressions: 2 stale`."""
    for judged in validation.contracts:
        errors = count(judged.findings, Level.ERROR)
        word = "not valid" if errors else "valid"
        facts = [counted(errors, "error")] if errors else []
        if judged.contract is not None:
            facts.append(counted(len(judged.contract.invariants), "invariant"))
        facts.append(counted(count(judged.findings, Level.WARNING), "warning"))
        infos = count(judged.findings, Level.INFO)
        facts += [counted(infos, "note")] if infos else []
        aside = sum(not finding.counts for finding in judged.findings)
        facts += [f"{aside} suppressed"] if aside else []
        yield escaping.line(f"{judged.path.name}: {word}, {', '.join(facts)}")
    if validation.stale:
        errors = count(validation.stale, Level.ERROR)
        yield f"suppressions: {len(validation.stale)} stale" + (", not valid" if errors else "")


def dump(validation: Validation, *, command: str) -> dict[str, Any]:
    """Return the validation as plain data that strict JSON can hold."""
    record = {
        "schema": SCHEMA,
        "tool": {"name": "entrenar-check", "version": entrenar_py.__version__},
        "valid": validation.is_valid,
        "exit_code": exit_code(validation),
        "contracts": [_contract(judged) for judged in validation.contracts],
        "stale_suppressions": [_finding(finding) for finding in validation.stale],
        "command": command,
    }
    return {name: json_format.plain(value) for name, value in record.items()}


def annotate(found: Validation, *, root: Path) -> Iterator[str]:
    """Yield an annotation for each finding that counts, worst first.

    A runner shows ten of each level. A place outside of the checkout `root` is left out.
    """
    counted_findings = [finding for finding in found.findings if finding.counts]
    for finding in sorted(counted_findings, key=lambda finding: list(LEVELS).index(finding.level)):
        yield github.command(
            LEVELS[finding.level],
            evidence.one_line(finding.message),
            title=finding.rule.id,
            at=finding.at,
            root=root,
        )


def summary(found: Validation) -> str:
    """Return the summary in Markdown: a verdict for each contract, a row for each finding."""
    lines = []
    for line in verdicts(found):
        lines += [f"### {github.markdown(line)}", ""]
    if found.findings:
        lines += ["| level | rule | place | finding |", "|---|---|---|---|"]
        lines += map(_row, found.findings)
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(finding: RuleFinding) -> str:
    by = finding.suppressed
    level = str(finding.level) if by is None else f"suppressed until {by.until}: {by.reason}"
    place = finding.item if finding.at is None else str(finding.at)
    cells = (level, finding.rule.id, place, finding.message)
    return f"| {' | '.join(map(github.markdown, cells))} |"


def _contract(judged: Judged) -> dict[str, Any]:
    counts = {str(level): count(judged.findings, level) for level in Level if level != "off"}
    loaded = judged.contract
    return {
        "path": judged.path,
        "digest": None if loaded is None else loaded.digest,
        "judged_as": judged.kind or None,
        "valid": not counts["error"],
        "counts": counts | {"suppressed": sum(not finding.counts for finding in judged.findings)},
        "findings": [_finding(finding) for finding in judged.findings],
    }


def _finding(finding: RuleFinding) -> dict[str, Any]:
    at, by = finding.at, finding.suppressed
    return {
        "rule": finding.rule.id,
        "level": str(finding.level),
        "file": None if at is None else at.file,
        "line": None if at is None else at.line,
        "column": None if at is None else at.column,
        "item": finding.item,
        "message": finding.message,
        "remedy": finding.rule.remedy,
        "suppressed": None if by is None else {"reason": by.reason, "until": by.until},
    }
