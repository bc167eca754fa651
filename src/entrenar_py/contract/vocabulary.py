"""The names outside its contract that a clause may use: checks, tolerance kinds, planted bugs.

A contract knows neither the checks nor the bugs; whoever loads one hands in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.records import Invariant
from entrenar_py.wording import listed

_PAGE = "docs/contract-format.md"
_NAMES_MAX = 5  # so many clauses are named in one line


@dataclass(frozen=True, kw_only=True)
class CheckTerms:
    """A check as clauses see it.

    `id` is that of the clause it decides without being named; `decides` says what, in a line,
    `spoken_of` are words that others have for it. `tolerance_kinds` are what it can judge by;
    `takes_tolerance` says whether it allows the difference that a clause states, or none.
    """

    name: str
    id: str
    tolerance_kinds: tuple[str, ...]
    takes_tolerance: bool
    decides: str = ""
    spoken_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Every check, and the names of the planted bugs.

    `mutants` is asked only if a clause names one, for it may have to load the bugs; None means
    that they are not installed, so that no name can be judged. The same goes for `checks`.
    """

    checks: tuple[CheckTerms, ...] | None
    mutants: Callable[[], Collection[str] | None]

    def check_of(self, clause: Invariant) -> CheckTerms | None:
        """Return the check that decides `clause`, by its `check` or its id; None if none does."""
        known = self.checks or ()
        if clause.check is not None:
            return next((check for check in known if check.name == clause.check), None)
        return next((check for check in known if check.id == clause.id), None)


def check_names(record: Record, clause: Invariant, vocabulary: Vocabulary) -> None:
    """Record an error for a check or a mutant that is not there."""
    check = vocabulary.check_of(clause)
    if check is not None:
        _check_tolerance(record, clause, check)
    elif clause.check is not None and vocabulary.checks is not None:
        hint = record.problems.hint(clause.check, [check.name for check in vocabulary.checks])
        record.error("check", f"check {clause.check!r} is unknown{hint} ({_PAGE} has the list)")
    planted = vocabulary.mutants() if clause.mutants else None
    if planted is None:
        return
    for item in record.scalars("mutants"):
        name = item.text.strip()
        if name not in planted:
            hint = record.problems.hint(name, planted, otherwise="docs/kill-matrix.md has the list")
            message = f"{record.what}: mutants: {name!r} is not a planted bug{hint}"
            record.problems.error(item.at, message)


def tell_unbound(
    clauses: Collection[Invariant], vocabulary: Vocabulary, start: Position, problems: Problems
) -> None:
    """Tell, in one line, of the clauses that no check decides; at `start` if there is no clause.

    It is a warning where others of the clauses have one, and a note in a contract that was written
    for other tools.
    """
    if not clauses:
        problems.note(start, f"no clause and no proof obligation: nothing is checked ({_PAGE})")
    unbound = [
        clause
        for clause in clauses
        if clause.check is None and clause.binding is None and vocabulary.check_of(clause) is None
    ]
    if not unbound:
        return
    clauses_have = "clause {} has" if len(unbound) == 1 else "clauses {} have"
    named = clauses_have.format(listed([clause.id for clause in unbound], most=_NAMES_MAX))
    message = f"{named} no check here and will be inconclusive; name one with check"
    tell = problems.warn if len(unbound) < len(clauses) else problems.note
    tell(unbound[0].position, f"{message} ({_PAGE} has the list)")


def _check_tolerance(record: Record, clause: Invariant, check: CheckTerms) -> None:
    kind, honoured = clause.tolerance_kind, " or ".join(check.tolerance_kinds)
    if kind is not None and kind not in check.tolerance_kinds:
        key = "tolerance" if record.present("tolerance_kind") is None else "tolerance_kind"
        record.warn(key, f"check {check.name} has no tolerance_kind {kind!r}; use {honoured}")
    elif clause.tolerance and not check.takes_tolerance:
        message = f"tolerance {clause.tolerance:g} has no effect: check {check.name} judges by"
        record.warn("tolerance", f"{message} {honoured} and allows no difference; use 0")
    elif clause.tolerance is not None and kind is None and _needs_kind(check):
        message = f"tolerance {clause.tolerance:g} has no effect without a kind;"
        record.warn("tolerance", f"{message} add tolerance_kind: {honoured}")


def _needs_kind(check: CheckTerms) -> bool:
    """Return whether a number alone says nothing to `check`."""
    return check.takes_tolerance and len(check.tolerance_kinds) > 1
