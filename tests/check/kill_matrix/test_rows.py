"""The conditions under which a row is right."""

from __future__ import annotations

from entrenar_py.check import kill_matrix
from tests.check.kill_matrix.rows import BENIGN, HELD, MUTANT, UNKNOWN, falsified, row


def test_a_mutant_is_killed_at_the_planted_place_only() -> None:
    """Another place is a wrong reason; a crash or a held clause means that the mutant survived."""
    right = row(MUTANT, falsified(step=1, rank=0))
    elsewhere = row(MUTANT, falsified(step=1, rank=1))
    assert (right.killed, right.place_right, right.right) == (True, True, True)
    assert (elsewhere.killed, elsewhere.place_right, elsewhere.right) == (True, False, False)
    for finding in (HELD, UNKNOWN):
        survivor = row(MUTANT, finding)
        assert (survivor.killed, survivor.place_right, survivor.right) == (False, False, False)
        assert survivor.outcome == "SURVIVED"


def test_a_benign_variant_must_hold_where_it_is_tried() -> None:
    """A crashed run is not a held clause, so the row is wrong."""
    assert row(BENIGN, HELD).right
    assert not row(BENIGN, UNKNOWN).right
    assert not row(BENIGN, falsified(step=0)).right
    assert row(BENIGN, UNKNOWN).outcome == "INCONCLUSIVE"


def test_a_benign_variant_may_not_alarm_elsewhere() -> None:
    """Other clauses may be inconclusive on a benign variant, but not falsified."""
    assert row(BENIGN, HELD, invariant="F-DP-006").right
    assert not row(BENIGN, falsified(step=0), invariant="F-DP-006").right
    unknown = row(BENIGN, UNKNOWN, invariant="F-DP-006")
    assert unknown.right
    assert not unknown.silent
    assert unknown.outcome == "inconclusive"


def test_all_right_needs_rows() -> None:
    """Without rows the matrix is not right."""
    killed = row(MUTANT, falsified(step=1, rank=0))
    assert kill_matrix.all_right([row(BENIGN, HELD), killed])
    assert not kill_matrix.all_right([row(BENIGN, HELD), row(MUTANT, HELD)])
    assert not kill_matrix.all_right([])


def test_one_wrong_row_spoils_its_variant() -> None:
    """The summary counts variants, not rows."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, HELD, invariant="F-DP-005"),
        row(BENIGN, HELD),
        row(BENIGN, UNKNOWN, invariant="F-DP-006"),
    ]
    assert kill_matrix.summary(rows) == (
        "0 of 1 mutants killed for the right reason, 1 of 1 benign variants silent"
    )
