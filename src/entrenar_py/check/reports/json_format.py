"""The report as JSON, by the schema `entrenar-check-report/1` (docs/report-schema-v1.json).

A change that could break readers gets a new schema number and a new schema file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import entrenar_py
from entrenar_py.check.contract import Invariant
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Excluded, Report, ending

SCHEMA = "entrenar-check-report/1"
# Fields of a finding that are left out; `invariant` is the result's id.
_UNSHOWN = ("invariant", "vacuous", "applies")


def dump(report: Report, *, allow_inconclusive: bool) -> dict[str, Any]:
    """Return the report as a dict that strict JSON can hold.

    Numbers that are not finite, and values of the environment without a JSON type, become text.
    """
    record = {
        "schema": SCHEMA,
        "tool": {"name": "entrenar-check", "version": entrenar_py.__version__},
        "contract": _picked(
            report.contract, "name", "path", "version", "digest", "warnings", "notes"
        ),
        "system": report.system,
        "seed": report.seed,
        "verdict": report.verdict,
        "exit": asdict(ending([report], allow_inconclusive=allow_inconclusive)),
        "interrupted": report.interrupted,
        "counts": report.counts,
        "num_compared": report.num_compared,
        "num_traces": report.num_traces,
        "not_applying": [skipped.invariant.id for skipped in report.not_applying],
        "why_not_applying": {
            skipped.invariant.id: skipped.reason for skipped in report.not_applying
        },
        "excluded": [_excluded(exclusion) for exclusion in report.excluded],
        "configuration": report.configuration and asdict(report.configuration),
        "gate": _gate(report),
        "results": [_result(report, entry) for entry in report.entries],
        "environment": report.environment,
        "elapsed_s": report.elapsed_s,
        "command": report.command,
    }
    return {name: plain(value) for name, value in record.items()}


def _excluded(exclusion: Excluded) -> dict[str, Any]:
    return {
        **_picked(exclusion.invariant, "id", "name", "severity"),
        "reason": exclusion.reason,
        "until": exclusion.until.isoformat(),
        "place": exclusion.place,
    }


def _gate(report: Report) -> dict[str, Any] | None:
    gate = report.contract.gate
    if gate is None:
        return None
    return {
        **_picked(gate, "id", "name", "checks", "pass_criteria"),
        "passed": report.gate_passed,
        "broken": [entry.invariant.id for entry in report.gate_broken],
        "not_run": report.gate_not_run,
        "unresolved": report.gate_unresolved,
    }


def _result(report: Report, entry: Entry) -> dict[str, Any]:
    clause, finding = entry.invariant, entry.finding.to_dict()
    return {
        **_picked(clause, "id", "name", "statement", "group", "severity", "critical"),
        **_picked(clause, "tolerance", "tolerance_kind"),
        **_picked(clause.position, "file", "line", "column"),
        "check": clause.check,
        "binding": _binding(clause),
        **{name: value for name, value in finding.items() if name not in _UNSHOWN},
        "means": report.meanings(entry),
        **_picked(entry, "num_scenarios", "num_explored", "elapsed_s", "replay"),
        "replay_command": report.replay_command(entry),
        "accepted": entry.accepted if entry.is_accepted else None,
        "untried": entry.untried,
        "script": evidence.script_line(report, entry) or None,
    }


def _binding(clause: Invariant) -> dict[str, Any] | None:
    """Return the place of the clause's binding, and the statement it was made from.

    Return None if the clause has no binding.
    """
    binding = clause.binding
    if binding is None:
        return None
    return {
        "kind": binding.kind,
        "item": binding.item,
        "file": binding.position.file,
        "line": binding.position.line,
        "reason": binding.reason,
        "not_tried": binding.untried,
        "systems": binding.systems,
    }


def _picked(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def plain(value: Any) -> Any:
    """Return `value` as data for strict JSON. NaN, Inf and values of other types become text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_text(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _text(value)


def _text(value: object) -> str:
    # Paths may have lone surrogates.
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
