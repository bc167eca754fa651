"""The labelled evidence of an entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.contract import Position
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Report
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Verdict


def test_long_text_is_cut_with_a_count() -> None:
    """A long message becomes one line that says how much was cut."""
    line = evidence.one_line("x\n" * 1000)
    assert line.startswith("x x x")
    assert line.endswith("... (799 more characters: --json FILE writes all)")
    assert evidence.one_line("short \n text") == "short text"


def test_scenario_shows_what_is_not_usual() -> None:
    """Required fields are shown, and fields that differ from their defaults."""
    usual = Scenario(system="reference", workload="linear", world_size=1, seed=0)
    required = "system=reference, workload=linear, world_size=1, seed=0"
    assert evidence.describe_scenario(usual.to_dict()) == required
    other = usual.with_(num_steps=9, clip_norm=1.5, options={"k": [1, None]})
    shown = evidence.describe_scenario(other.to_dict())
    assert shown == f"{required}, num_steps=9, clip_norm=1.5, options=(k=[1, null])"


def test_scenario_of_another_release_is_still_shown() -> None:
    """Missing fields are left out and unknown ones are shown."""
    assert evidence.describe_scenario({"seed": 3, "rings": 2}) == "seed=3, rings=2"


def test_one_reason_of_many_clauses_is_told_once(full: Report) -> None:
    """Inconclusive clauses that compared nothing are grouped by their reason."""
    one = full.entries[1]  # inconclusive, after runs
    assert evidence.alike([one]) == {}
    assert evidence.alike([one, one, full.entries[3]]) == {one.finding.reason: [one, one]}
    compared = replace(one, finding=replace(one.finding, compared=3))
    assert evidence.alike([one, compared]) == {}


def test_reasons_that_refer_to_a_clause_follow_it(full: Report) -> None:
    """Clauses with one reason, from whatever runs, are told once, with those that refer to it."""
    (one,) = (entry for entry in full.entries if entry.verdict is Verdict.INCONCLUSIVE)

    def told(name: str, reason: str) -> Entry:
        finding = replace(one.finding, reason=reason, compared=3)
        return replace(one, invariant=replace(one.invariant, id=name), finding=finding)

    unknown = told("F-DP-002", "the samples are unknown: call obs.samples(ids) [2-workers]")
    same = told("F-TI-009", "the samples are unknown: call obs.samples(ids) [1-worker]")
    after = told("F-DP-005", "step 0 has different rows: see F-DP-002 [2-workers (with 1-worker)]")
    alone = told("F-TI-001", "step 0 has different rows: see F-DP-007")
    assert evidence.alike([after, unknown, alone, same], whole=False) == {
        "the samples are unknown: call obs.samples(ids)": [unknown, same, after],
        "step 0 has different rows: see F-DP-007": [alone],
    }


def test_the_line_of_the_script(full: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """A falsified clause points to a line; on line 1 only the script is known."""
    entry = full.entries[3]
    assert evidence.script_line(full, entry) == ""
    monkeypatch.chdir("/")
    step, backward = Position("/a/train.py", 9, 1), Position("/a/train.py", 7, 1)
    at = replace(full, places={"step": step, "backward": backward})
    assert evidence.script_line(at, entry) == "a/train.py:7: the backward pass"
    assert ("script", "a/train.py:7: the backward pass") in evidence.briefly(at, entry)
    assert "script: a/train.py:7: the backward pass" in evidence.detail_lines(at, entry)
    assert evidence.briefly(at, replace(entry, accepted="known", advice=True)) == [
        ("script", "a/train.py:7: the backward pass")
    ]
    assert evidence.script_line(at, full.entries[0]) == ""
    unknown = replace(full, places={"step": Position("/a/train.py", 1, 1)})
    assert evidence.script_line(unknown, entry) == ""


def test_fields_that_do_not_apply_are_left_out(full: Report) -> None:
    """A counterexample without place and values shows only the contract's part."""
    entry = full.entries[3]
    bare = replace(entry.finding, counterexample=Counterexample(message="broke"))
    labels = [label for label, _ in evidence.describe(full, replace(entry, finding=bare))]
    assert labels == ["could mean", "could mean", "contract"]
    labels = [label for label, _ in evidence.describe(full, entry)]
    assert labels == ["at", "expected", "got", "could mean", "could mean", "contract", "scenario"]


def test_below(tmp_path: Path) -> None:
    """A file below the root gets its relative path however it was given; another one gets None."""
    assert evidence.below(str(tmp_path / "a" / ".." / "b" / "c.yaml"), tmp_path) == "b/c.yaml"
    assert evidence.below(str(tmp_path.parent / "c.yaml"), tmp_path) is None


def test_level(full: Report) -> None:
    """A falsified clause is an error; an inconclusive one a warning, or a note if allowed."""
    strict = [evidence.level(entry, allow_inconclusive=False) for entry in full.ranked]
    allowed = [evidence.level(entry, allow_inconclusive=True) for entry in full.ranked]
    assert strict == ["error", "warning", None, None]
    assert allowed == ["error", "note", None, None]
