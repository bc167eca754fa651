"""Clauses that a configuration leaves out: excluded, ended, requested anyway, not applicable."""

from __future__ import annotations

import datetime
from collections.abc import Collection

import pytest

from entrenar_py.check.project import configuration
from entrenar_py.check.project.configuration import Acceptance, Exclusion
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import ContractError
from tests.check.clauses.traces import clause

LAST = datetime.date(2027, 1, 31)
CLAUSE, OTHER = clause("finiteness"), clause("replica_identity")
EXCLUDED = Exclusion(
    clause=CLAUSE.id, reason="not yet", until=LAST, place=Position("pyproject.toml", 9, 3)
)
NEVER = Exclusion(clause=CLAUSE.id, reason="no NaNs here", until=None, place=EXCLUDED.place)


def standing(
    found: Exclusion, today: datetime.date, asked: Collection[str] = ()
) -> configuration.Standing:
    return configuration.apply([OTHER, CLAUSE], [found], named=asked, today=today)


def test_until_its_last_day() -> None:
    """On its last day a clause is still left out, and reported with reason and place."""
    found = standing(EXCLUDED, LAST)
    assert (found.selected, found.notes, found.not_applying) == ((OTHER,), {}, ())
    (one,) = found.excluded
    assert one.named == f"F-DP-003 ({CLAUSE.name})"
    assert one.why == "until 2027-01-31: not yet (pyproject.toml:9:3)"


def test_void_on_the_next_day() -> None:
    """On the day after, the clause is tried again with a note."""
    found = standing(EXCLUDED, LAST + datetime.timedelta(days=1))
    assert (found.selected, found.excluded) == ((OTHER, CLAUSE), ())
    assert found.notes == {
        CLAUSE.id: "its exclusion ended with 2027-01-31, so it is tried again: not yet "
        "(pyproject.toml:9:3)"
    }


def test_asked_for_by_its_id() -> None:
    """A clause that the command line names is tried although it is excluded."""
    found = standing(EXCLUDED, LAST, asked=(CLAUSE.id,))
    assert found.selected == (OTHER, CLAUSE)
    assert found.notes == {CLAUSE.id: "tried as --only asks, though pyproject.toml:9:3 excludes it"}


def test_not_applicable() -> None:
    """Such an exclusion has no end, and counts as a clause that doesn't apply to the system."""
    found = standing(NEVER, datetime.date.max)
    assert (found.selected, found.excluded) == ((OTHER,), ())
    (one,) = found.not_applying
    assert one.reason == "no NaNs here (pyproject.toml:9:3)"


def test_each_names_a_clause_once() -> None:
    """A misspelt or repeated clause is refused, as it would exclude nothing unnoticed."""
    configuration.require_known([EXCLUDED], [CLAUSE.id])
    with pytest.raises(ContractError) as refusal:
        configuration.require_known([EXCLUDED, NEVER], ["F-DP-033"])
    assert refusal.value.problems[0] == (
        "pyproject.toml:9:3: error: clause 'F-DP-003' is in none of the contracts; did you mean "
        "'F-DP-033'?"
    )
    with pytest.raises(ContractError, match="is excluded at pyproject"):
        configuration.require_known([EXCLUDED, NEVER], [CLAUSE.id])


def test_an_accepted_clause_is_tried() -> None:
    """Its falsification is accepted for the reason given, if nothing else leaves it out."""
    accepted = Acceptance(clause=CLAUSE.id, reason="clamped", place=EXCLUDED.place)
    found = configuration.apply([OTHER, CLAUSE], [], [accepted])
    assert found.selected == (OTHER, CLAUSE)
    assert found.accepted == {CLAUSE.id: "clamped (pyproject.toml:9:3)"}
    configuration.require_known([], [CLAUSE.id], [accepted])
    with pytest.raises(ContractError, match="is in none of the contracts"):
        configuration.require_known([], [OTHER.id], [accepted])
    with pytest.raises(ContractError, match=r"is excluded at pyproject\.toml:9:3, too"):
        configuration.require_known([EXCLUDED], [CLAUSE.id], [accepted])
