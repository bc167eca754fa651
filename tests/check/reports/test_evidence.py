"""The labelled evidence of an entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample


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
