"""The whole matrix: every mutant dies where it was planted, every benign variant is left alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from entrenar_py import kill_matrix, mutants
from entrenar_py.errors import UsageError
from entrenar_py.kill_matrix import NOT_EXPRESSIBLE, Row
from entrenar_py.mutants import Variant
from entrenar_py.scenario import Scenario
from entrenar_py.verdict import Counterexample, Finding, Verdict, inconclusive

PAGE = Path(__file__).parents[1] / "docs" / "kill-matrix.md"
SCENARIO = Scenario(system="reference", workload="linear", world_size=2, seed=0)
MUTANT = Variant(
    name="planted",
    summary="a bug",
    plants={},
    scenario=SCENARIO,
    source="somewhere #1",
    invariants=("F-DP-001",),
    place={"step": 1, "rank": 0},
)
BENIGN = Variant(
    name="harmless", summary="no bug", plants={}, scenario=SCENARIO, tried=("F-DP-001",)
)


def falsified(step: int | None = None, rank: int | None = None) -> Finding:
    """A finding whose counterexample lies there."""
    found = Counterexample(message="broken", step=step, rank=rank)
    return Finding(
        invariant="F-DP-001",
        verdict=Verdict.FALSIFIED,
        compared=1,
        reason="broken",
        counterexample=found,
    )


HELD = Finding(invariant="F-DP-001", verdict=Verdict.HELD, compared=3)
UNKNOWN = inconclusive("F-DP-001", "the run crashed")


def row(variant: Variant, finding: Finding) -> Row:
    """`variant` as F-DP-001 judged it."""
    return Row(variant=variant, invariant="F-DP-001", finding=finding)


@pytest.fixture(scope="module")
def matrix() -> list[Row]:
    """Every variant against every clause it names, run once."""
    return kill_matrix.run(list(mutants.catalogue().values()), kill_matrix.invariants())


def printed(rows: list[Row]) -> str:
    """The table on a wide terminal without colour."""
    console = Console(file=io.StringIO(), width=200)
    console.print(kill_matrix.table(rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_mutant_is_killed_for_the_right_reason(matrix: list[Row]) -> None:
    """Each clause a mutant names is falsified, at the planted place."""
    planted = [row for row in matrix if not row.variant.benign]
    assert len({row.variant.name for row in planted}) >= 50
    wrong = [(row.variant.name, row.invariant, row.finding) for row in planted if not row.right]
    assert wrong == []


def test_every_benign_variant_is_silent(matrix: list[Row]) -> None:
    """Each clause that a benign variant was tried on held, with something compared."""
    harmless = [row for row in matrix if row.variant.benign]
    assert len({row.variant.name for row in harmless}) >= 12
    assert [(r.variant.name, r.invariant, r.finding) for r in harmless if not r.silent] == []
    assert all(row.finding.compared > 0 for row in harmless)


def test_every_clause_kills(matrix: list[Row]) -> None:
    """There is no clause of the shipped contracts that has never been seen to fail."""
    assert {row.invariant for row in matrix if row.killed} == set(kill_matrix.invariants())


def test_the_page_is_current(matrix: list[Row]) -> None:
    """docs/kill-matrix.md is what the matrix says today."""
    assert PAGE.read_text(encoding="utf-8") == kill_matrix.markdown(matrix)


def test_a_mutant_is_killed_at_the_planted_place_only() -> None:
    """Another place is the wrong reason; a crash or a held clause is survival."""
    right = row(MUTANT, falsified(step=1, rank=0))
    elsewhere = row(MUTANT, falsified(step=1, rank=1))
    assert (right.killed, right.place_right, right.right) == (True, True, True)
    assert (elsewhere.killed, elsewhere.place_right, elsewhere.right) == (True, False, False)
    for finding in (HELD, UNKNOWN):
        survivor = row(MUTANT, finding)
        assert (survivor.killed, survivor.place_right, survivor.right) == (False, False, False)


def test_a_benign_variant_must_hold() -> None:
    """A run that crashed shows nothing, and so is not silence."""
    assert row(BENIGN, HELD).right
    assert not row(BENIGN, UNKNOWN).right
    assert not row(BENIGN, falsified(step=0)).right


def test_all_right_needs_rows() -> None:
    """Nothing tried is nothing shown."""
    assert kill_matrix.all_right([row(BENIGN, HELD), row(MUTANT, falsified(step=1, rank=0))])
    assert not kill_matrix.all_right([row(BENIGN, HELD), row(MUTANT, HELD)])
    assert not kill_matrix.all_right([])


def test_a_clause_that_no_contract_has() -> None:
    """The message names the variant and what the contracts have."""
    with pytest.raises(UsageError, match="variant planted: clause 'F-DP-001' is not in the"):
        kill_matrix.run([MUTANT], {})


def test_rows_are_told_as_they_come() -> None:
    """`on_row` hears of each row, in order; an unplanted bug survives."""
    heard: list[Row] = []
    variant = mutants.catalogue()["more-ranks-than-samples"]
    rows = kill_matrix.run([variant], kill_matrix.invariants(), heard.append)
    assert rows == heard
    assert [row.invariant for row in rows] == list(variant.tried)


def test_what_went_wrong_is_marked() -> None:
    """Table and page show survivors, alarms and wrong places."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, falsified(step=2)),
        row(MUTANT, HELD),
        row(BENIGN, falsified(step=0)),
    ]
    text = printed(rows)
    for words in ("somewhere #1", "step 1, rank 0", "right", "wrong", "SURVIVED", "FALSIFIED"):
        assert words in text
    page = kill_matrix.markdown(rows)
    assert "0 of 1 mutants killed for the right reason, 0 of 1 benign variants silent." in page
    assert "| F-DP-001 | killed | step 1, rank 0 | right |" in page
    assert "| F-DP-001 | SURVIVED | step 1, rank 0 | **wrong** |" in page
    assert "| `harmless` | no bug | F-DP-001 | **F-DP-001** |" in page
    assert all(names in page for names in NOT_EXPRESSIBLE.values())


@pytest.mark.parametrize(
    ("variant", "finding", "code", "words"),
    [
        (MUTANT, falsified(step=1, rank=0), 0, "1 of 1 mutants killed for the right reason"),
        (MUTANT, falsified(step=2), 1, "points at step 2, planted was step 1, rank 0"),
        (MUTANT, falsified(), 1, "points at broken, planted was step 1, rank 0"),
        (MUTANT, HELD, 1, "planted, F-DP-001: no check saw it"),
        (MUTANT, UNKNOWN, 1, "planted, F-DP-001: the run crashed"),
        (BENIGN, HELD, 0, "1 of 1 benign variants silent"),
        (BENIGN, falsified(step=0), 1, "harmless, F-DP-001: broken"),
    ],
)
def test_show(
    variant: Variant,
    finding: Finding,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exit code is 0 only if all is right; what is not is explained."""
    monkeypatch.setattr(mutants, "catalogue", lambda: {variant.name: variant})
    monkeypatch.setattr("entrenar_py.runner.Runner.try_scenario", lambda *_: finding)
    console = Console(file=io.StringIO(), width=120)
    assert kill_matrix.show(console) == code
    assert isinstance(console.file, io.StringIO)
    assert words in console.file.getvalue()
