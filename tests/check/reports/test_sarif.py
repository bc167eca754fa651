"""The SARIF log, as code scanning reads it.

The schema is too big to be kept here, and no package contains it, so the tests assert what the
specification demands of each property that is written. (A log of every kind of result was valid
against the schema, and by Microsoft's `sarif-multitool validate`, when this was written.)
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from entrenar_py.check.contract import Position
from entrenar_py.check.reports import junit, sarif
from entrenar_py.check.reports.report import Report


def run_of(report: Report, *, allow_inconclusive: bool = False) -> dict[str, Any]:
    """Return the only run in the log of `report`, with paths relative to this folder."""
    log = sarif.dump(report, root=Path.cwd(), allow_inconclusive=allow_inconclusive)
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    run: dict[str, Any] = log["runs"][0]
    return run


def test_full_report(full: Report) -> None:
    """There is a rule for each clause, and a result for each that is falsified or inconclusive."""
    run = run_of(full)
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert list(rules) == ["F-DP-001", "F-DP-002", "F-DP-004", "F-DP-005"]
    assert rules["F-DP-005"]["defaultConfiguration"] == {"level": "warning"}  # P1
    assert rules["F-DP-001"]["defaultConfiguration"] == {"level": "error"}  # P0
    inconclusive, falsified = run["results"]
    assert (falsified["ruleId"], falsified["level"]) == ("F-DP-005", "error")
    assert (inconclusive["ruleId"], inconclusive["level"]) == ("F-DP-002", "warning")
    place = falsified["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {
        "uri": "contracts/distributed-training-v1.yaml",
        "uriBaseId": "SRCROOT",
    }
    assert place["region"] == {"startLine": 70, "startColumn": 5}
    text = falsified["message"]["text"]
    assert text.startswith("F-DP-005 FALSIFIED: rank 1 holds other weights than rank 0\nat: step 3")
    assert "replay: entrenar-check --contract" in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param({"sample_ids": ()}, 41, id="a tensor"),
        pytest.param({"tensor": None}, 30, id="samples"),
        pytest.param({"scenario": {"stops": [3]}}, 52, id="a resumed run"),
    ],
)
def test_a_finding_on_a_script_is_at_its_line(
    full: Report, changes: dict[str, Any], line: int
) -> None:
    """It is at the line that is to be mended, and the clause is where the contract states it."""
    broken = full.entries[3]
    assert broken.finding.counterexample is not None
    changed = replace(broken.finding.counterexample, **changes)
    entry = replace(broken, finding=replace(broken.finding, counterexample=changed))
    script = str(Path.cwd() / "train.py")
    lines = {"samples": 30, "step": 41, "save": 52}
    places = {what: Position(script, number, 1) for what, number in lines.items()}
    report = replace(full, entries=(*full.entries[:3], entry), places=places)
    waiting, falsified = run_of(report)["results"]
    (at,) = (one["physicalLocation"] for one in falsified["locations"])
    assert at["artifactLocation"] == {"uri": "train.py", "uriBaseId": "SRCROOT"}
    assert at["region"]["startLine"] == line
    (stated,) = falsified["relatedLocations"]
    assert stated["physicalLocation"]["artifactLocation"]["uri"].startswith("contracts/")
    assert waiting["locations"][0]["physicalLocation"]["region"]["startLine"] == 30  # F-DP-002
    case = ElementTree.fromstring(junit.render(report, allow_inconclusive=False)).findall(
        "testsuite/testcase"
    )[3]
    assert (case.get("file"), case.get("line")) == (script, str(line))


@given(data=st.data(), allow_inconclusive=st.booleans())
def test_any_report(
    data: DataObject, any_report: SearchStrategy[Report], allow_inconclusive: bool
) -> None:
    """Any text gives valid strict JSON in UTF-8. The log has no errors and warnings exactly when
    the exit code is 0.
    """
    report = data.draw(any_report)
    run = run_of(report, allow_inconclusive=allow_inconclusive)
    json.dumps(run, allow_nan=False, ensure_ascii=False).encode()
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        assert rule["id"]
        texts = [rule[name]["text"] for name in ("shortDescription", "help") if name in rule]
        assert all(texts)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        region = location["physicalLocation"]["region"]
        assert region["startLine"] >= 1
        assert region["startColumn"] >= 1
        assert run["originalUriBaseIds"]["SRCROOT"]["uri"].endswith("/")
    invocation = run["invocations"][0]
    loud = any(result["level"] != "note" for result in run["results"])
    code = report.exit_code(allow_inconclusive=allow_inconclusive)
    assert invocation["exitCode"] == code
    assert (code == 0) == (invocation["executionSuccessful"] and not loud)
    told = invocation.get("toolExecutionNotifications", [])
    failed = any(one["level"] == "error" for one in told)
    assert failed == (not invocation["executionSuccessful"])
    for one in told:
        assert one["message"]["text"]
        if "associatedRule" in one:
            rule = one["associatedRule"]
            assert rules[rule["index"]]["id"] == rule["id"]


def test_fingerprints(full: Report) -> None:
    """A clause with the same verdict keeps its fingerprint, even for another counterexample."""
    broken = full.entries[3]
    again = replace(broken.finding, reason="rank 2 holds other weights", compared=7)
    other = replace(full, seed=8, entries=(*full.entries[:3], replace(broken, finding=again)))
    marks = [
        [result["partialFingerprints"][sarif.FINGERPRINT] for result in run_of(one)["results"]]
        for one in (full, other)
    ]
    assert marks[0] == marks[1]
    assert len(set(marks[0])) == 2


def test_a_contract_outside_the_checkout(full: Report, tmp_path: Path) -> None:
    """Its path is an absolute URI with all characters encoded."""
    clause = full.entries[3].invariant
    away = tmp_path / "a b#1.yaml"
    moved = replace(clause, position=replace(clause.position, file=str(away)))
    report = replace(full, entries=(replace(full.entries[3], invariant=moved),))
    (result,) = run_of(report)["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.startswith("file:///")
    assert unquote(urlparse(uri).path) == str(away)
