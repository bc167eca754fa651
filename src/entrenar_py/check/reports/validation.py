"""The findings of a validation of contracts, in all formats.

The formats are lines of text, JSON (schema `entrenar-check-validation/2`), SARIF 2.1.0, and
annotations and a summary for GitHub's runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import entrenar_py
from entrenar_py.check.contract.rules import RULES, Level, Rule
from entrenar_py.check.contract.validation import (
    Judged,
    RuleFinding,
    Validation,
    count,
    level_of,
)
from entrenar_py.check.reports import evidence, github, json_format, sarif
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted

SCHEMA = "entrenar-check-validation/2"
EXIT_VALID, EXIT_INVALID = 0, 2
# Level of a rule -> its level in SARIF and in annotations.
LEVELS = {Level.ERROR: "error", Level.WARNING: "warning", Level.INFO: "note"}


def exit_code(validation: Validation) -> int:
    """Return EXIT_VALID if no finding counts as an error, else EXIT_INVALID."""
    return EXIT_VALID if validation.is_valid else EXIT_INVALID


def lines(validation: Validation) -> Iterator[str]:
    """Yield `file:line:column: level: RULE: message` for each finding."""
    for finding in validation.findings:
        message = evidence.one_line(f"{finding.rule.id}: {finding.message}")
        yield f"{escaping.line(str(finding.at))}: {_word(finding)}: {message}"


def _word(finding: RuleFinding) -> str:
    return "suppressed" if finding.suppressed else str(finding.level)


def verdicts(validation: Validation) -> Iterator[str]:
    """Yield `FILE: valid, 6 invariants, 0 warnings` per contract."""
    for judged in validation.contracts:
        errors = count(judged.findings, Level.ERROR)
        word = "not valid" if errors else "valid"
        facts = [counted(errors, "error")] if errors else []
        if judged.contract is not None:
            facts.append(counted(len(judged.contract.invariants), "invariant"))
        facts.append(counted(count(judged.findings, Level.WARNING), "warning"))
        infos = count(judged.findings, Level.INFO)
        facts += [counted(infos, "note")] if infos else []
        aside = sum(finding.suppressed for finding in judged.findings)
        facts += [f"{aside} suppressed"] if aside else []
        yield escaping.line(f"{judged.path.name}: {word}, {', '.join(facts)}")


def dump(validation: Validation, *, command: str) -> dict[str, Any]:
    """Return the validation as plain data that strict JSON can hold."""
    record = {
        "schema": SCHEMA,
        "tool": {"name": "entrenar-check", "version": entrenar_py.__version__},
        "valid": validation.is_valid,
        "exit_code": exit_code(validation),
        "contracts": [_contract(judged) for judged in validation.contracts],
        "command": command,
    }
    return {name: json_format.plain(value) for name, value in record.items()}


def annotate(result: Validation, *, root: Path) -> Iterator[str]:
    """Yield a GitHub annotation for each finding that counts, worst first.

    A runner shows only ten of each level. A place outside the checkout `root` is left out.
    """
    counted_findings = [finding for finding in result.findings if not finding.suppressed]
    for finding in sorted(counted_findings, key=lambda finding: list(LEVELS).index(finding.level)):
        yield github.command(
            LEVELS[finding.level],
            evidence.one_line(finding.message),
            title=finding.rule.id,
            at=finding.at,
            root=root,
        )


def summary(result: Validation) -> str:
    """Return the summary in Markdown: a verdict for each contract, a row for each finding."""
    lines = []
    for line in verdicts(result):
        lines += [f"### {github.markdown(line)}", ""]
    if result.findings:
        lines += ["| level | rule | place | finding |", "|---|---|---|---|"]
        lines += map(_row, result.findings)
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(finding: RuleFinding) -> str:
    cells = (_word(finding), finding.rule.id, str(finding.at), finding.message)
    return f"| {' | '.join(map(github.markdown, cells))} |"


def _contract(judged: Judged) -> dict[str, Any]:
    counts = {str(level): count(judged.findings, level) for level in Level}
    loaded = judged.contract
    return {
        "path": judged.path,
        "digest": None if loaded is None else loaded.digest,
        "judged_as": judged.kind or None,
        "valid": not counts["error"],
        "counts": counts | {"suppressed": sum(finding.suppressed for finding in judged.findings)},
        "findings": [_finding(finding) for finding in judged.findings],
    }


def _finding(finding: RuleFinding) -> dict[str, Any]:
    return {
        "rule": finding.rule.id,
        "level": str(finding.level),
        "file": finding.at.file,
        "line": finding.at.line,
        "column": finding.at.column,
        "item": finding.item,
        "message": finding.message,
        "remedy": finding.rule.remedy,
        "suppressed": finding.suppressed,
    }


FINGERPRINT = "entrenarCheckRule/v1"
_INDEX = {rule.id: number for number, rule in enumerate(RULES)}


def dump_sarif(result: Validation, *, root: Path, command: str) -> dict[str, Any]:
    """Return the SARIF log of a validation. Paths below `root` are written relative to it."""
    contracts = [{"path": known.path, "judgedAs": known.kind or None} for known in result.contracts]
    return sarif.log(
        rules=[_sarif_rule(rule) for rule in RULES],
        invocation=_sarif_invocation(result, command),
        results=[_sarif_result(finding, root) for finding in result.findings],
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
        "defaultConfiguration": {"level": LEVELS[rule.level]},
    }
    return {name: part for name, part in descriptor.items() if part}


def _sarif_invocation(result: Validation, command: str) -> dict[str, Any]:
    invocation: dict[str, Any] = {
        "executionSuccessful": True,
        "exitCode": exit_code(result),
        "commandLine": escaping.exact(command),
    }
    raised = [rule for rule in RULES if level_of(rule, strict=result.strict) is not rule.level]
    if raised:
        invocation["ruleConfigurationOverrides"] = [
            {
                "descriptor": {"id": rule.id, "index": _INDEX[rule.id]},
                "configuration": {"level": LEVELS[Level.ERROR]},
            }
            for rule in raised
        ]
    return invocation


def _sarif_result(finding: RuleFinding, root: Path) -> dict[str, Any]:
    mark = sarif.fingerprint(
        Path(finding.at.file).name, finding.rule.id, finding.item or finding.message
    )
    place: dict[str, Any] = {"physicalLocation": sarif.location(finding.at, root)}
    if finding.item:
        place["logicalLocations"] = [{"fullyQualifiedName": evidence.one_line(finding.item)}]
    result: dict[str, Any] = {
        "ruleId": finding.rule.id,
        "ruleIndex": _INDEX[finding.rule.id],
        "level": LEVELS[finding.level],
        "message": {"text": evidence.one_line(finding.message)},
        "partialFingerprints": {FINGERPRINT: mark},
        "locations": [place],
    }
    if finding.suppressed:  # readers show a suppressed result as closed
        result["suppressions"] = [{"kind": "external", "status": "accepted"}]
    return result
