"""The findings of validation as SARIF 2.1.0: all rules, and a result for each finding.

A suppressed finding is a result with a suppression, which readers show as closed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entrenar_py.check.contract.validation import RULES, Level, Rule, RuleFinding, Validation
from entrenar_py.check.reports import evidence, sarif, validation
from entrenar_py.shared.untrusted import escaping

FINGERPRINT = "entrenarCheckRule/v1"
_LEVELS = {**validation.LEVELS, Level.OFF: "none"}
_INDEX = {rule.id: number for number, rule in enumerate(RULES)}


def dump(found: Validation, *, root: Path, command: str) -> dict[str, Any]:
    """Return the SARIF log. Paths below the folder `root` are written relative to it."""
    contracts = [{"path": known.path, "judgedAs": known.kind or None} for known in found.contracts]
    return sarif.log(
        rules=[_rule(rule) for rule in RULES],
        invocation=_invocation(found, command),
        results=[_result(finding, root) for finding in found.findings],
        properties={"contracts": contracts},
        root=root,
        about="contracts",
    )


def _rule(rule: Rule) -> dict[str, Any]:
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


def _invocation(found: Validation, command: str) -> dict[str, Any]:
    invocation: dict[str, Any] = {
        "executionSuccessful": True,
        "exitCode": validation.exit_code(found),
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


def _result(finding: RuleFinding, root: Path) -> dict[str, Any]:
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
