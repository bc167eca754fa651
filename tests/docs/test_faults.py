"""docs/faults.md: every kind of fault at every message, and that all runs end on equal weights."""

from __future__ import annotations

from pathlib import Path

from docs import ending_tables
from docs import fault_table as table
from entrenar_py import systems
from entrenar_py.systems.star.processes import ProcessTransport

DOCS = Path(__file__).parents[2] / "docs"
PARTS = (DOCS / "faults.md").read_text("utf-8").split("\n## ")[1:]
TABLED = (table.STAR, table.MESH, table.RING)
NUM_SYSTEMS = len(TABLED)


def rows_of(part: str) -> list[list[str]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def test_the_page_has_every_case() -> None:
    """Each system's table has all kinds and places, and every run ended as expected."""
    for part, system in zip(PARTS, TABLED, strict=False):
        cases = list(table.cases(system))
        rows = rows_of(part)
        expected = [(table.what(case), table.place(case)) for case in cases]
        assert [(row[0], row[1]) for row in rows] == expected
        assert not any("LET IN" in row[2] for row in rows)
        right = "near" if system is table.RING else "the same"
        assert {(row[3], row[4]) for row in rows} == {("completed", right)}
    assert len(PARTS) == NUM_SYSTEMS + 2


def test_everyone_halts_and_knows_why() -> None:
    """In every system each planted value ends the run with an error that names the culprit."""
    rows = [row for row in rows_of(PARTS[NUM_SYSTEMS]) if row[0] in ending_tables.REAL]
    assert len(rows) == len(ending_tables.REAL) * len(ending_tables.POISONS)
    for row in rows:
        assert "on worker 1, step 2, shard 3" in row[2]
        assert row[3:] == ["3 of 3, within 1 s", "0, 1"]


def test_a_coordinator_s_death_changes_nothing() -> None:
    """After each death of a coordinator the run ends on the same weights."""
    rows = [row for row in rows_of(PARTS[NUM_SYSTEMS + 1]) if row[0] in ending_tables.STORIES]
    assert len(rows) == len(ending_tables.STORIES)
    assert {row[2] for row in rows} == {"the same"}


def test_a_halt_is_really_run() -> None:
    """In a real run each process reports how it ended."""
    star = ending_tables.run_with("parameter_server", "non_finite_loss", "nan")
    run = star.train()
    assert isinstance(star.transport, ProcessTransport)
    assert [(one.rank, one.status, one.reason) for one in star.transport.ends] == [
        (rank, "halted", run.end.reason) for rank in range(3)
    ]
    assert run.end.reason.startswith("non-finite loss nan on worker 1, step 2, shard 3")


def test_a_row_is_really_run() -> None:
    """With real processes the weights compare with the undisturbed run's as the row states."""
    for scenario in TABLED:
        cases = table.cases(scenario)
        cut = next(case for case in cases if (case.kind, case.at) == ("cut", "Computed"))
        another = scenario.with_(system="reference", options={}, seed=1)
        other = table.row(scenario, cut, systems.run(another))
        assert other.endswith("| completed | DIFFERENT |")
        assert "left in step 2" in other
