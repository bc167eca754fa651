"""The kill matrix as tables: a row for each mutant and clause, and one for each benign variant."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from entrenar_py.check.kill_matrix import rows as matrix
from entrenar_py.check.kill_matrix.rows import Row


def mutants(rows: Sequence[Row]) -> Table:
    """Return the table of mutants: which clause killed each, and the place that it found."""
    shown = _table(
        "mutant", "source", "clause", "verdict", "found at", "place", long=("source", "found at")
    )
    for row in matrix.of_mutants(rows):
        broken = row.finding.counterexample
        shown.add_row(
            row.variant.name,
            row.variant.source,
            row.invariant,
            row.outcome,
            "" if broken is None else broken.place(),
            "right" if row.place_right else "wrong",
            style=None if row.right else "bold red",
        )
    return shown


def benign(rows: Sequence[Row]) -> Table:
    """Return the table of benign variants: clauses that held, were inconclusive, or were wrong."""
    shown = _table(
        "benign variant", "held", "inconclusive", "wrong", long=("inconclusive", "wrong")
    )
    for name, tried in matrix.of_benign(rows).items():
        wrong = [row for row in tried if not row.right]
        shown.add_row(
            name,
            f"{sum(row.silent for row in tried)} of {len(tried)}",
            ", ".join(row.invariant for row in tried if row.right and not row.silent),
            ", ".join(f"{row.invariant} {row.outcome}" for row in wrong),
            style="bold red" if wrong else None,
        )
    return shown


def _table(*titles: str, long: Sequence[str]) -> Table:
    """Return an empty table. Its `long` columns wrap; the others stay on one line."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        shown.add_column(title, no_wrap=title not in long, overflow="fold")
    return shown
