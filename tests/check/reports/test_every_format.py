"""What every format tells: clauses that are left out or bound, and accepted falsifications."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from entrenar_py.check.contract import Binding, Position
from entrenar_py.check.reports import github, html, json_format, junit, sarif
from entrenar_py.check.reports.report import (
    EXIT_HELD,
    EXIT_INCONCLUSIVE,
    Configuration,
    Excluded,
    NotApplying,
    Report,
    ending,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.reports.conftest import printed

SCHEMA = Path(__file__).parents[3] / "docs" / "report-schema-v1.json"


def _terminal(report: Report) -> str:
    return "\n".join(printed(report, verbose=True))


def _junit(report: Report) -> str:
    """Return properties, and cases with the message and the text of what is in them."""
    root = ElementTree.fromstring(junit.render(report, allow_inconclusive=False))
    lines = [f"{one.get('name')}: {one.get('value')}" for one in root.iter("property")]
    for case in root.iter("testcase"):
        lines += [f"{case.get('name')} {one.get('message')}\n{one.text}" for one in case]
    return "\n".join(lines)


def _sarif(report: Report) -> str:
    """Return what is told of each rule, and the run's properties."""
    run = sarif_run(report)
    rules = run["tool"]["driver"]["rules"]
    told = run["invocations"][0]["toolExecutionNotifications"]
    lines = [
        f"{rules[one['associatedRule']['index']]['id']}: {one['message']['text']}" for one in told
    ]
    results = [f"{one['ruleId']}: {one['message']['text']}" for one in run["results"]]
    return "\n".join([*lines, *results, *map(str, run["properties"].values())])


def sarif_run(report: Report) -> dict[str, Any]:
    """Return the only run of the log."""
    (run,) = sarif.dump(report, root=Path.cwd(), allow_inconclusive=False)["runs"]
    return dict(run)


def json_record(report: Report) -> dict[str, Any]:
    """Return the JSON report, which is valid against its schema."""
    record = json_format.dump(report, allow_inconclusive=False)
    jsonschema.validate(json.loads(json.dumps(record)), json.loads(SCHEMA.read_text("utf-8")))
    return record


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "terminal": _terminal,
    "junit": _junit,
    "sarif": _sarif,
    "github": lambda report: unescape(github.summary(report, allow_inconclusive=False)).replace(
        "\\", ""
    ),
    "html": lambda report: unescape(html.render(report)),
}
each_format = pytest.mark.parametrize("render", FORMATS.values(), ids=FORMATS)


# --- excluded -------------------------------------------------------------------------------------

CONFIGURATION = Configuration(
    place="pyproject.toml:4:7",
    used=("contract", "command"),
    overruled=("steps",),
    command=("torchrun", "train.py"),
)


@pytest.fixture
def excluding(full: Report) -> Report:
    """Return the full report with its first clause excluded by a configuration."""
    excluded = Excluded(
        invariant=full.contract.invariants[0],
        reason="copies are averaged once a day",
        until=datetime.date(2027, 1, 31),
        place="pyproject.toml:9:3",
    )
    entries = tuple(one for one in full.entries if one.invariant.id != excluded.invariant.id)
    return replace(full, entries=entries, excluded=(excluded,), configuration=CONFIGURATION)


@each_format
def test_an_excluded_clause(excluding: Report, render: Callable[[Report], str]) -> None:
    """Each is shown on one line, with the values that came from the configuration."""
    text = render(excluding)
    why = "until 2027-01-31: copies are averaged once a day (pyproject.toml:9:3)"
    (line,) = [line for line in text.splitlines() if why in line]
    assert "F-DP-001" in line
    assert (
        "contract, command from pyproject.toml:4:7; command torchrun train.py; replaced by the "
        "command line: steps"
    ) in text


def test_an_excluded_clause_is_no_result(excluding: Report) -> None:
    """Programs find it in its own place, and the configuration in parts."""
    record = json_record(excluding)
    assert record["configuration"] == {
        "place": "pyproject.toml:4:7",
        "used": ["contract", "command"],
        "overruled": ["steps"],
        "command": ["torchrun", "train.py"],
    }
    (one,) = record["excluded"]
    assert (one["id"], one["until"]) == ("F-DP-001", "2027-01-31")
    assert one["reason"] == "copies are averaged once a day"
    assert one["place"] == "pyproject.toml:9:3"
    assert "F-DP-001" not in [one["ruleId"] for one in sarif_run(excluding)["results"]]
    (suite,) = ElementTree.fromstring(junit.render(excluding, allow_inconclusive=False))
    assert (suite.get("skipped"), len(suite.findall("testcase/skipped"))) == ("1", 1)


