"""The findings of validation in all formats: text lines, JSON (schema
`entrenar-check-validation/1`), SARIF 2.1.0, and annotations and a summary for GitHub's runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import entrenar_py
from entrenar_py.check.contract.validation import (
    RULES,
    Judged,
    Level,
    Rule,
    RuleFinding,
    Validation,
    count,
)
from entrenar_py.check.reports import evidence, github, json_format, sarif
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


FINGERPRINT = "entrenarCheckRule/v1"
_LEVELS = {**LEVELS, Level.OFF: "none"}
_INDEX = {rule.id: number for number, rule in enumerate(RULES)}


def dump_sarif(found: Validation, *, root: Path, command: str) -> dict[str, Any]:
    """Return the SARIF log. Paths below the folder `root` are written relative to it."""
    contracts = [{"path": known.path, "judgedAs": known.kind or None} for known in found.contracts]
    return sarif.log(
        rules=[_sarif_rule(rule) for rule in RULES],
        invocation=_sarif_invocation(found, command),
        results=[_sarif_result(finding, root) for finding in found.findings],
        properties={"contracts": contracts},
        root=root,
        about="contracts",
    )


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    demands = rule.demands.replace("`", "")
    descriptor = {
        "id": rule.id,
        "shortDescription": {"text": demands},
        "fullDescription": {"text": f"{rule.id} demands: {demands}."},
        "help": {"text": rule.remedy},
        "helpUri": rule.published,
        "defaultConfiguration": {"level": _LEVELS[rule.level]},
    }
    return {name: part for name, part in descriptor.items() if part}


def _sarif_invocation(found: Validation, command: str) -> dict[str, Any]:
    invocation: dict[str, Any] = {
        "executionSuccessful": True,
        "exitCode": exit_code(found),
        "commandLine": escaping.exact(command),
    }
    changed = [rule for rule in RULES if found.levels[rule.id] is not rule.level]
    if changed:
        invocation["ruleConfigurationOverrides"] = [_override(rule, found) for rule in changed]
    return invocation


def _override(rule: Rule, found: Validation) -> dict[str, Any]:
    level = found.levels[rule.id]
    off = level is Level.OFF
    return {
        "descriptor": {"id": rule.id, "index": _INDEX[rule.id]},
        "configuration": {"enabled": False} if off else {"level": _LEVELS[level]},
    }


def _sarif_result(finding: RuleFinding, root: Path) -> dict[str, Any]:
    at, by = finding.at, finding.suppressed
    file = Path(at.file).name if at else ""
    mark = sarif.fingerprint(file, finding.rule.id, finding.item or finding.message)
    result: dict[str, Any] = {
        "ruleId": finding.rule.id,
        "ruleIndex": _INDEX[finding.rule.id],
        "level": _LEVELS[finding.level],
        "message": {"text": evidence.one_line(finding.message)},
        "partialFingerprints": {FINGERPRINT: mark},
    }
    if at is not None:
        result["locations"] = [{"physicalLocation": sarif.location(at, root)}]
        if finding.item:
            logical = {"fullyQualifiedName": evidence.one_line(finding.item)}
            result["locations"][0]["logicalLocations"] = [logical]
    if by is not None:
        reason = evidence.one_line(f"{by.reason} (until {by.until})")
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": reason}
        ]
    return result
