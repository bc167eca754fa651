"""Falsifications that a configuration accepts: every format shows them, and none counts them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from entrenar_py.check.reports import github, html, json_format, junit, sarif
from entrenar_py.check.reports.report import EXIT_HELD, EXIT_INCONCLUSIVE, Report
from entrenar_py.shared.verdict import Verdict
from tests.check.reports.conftest import printed

SCHEMA = Path(__file__).parents[3] / "docs" / "report-schema-v1.json"
WHY = "the loss is clamped upstream (pyproject.toml:9:3)"


@pytest.fixture
def accepting(full: Report) -> Report:
    """Return the full report, whose only falsification is accepted."""
    entries = tuple(replace(entry, accepted=WHY) for entry in full.entries)
    return replace(full, entries=entries)


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
    """A break that only a contract which nobody named forbids is shown, and not counted."""
    advising = tuple(replace(e, advice=e.is_accepted) for e in accepting.entries)
    lines = printed(replace(accepting, entries=advising))
    (reason,) = [entry.finding.reason for entry in advising if entry.is_accepted]
    assert any(line.startswith(f"F-DP-005 ADVICE: {reason[:20]}") for line in lines)
    assert any("2 held, 1 advice: " in line for line in lines)


def test_advice_beside_what_is_broken_is_only_named(accepting: Report) -> None:
    """The screen is for what is wrong; -v has the rest."""
    (advice,) = [entry for entry in accepting.entries if entry.is_accepted]
    broken = replace(advice, accepted="", invariant=replace(advice.invariant, id="F-DP-009"))
    report = replace(accepting, entries=(replace(advice, advice=True), broken))
    lines = printed(report)
    assert "advice: F-DP-005 (-v says why)" in lines
    assert not any(line.startswith("F-DP-005 ADVICE") for line in lines)
    assert any(line.startswith("F-DP-005 ADVICE") for line in printed(report, verbose=True))


def test_every_format_shows_it(accepting: Report, tmp_path: Path) -> None:
    """The terminal says that it is accepted, and why; machines get no failure of it."""
    lines = printed(accepting)
    assert f"  accepted    {WHY}" in lines
    assert any(
        line.startswith("1 falsified, 1 inconclusive, 2 held (F-DP-005 accepted): ")
        for line in lines
    )

    assert any(line.startswith("F-DP-002 INCONCLUSIVE: ") for line in lines), "it is the exit's"

    record = json_format.dump(accepting, allow_inconclusive=False)
    jsonschema.validate(json.loads(json.dumps(record)), json.loads(SCHEMA.read_text()))
    told = {one["id"]: one["accepted"] for one in record["results"]}
    assert {name: why for name, why in told.items() if why} == {"F-DP-005": WHY}

    (suite,) = ElementTree.fromstring(junit.render(accepting, allow_inconclusive=False))
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    levels = [
        one["level"]
        for one in sarif.dump(accepting, root=tmp_path, allow_inconclusive=False)["runs"][0][
            "results"
        ]
    ]
    assert "error" not in levels
    lines = [*github.annotate(accepting, root=tmp_path, allow_inconclusive=False)]
    assert not any(line.startswith("::error") for line in lines)
    assert WHY in html.render(accepting)
