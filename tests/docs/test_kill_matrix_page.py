"""The matrix as a page (tests/docs/test_generate.py tests that the page in docs/ is current)."""

from __future__ import annotations

from docs import kill_matrix_page
from tests.check.test_kill_matrix import BENIGN, HELD, MUTANT, UNKNOWN, falsified, row


def test_what_went_wrong_is_marked() -> None:
    """The page marks survivors, false alarms and wrong places."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, HELD),
        row(BENIGN, falsified(step=0)),
        row(BENIGN, HELD, invariant="F-TI-001"),
        row(BENIGN, HELD, invariant="F-DP-002"),
        row(BENIGN, UNKNOWN, invariant="F-DP-006"),
    ]
    text = kill_matrix_page.page(rows)
    assert "0 of 1 mutants killed for the right reason, 0 of 1 benign variants silent." in text
    assert "| F-DP-001 | killed | step 1, rank 0 | right |" in text
    assert "| F-DP-001 | SURVIVED | step 1, rank 0 | **wrong** |" in text
    assert (
        "| `harmless` | no bug | F-DP-002, F-TI-001 | F-DP-006 | **F-DP-001 FALSIFIED** |" in text
    )


def test_where_nothing_is_wrong_the_page_says_none() -> None:
    """The page says "none" if nothing is wrong, as an empty cell could be an oversight."""
    assert "| F-DP-001 | none | none |" in kill_matrix_page.page([row(BENIGN, HELD)])


def test_bugs_in_scripts_have_a_table() -> None:
    """Bugs in scripts are listed with their source and the clause that finds them."""
    cells = ("none is divided", "`train.py`", "classic", "F-DP-005", "step 0")
    assert f"| {' | '.join(cells)} |" in kill_matrix_page.page([], [cells])
