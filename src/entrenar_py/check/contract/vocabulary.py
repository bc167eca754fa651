"""The names from outside a contract that a clause may use: checks, tolerance kinds, mutants.

A contract knows neither the checks nor the mutants; the caller that loads it passes their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from entrenar_py.check.contract.records import Invariant
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.wording import listed

_PAGE = "docs/contract-format.md"
_NAMES_MAX = 5  # clauses named in one line


@dataclass(frozen=True, kw_only=True)
class CheckTerms:
    """The properties of a check that clauses refer to.

    A check decides the clause with the same `id` even if the clause doesn't name the check.
    `decides` is one line on what it decides, `spoken_of` holds other words for that. It can judge
    by `tolerance_kinds`; `takes_tolerance` says whether it allows the difference a clause states.
    """

    name: str
    id: str
    tolerance_kinds: tuple[str, ...]
    takes_tolerance: bool
    decides: str = ""
    spoken_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The known checks, and the names of the planted bugs.

    `mutants` may load the bugs, so it is called only for a clause that names a bug. If it returns
    None, or if `checks` is None, the names are not checked.
    """

    checks: tuple[CheckTerms, ...] | None
    mutants: Callable[[], Collection[str] | None]

    def check_of(self, clause: Invariant) -> CheckTerms | None:
        """Return the check that decides `clause`, found by `clause.check` or else by its id."""
        known = self.checks or ()
        if clause.check is not None:
            return next((check for check in known if check.name == clause.check), None)
        return next((check for check in known if check.id == clause.id), None)


def check_names(record: Record, clause: Invariant, vocabulary: Vocabulary) -> None:
    """Record an error for an unknown check or mutant, a warning for a tolerance without effect."""
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
    """Report in one line the clauses without a check; report at `start` if there are no clauses.

    It is a warning if other clauses have a check. It is a note if none has, as in a contract that
    was written for other tools.
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
    """Return whether `check` can't use a tolerance without its kind."""
    return check.takes_tolerance and len(check.tolerance_kinds) > 1
