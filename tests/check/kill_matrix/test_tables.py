"""The matrix on a terminal and in a pipe."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from entrenar_py.check.kill_matrix import Row, tables
from entrenar_py.check.reports import terminal
from tests.check.kill_matrix.rows import BENIGN, HELD, MUTANT, UNKNOWN, falsified, row


def printed(table: Table, *, tty: bool) -> list[str]:
    """Return the lines on a terminal of 100 columns or in a pipe, without colour."""
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=tty, color_system=None)
    terminal.print_table(console, table)
    return file.getvalue().splitlines()


def test_a_terminal_of_100_columns_shows_all(matrix: list[Row]) -> None:
    """No line is wider than the terminal, and no name or clause is broken."""
    for table in (tables.mutants(matrix), tables.benign(matrix)):
        lines = printed(table, tty=True)
        assert max(map(len, lines)) <= 100
    names = {row.variant.name for row in matrix}
    lines = printed(tables.mutants(matrix), tty=True) + printed(tables.benign(matrix), tty=True)
    assert names <= {line.split()[0] for line in lines if line.strip()}


def test_in_a_pipe_a_row_is_a_line(matrix: list[Row]) -> None:
    """Name, source and place of every mutant are complete on its line."""
    lines = printed(tables.mutants(matrix), tty=False)
    for one in matrix:
        found = one.finding.counterexample
        if not one.variant.benign and found is not None:
            whole = (one.variant.name, one.variant.source, one.invariant, found.place())
            assert any(all(text in line for text in whole) for line in lines), one.variant.name


def test_a_benign_variant_is_one_row(matrix: list[Row]) -> None:
    """A benign variant has one row, however many clauses judged it."""
    names = [row.variant.name for row in matrix if row.variant.benign]
    lines = printed(tables.benign(matrix), tty=False)
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names] == [
        *dict.fromkeys(names)
    ]


def test_what_went_wrong_is_marked() -> None:
    """Survivors, wrong places and false alarms are marked by words, not by colour alone."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, falsified(step=2)),
        row(MUTANT, HELD),
    ]
    text = "\n".join(printed(tables.mutants(rows), tty=True))
    for words in ("somewhere #1", "step 1, rank 0", "right", "wrong", "SURVIVED"):
        assert words in text
    judged = [
        row(BENIGN, falsified(step=0)),
        row(BENIGN, UNKNOWN, invariant="F-DP-006"),
        row(BENIGN, HELD, invariant="F-DP-002"),
    ]
    (line,) = [line for line in printed(tables.benign(judged), tty=True) if "harmless" in line]
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells == ["harmless", "1 of 3", "F-DP-006", "F-DP-001 FALSIFIED"]
