"""Clauses that a configuration excludes: every format shows them with the reason and last day."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from entrenar_py.check.reports import github, html, json_format, junit, sarif
from entrenar_py.check.reports.report import Configuration, Excluded, Report
from entrenar_py.shared.verdict import Verdict
from tests.check.reports.conftest import printed

SCHEMA = Path(__file__).parents[3] / "docs" / "report-schema-v1.json"
CONFIGURATION = Configuration(
    place="pyproject.toml:4:7",
    used=("contract", "command"),
    overruled=("steps",),
    command=("torchrun", "train.py"),
)
TOLD = (
    "contract, command from pyproject.toml:4:7; command torchrun train.py; replaced by the "
    "command line: steps"
)


@pytest.fixture
def excluding(full: Report) -> Report:
    """Return the full report with its first clause excluded."""
    excluded = Excluded(
        invariant=full.contract.invariants[0],
        reason="copies are averaged once a day",
        until=datetime.date(2027, 1, 31),
        place="pyproject.toml:9:3",
    )
    entries = tuple(one for one in full.entries if one.invariant.id != excluded.invariant.id)
    return replace(full, entries=entries, excluded=(excluded,), configuration=CONFIGURATION)


def _terminal(report: Report) -> str:
    return "\n".join(printed(report, verbose=True))


def _junit(report: Report) -> str:
    root = ElementTree.fromstring(junit.render(report, allow_inconclusive=False))
    assert [suite.get("skipped") for suite in root] == ["1"]
    (case,) = [one for one in root.iter("testcase") if one.find("skipped") is not None]
    skipped = case.find("skipped")
    assert skipped is not None
    told = {one.get("name"): one.get("value") for one in root.iter("property")}
    return f"{case.get('name')} {skipped.get('message')}\n{told['configuration']}"


def _sarif(report: Report) -> str:
    log = sarif.dump(report, root=Path.cwd(), allow_inconclusive=False)
    (run,) = log["runs"]
    assert "F-DP-001" not in [one["ruleId"] for one in run["results"]]
    rules = run["tool"]["driver"]["rules"]
    told = run["invocations"][0]["toolExecutionNotifications"]
    lines = [
        f"{rules[one['associatedRule']['index']]['id']}: {one['message']['text']}" for one in told
    ]
    return "\n".join([*lines, run["properties"]["configuration"]])


def _json(report: Report) -> str:
    record = json_format.dump(report, allow_inconclusive=False)
    jsonschema.validate(record, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert record["configuration"] == {
        "place": "pyproject.toml:4:7",
        "used": ["contract", "command"],
        "overruled": ["steps"],
        "command": ["torchrun", "train.py"],
    }
    (one,) = record["excluded"]
    line = f"{one['id']} until {one['until']}: {one['reason']} ({one['place']})"
    return f"{line}\n{TOLD}"


@pytest.mark.parametrize(
    "render",
    [
        *(_terminal, _junit, _sarif, _json),
        lambda report: unescape(github.summary(report, allow_inconclusive=False)).replace("\\", ""),
        lambda report: unescape(html.render(report)),
    ],
)
def test_every_format_says_which_and_why(
    excluding: Report, render: Callable[[Report], str]
) -> None:
    """Each is shown on one line, with the values that came from the configuration."""
    text = render(excluding)
    why = "until 2027-01-31: copies are averaged once a day (pyproject.toml:9:3)"
    (line,) = [line for line in text.splitlines() if why in line]
    assert "F-DP-001" in line
    assert TOLD in text


def test_a_gate_that_demands_it_is_undecided(excluding: Report) -> None:
    """A gate that demands an excluded clause neither passes nor fails."""
    held = [one for one in excluding.entries if one.verdict is Verdict.HELD]
    report = replace(excluding, entries=tuple(held))
    assert report.gate_passed is None
    assert report.exit_code(allow_inconclusive=False) == 0
    assert "F-DP-001 (excluded)" in _terminal(report)
