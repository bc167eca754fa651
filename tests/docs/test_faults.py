"""docs/faults.md: every kind of fault at every message, and every run on the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py import systems

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """docs/fault_table.py."""
    spec = importlib.util.spec_from_file_location("fault_table", DOCS / "fault_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_case(table: ModuleType) -> None:
    """Of star, mesh and ring; no kind or place was left out since the page was made, and no run
    ended otherwise.
    """
    page = (DOCS / "faults.md").read_text("utf-8")
    parts = page.split("\n## ")[1:]
    for part, system in zip(parts, (table.STAR, table.MESH, table.RING), strict=True):
        cases = list(table.cases(system))
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]
        expected = [(table.what(case), table.place(case)) for case in cases]
        assert [(row[0], row[1]) for row in rows] == expected
        assert not any("LET IN" in row[2] for row in rows)
        right = "near" if system is table.RING else "the same"
        assert {(row[3], row[4]) for row in rows} == {("completed", right)}


def test_a_row_is_really_run(table: ModuleType) -> None:
    """Real processes: what the row says of the weights is compared with the undisturbed run's."""
    for scenario in (table.STAR, table.MESH, table.RING):
        cases = table.cases(scenario)
        cut = next(case for case in cases if (case.kind, case.at) == ("cut", "Computed"))
        another = scenario.with_(system="reference", options={}, seed=1)
        other = table.row(scenario, cut, systems.run(another))
        assert other.endswith("| completed | DIFFERENT |")
        assert "left in step 2" in other
