"""Apply a configuration's exclusions to a contract: which clauses are left out, or accepted."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from entrenar_py.check.contract import Invariant
from entrenar_py.check.project.tables import Acceptance, Exclusion
from entrenar_py.check.reports.report import Excluded, NotApplying
from entrenar_py.shared.config.problems import Problems


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The clauses that are tried (`selected`), and the clauses that are left out.

    `notes` has, by id, a text on each clause that is tried though the configuration excludes it.
    `accepted` has, by id, why the falsification of a clause is accepted, and where that stands.
    """

    selected: tuple[Invariant, ...]
    excluded: tuple[Excluded, ...] = ()
    not_applying: tuple[NotApplying, ...] = ()
    notes: Mapping[str, str]
    accepted: Mapping[str, str] = field(default_factory=dict)


def apply(
    selected: Sequence[Invariant],
    exclusions: Sequence[Exclusion],
    acceptances: Sequence[Acceptance] = (),
    *,
    asked: Collection[str] = (),
    today: datetime.date | None = None,
) -> Standing:
    """Apply `exclusions` and `acceptances` to the clauses that were selected.

    Clauses whose ids were given on the command line (`asked`) are tried all the same. `today` is
    this machine's date by default.
    """
    day = today or datetime.date.today()
    by_clause = {one.clause: one for one in exclusions}
    left: list[Invariant] = []
    excluded: list[Excluded] = []
    not_applying: list[NotApplying] = []
    notes: dict[str, str] = {}
    for clause in selected:
        entry = by_clause.get(clause.id) or by_clause.get(clause.item)
        if entry is None:
            left.append(clause)
        elif {clause.id, clause.item} & set(asked):
            left.append(clause)
            notes[clause.id] = f"tried as --only asks, though {entry.place} excludes it"
        elif entry.is_void(day):
            left.append(clause)
            notes[clause.id] = (
                f"its exclusion ended with {entry.until}, so it is tried again: {entry.reason} "
                f"({entry.place})"
            )
        elif entry.until is None:
            why = f"{entry.reason} ({entry.place})"
            not_applying.append(NotApplying(invariant=clause, reason=why))
        else:
            place = str(entry.place)
            excluded.append(
                Excluded(invariant=clause, reason=entry.reason, until=entry.until, place=place)
            )
    return Standing(
        selected=tuple(left),
        excluded=tuple(excluded),
        not_applying=tuple(not_applying),
        notes=notes,
        accepted={
            clause.id: f"{one.reason} ({one.place})"
            for one in acceptances
            for clause in left
            if one.clause in (clause.id, clause.item)
        },
    )


def require_known(
    exclusions: Sequence[Exclusion], ids: Collection[str], acceptances: Sequence[Acceptance] = ()
) -> None:
    """Raise ContractError for an unknown clause, and for one that two entries are about."""
    problems = Problems()
    seen: dict[str, Exclusion | Acceptance] = {}
    entries: list[Exclusion | Acceptance] = [*exclusions, *acceptances]
    for entry in entries:
        clause = entry.clause
        if clause not in ids:
            hint = problems.hint(clause, ids)
            message = f"clause {clause!r} is in none of the contracts{hint}"
            problems.error(entry.place, message)
        elif clause in seen:
            message = f"clause {clause!r} is excluded at {seen[clause].place}, too; keep one"
            problems.error(entry.place, message)
        seen.setdefault(clause, entry)
    problems.settle(strict=True)