def test_a_gate_that_demands_an_excluded_clause_is_undecided(excluding: Report) -> None:
    """It neither passes nor fails."""
    held = [one for one in excluding.entries if one.verdict is Verdict.HELD]
    report = replace(excluding, entries=tuple(held))
    assert report.gate_passed is None
    assert report.exit_code(allow_inconclusive=False) == 0
    assert "F-DP-001 (excluded)" in _terminal(report)


# --- not applying ---------------------------------------------------------------------------------

REASON = "every scenario is with leave, which ddp_canonical can't do"
ALONE = "it compares steps that all workers take together"


@pytest.fixture
def leaving_out(full: Report) -> Report:
    """Return the full report, whose last and first clause don't apply to the system."""
    applied, *_, last = full.contract.invariants
    left_out = (
        NotApplying(invariant=last, reason=REASON),
        NotApplying(invariant=applied, reason=ALONE),
    )
    return replace(full, entries=full.entries[1:], not_applying=left_out)


@each_format
def test_clauses_that_do_not_apply(leaving_out: Report, render: Callable[[Report], str]) -> None:
    """Each id is shown with its own reason, and the notes are still shown."""
    text = render(leaving_out)
    lines = [line for line in text.splitlines() if REASON in line]
    assert lines
    assert all("F-DP-006" in line and "F-DP-001" not in line for line in lines)
    assert any("F-DP-001" in line for line in text.splitlines() if ALONE in line)


def test_programs_find_the_clauses_that_do_not_apply(leaving_out: Report) -> None:
    """In SARIF they are notes."""
    assert "not_applying: F-DP-006 F-DP-001" in _junit(leaving_out).splitlines()
    record = json_record(leaving_out)
    assert record["not_applying"] == ["F-DP-006", "F-DP-001"]
    assert record["why_not_applying"] == {"F-DP-006": REASON, "F-DP-001": ALONE}
    told = sarif_run(leaving_out)["invocations"][0]["toolExecutionNotifications"]
    assert {one["level"] for one in told} == {"note"}


def test_clauses_of_one_reason_stand_together(full: Report) -> None:
    """There is one line for each reason."""
    clauses = full.contract.invariants[:2]
    left_out = tuple(NotApplying(invariant=clause, reason=ALONE) for clause in clauses)
    (line,) = replace(full, not_applying=left_out).left_out
    assert line.endswith(f"F-DP-002 (Sharding covers every sample exactly once): {ALONE}")
    assert full.left_out == ()


def test_notes_of_what_held_are_told(full: Report) -> None:
    """Formats without lines for clauses that held show their notes, too."""
    (note,) = sarif_run(full)["invocations"][0]["toolExecutionNotifications"]
    assert note["associatedRule"] == {"id": "F-DP-004", "index": 2}
    for text in (note["message"]["text"], FORMATS["github"](full)):
        assert "note F-DP-004: software adapter llvmpipe" in text


def test_a_gate_does_not_demand_what_was_seen_not_to_apply(full: Report) -> None:
    """It passes over the others, and says so. What only somebody declares leaves it undecided."""
    clauses = tuple(entry.invariant for entry in full.entries)
    first = clauses[0]
    finding = Finding(invariant="", verdict=Verdict.HELD, compared=1)
    held = tuple(replace(entry, finding=finding) for entry in full.entries[1:])
    assert full.contract.gate is not None
    gate = replace(full.contract.gate, checks=tuple(clause.id for clause in clauses))
    contract = replace(full.contract, gate=gate, invariants=clauses)
    seen = NotApplying(invariant=first, reason=REASON, seen=True)
    known = replace(full, contract=contract, entries=held, not_applying=(seen,))
    assert known.gate_passed
    assert known.gate_scope == f"over {len(held)} clauses ({first.id} not applied)"
    assert known.exit_code(allow_inconclusive=False) == EXIT_HELD
    declared = replace(known, not_applying=(replace(seen, seen=False),))
    assert declared.gate_passed is None


# --- bound by a file of bindings ------------------------------------------------------------------

TOLD = "the test is bound to coverage by my.bindings.yaml:7: both count samples"


def bound(report: Report, verdict: Verdict) -> Report:
    (entry, *_) = (one for one in report.entries if one.verdict is verdict)
    place = Position("my.bindings.yaml", 7, 3)
    binding = Binding(kind="test", item="FT-9", position=place, reason="both count samples")
    clause = replace(entry.invariant, check="coverage", binding=binding)
    entries = (replace(one, invariant=clause) if one is entry else one for one in report.entries)
    return replace(report, entries=tuple(entries), bindings_given=("my bindings.yaml",))


