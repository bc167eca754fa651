"""Selected clauses that don't apply to the system: every format names them, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from entrenar_py.check.reports import github, html, json_format, junit, sarif
from entrenar_py.check.reports.report import EXIT_HELD, NotApplying, Report
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.reports.conftest import printed

REASON = "every scenario is with leave, which ddp_canonical can't do"
ALONE = "it compares steps that all workers make together"


def _terminal(report: Report) -> str:
    return "\n".join(printed(report, verbose=True))


def _junit(report: Report) -> str:
    root = ElementTree.fromstring(junit.render(report, allow_inconclusive=False))
    told = {one.get("name"): one.get("value") for one in root.iter("property")}
    assert told["not_applying"] == "F-DP-006 F-DP-001"
    return "\n".join(f"{name}: {value}" for name, value in told.items())


def _sarif(report: Report) -> str:
    log = sarif.dump(report, root=Path.cwd(), allow_inconclusive=False)
    (run,) = log["runs"]
    told = run["invocations"][0]["toolExecutionNotifications"]
    assert {one["level"] for one in told} == {"note"}
    rules = run["tool"]["driver"]["rules"]
    return "\n".join(
        f"{rules[one['associatedRule']['index']]['id']}: {one['message']['text']}" for one in told
    )


def _json(report: Report) -> str:
    record = json_format.dump(report, allow_inconclusive=False)
    assert record["not_applying"] == ["F-DP-006", "F-DP-001"]
    return "\n".join(f"{clause}: {why}" for clause, why in record["why_not_applying"].items())


@pytest.mark.parametrize(
    "render",
    [
        *(_terminal, _junit, _sarif, _json),
        lambda report: unescape(github.summary(report, allow_inconclusive=False)).replace("\\", ""),
        lambda report: unescape(html.render(report)),
    ],
)
def test_every_format_says_which_and_why(full: Report, render: Callable[[Report], str]) -> None:
    """Each id is shown with its own reason, and the notes are still shown."""
    applied, *_, last = full.contract.invariants
    left_out = (
        NotApplying(invariant=last, reason=REASON),
        NotApplying(invariant=applied, reason=ALONE),
    )
    text = render(replace(full, entries=full.entries[1:], not_applying=left_out))
    lines = [line for line in text.splitlines() if REASON in line]
    assert lines
    assert all("F-DP-006" in line and "F-DP-001" not in line for line in lines)
    assert any("F-DP-001" in line for line in text.splitlines() if ALONE in line)


def test_clauses_of_one_reason_stand_together(full: Report) -> None:
    """There is one line for each reason."""
    clauses = full.contract.invariants[:2]
    left_out = tuple(NotApplying(invariant=clause, reason=ALONE) for clause in clauses)
    (line,) = replace(full, not_applying=left_out).left_out
    assert line.endswith(f"F-DP-002 (Sharding covers every sample exactly once): {ALONE}")
    assert full.left_out == ()


def test_notes_of_what_held_are_told(full: Report) -> None:
    """Formats without lines for clauses that held show their notes, too."""
    log = sarif.dump(full, root=Path.cwd(), allow_inconclusive=False)
    (note,) = log["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    assert note["associatedRule"] == {"id": "F-DP-004", "index": 2}
    for text in (note["message"]["text"], github.summary(full, allow_inconclusive=False)):
        assert "note F-DP-004: software adapter llvmpipe" in text.replace("\\", "")


def test_a_gate_does_not_demand_what_was_seen_not_to_apply(full: Report) -> None:
    """It passes over the others, and says so. What only somebody declares leaves it undecided."""
    clauses = tuple(entry.invariant for entry in full.entries)
    first = clauses[0]
    held = [
        replace(entry, finding=Finding(invariant="", verdict=Verdict.HELD, compared=1))
        for entry in full.entries[1:]
    ]
    assert full.contract.gate is not None
    gate = replace(full.contract.gate, checks=tuple(clause.id for clause in clauses))
    contract = replace(full.contract, gate=gate, invariants=clauses)
    seen = NotApplying(invariant=first, reason=REASON, seen=True)
    known = replace(full, contract=contract, entries=tuple(held), not_applying=(seen,))
    assert known.gate_passed
    assert known.gate_scope == f"over {len(held)} clauses ({first.id} not applied)"
    assert known.exit_code(allow_inconclusive=False) == EXIT_HELD
    declared = replace(known, not_applying=(replace(seen, seen=False),))
    assert declared.gate_passed is None
