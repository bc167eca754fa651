"""Clauses from a file of bindings: every format shows the statement, check, place and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from entrenar_py.check.contract import Binding, Position
from entrenar_py.check.reports import github, html, json_format, junit, sarif
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.verdict import Verdict
from tests.check.reports.conftest import printed

PLACE = Position("my.bindings.yaml", 7, 3)
TOLD = "the test is bound to coverage by my.bindings.yaml:7: both count samples"


def _bound(report: Report, verdict: Verdict) -> Report:
    """Return `report` with its first entry of `verdict` bound."""
    place = next(n for n, one in enumerate(report.entries) if one.verdict is verdict)
    entry = report.entries[place]
    binding = Binding(kind="test", item="FT-9", position=PLACE, reason="both count samples")
    clause = replace(entry.invariant, check="coverage", binding=binding)
    entries = [*report.entries]
    entries[place] = replace(entry, invariant=clause)
    return replace(report, entries=tuple(entries), bindings_given=("my bindings.yaml",))


def _terminal(report: Report) -> str:
    return "\n".join(printed(report, verbose=True))


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize(
    "render",
    [
        _terminal,
        lambda report: junit.render(report, allow_inconclusive=False),
        lambda report: json.dumps(
            sarif.dump(report, root=Path.cwd(), allow_inconclusive=False), ensure_ascii=False
        ),
        lambda report: unescape(github.summary(report, allow_inconclusive=False)).replace("\\", ""),
        lambda report: unescape(html.render(report)),
    ],
)
def test_every_format_says_to_what_and_why(
    full: Report, render: Callable[[Report], str], verdict: Verdict
) -> None:
    """The binding is shown for every verdict."""
    assert TOLD not in render(full)
    assert TOLD in render(_bound(full, verdict))


def test_the_json_report_has_it_in_parts(full: Report) -> None:
    """Programs need not parse the sentence."""
    record = json_format.dump(_bound(full, Verdict.HELD), allow_inconclusive=False)
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
    bound = _bound(full, Verdict.HELD)
    commands = [bound.replay_command(one) for one in bound.entries]
    assert [one for one in commands if one and "--bind 'my bindings.yaml' --replay" in one]