@pytest.mark.parametrize("verdict", list(Verdict))
@each_format
def test_a_binding(full: Report, render: Callable[[Report], str], verdict: Verdict) -> None:
    """Statement, check, place and reason are shown for every verdict."""
    assert TOLD not in render(full)
    assert TOLD in render(bound(full, verdict))


def test_the_json_report_has_a_binding_in_parts(full: Report) -> None:
    """Programs need not parse the sentence."""
    record = json_record(bound(full, Verdict.HELD))
    (found,) = [one["binding"] for one in record["results"] if one["binding"]]
    assert found == {
        "kind": "test",
        "item": "FT-9",
        "file": "my.bindings.yaml",
        "line": 7,
        "reason": "both count samples",
        "not_tried": "",
        "systems": [],
    }


def test_a_replay_is_of_the_same_bindings(full: Report) -> None:
    """The replay command names the files of bindings that were given."""
    report = bound(full, Verdict.HELD)
    commands = [report.replay_command(one) for one in report.entries]
    assert [one for one in commands if one and "--bind 'my bindings.yaml' --replay" in one]


# --- accepted -------------------------------------------------------------------------------------

WHY = "the loss is clamped upstream (pyproject.toml:9:3)"


@pytest.fixture
def accepting(full: Report) -> Report:
    """Return the full report, whose only falsification is accepted."""
    return replace(full, entries=tuple(replace(entry, accepted=WHY) for entry in full.entries))


def test_only_falsifications_are_accepted(full: Report, accepting: Report) -> None:
    """The exit code is that of the other clauses; the gate does not pass."""
    assert full.verdict is Verdict.FALSIFIED
    assert accepting.verdict is Verdict.INCONCLUSIVE
    assert accepting.exit_code(allow_inconclusive=False) == EXIT_INCONCLUSIVE
    known = tuple(one for one in accepting.entries if one.verdict is not Verdict.INCONCLUSIVE)
    assert replace(accepting, entries=known).exit_code(allow_inconclusive=False) == EXIT_HELD
    assert accepting.counts == full.counts
    assert not accepting.gate_passed


def test_advice_is_named_as_such(accepting: Report) -> None:
    """A break that only a contract which nobody named forbids is shown, and not counted.

    The screen is for what is wrong: beside that only -v has the rest.
    """
    advising = tuple(replace(e, advice=e.is_accepted) for e in accepting.entries)
    lines = printed(replace(accepting, entries=advising))
    (advice,) = [entry for entry in advising if entry.is_accepted]
    told = f"F-DP-005 ADVICE: {advice.finding.reason[:20]}"
    assert any(line.startswith(told) for line in lines)
    assert any("2 held, 1 advice: " in line for line in lines)
    for entries, words in ((advising, "1 advice"), (accepting.entries, "1 falsified and accepted")):
        told_last = ending([replace(accepting, entries=entries)], allow_inconclusive=True)
        assert str(told_last).startswith(f"exit 0: 2 held, {words}, 1 inconclusive and allowed")
    broken = replace(
        advice, accepted="", advice=False, invariant=replace(advice.invariant, id="F-DP-009")
    )
    report = replace(accepting, entries=(advice, broken))
    lines = printed(report)
    assert "advice: F-DP-005 (-v says why)" in lines
    assert not any(line.startswith("F-DP-005 ADVICE") for line in lines)
    assert any(line.startswith(told) for line in printed(report, verbose=True))


def test_an_accepted_falsification(accepting: Report) -> None:
    """The terminal says that it is accepted, and why; machines get no failure of it."""
    lines = printed(accepting)
    assert f"  accepted    {WHY}" in lines
    counts = "1 falsified, 1 inconclusive, 2 held (F-DP-005 accepted): "
    assert any(line.startswith(counts) for line in lines)
    assert any(line.startswith("F-DP-002 INCONCLUSIVE: ") for line in lines), "it is the exit's"
    told = {one["id"]: one["accepted"] for one in json_record(accepting)["results"]}
    assert {name: why for name, why in told.items() if why} == {"F-DP-005": WHY}
    (suite,) = ElementTree.fromstring(junit.render(accepting, allow_inconclusive=False))
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert "error" not in [one["level"] for one in sarif_run(accepting)["results"]]
    lines = [*github.annotate(accepting, root=Path.cwd(), allow_inconclusive=False)]
    assert not any(line.startswith("::error") for line in lines)
    assert WHY in html.render(accepting)
