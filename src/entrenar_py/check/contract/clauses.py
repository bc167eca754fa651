"""The clauses of a contract as `Invariant` records, and the outside names that they may use.

A contract knows neither the checks nor the planted bugs. The caller that loads it passes their
names as a `Vocabulary`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from entrenar_py.check.contract import blocks, layout
from entrenar_py.check.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Invariant,
)
from entrenar_py.shared.config.composer import MapNode, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.wording import listed

_PAGE = "docs/contract-format.md"
_NAMES_MAX = 5  # clauses, or mappings that are not clauses, that one line names


@dataclass(frozen=True, kw_only=True)
class CheckTerms:
    """The properties of a check that clauses refer to.

    The check decides the clause with the same `id`, even if the clause doesn't name a check.
    `decides` says in one line what the check decides; `spoken_of` has other words for that.
    `tolerance_kinds` are the kinds of tolerance by which it can judge. `takes_tolerance` is true if
    it allows the difference that a clause states.
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
    """Record an error for an unknown check or mutant; warn about a tolerance without effect."""
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
    """Report in one line the clauses without a check.

    The report is a warning if other clauses have a check. It is a note if none has, as in a
    contract that was written for other tools. If there are no clauses at all, report that at
    `start`.
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
    return check.takes_tolerance and len(check.tolerance_kinds) > 1


# Severity words in contracts for other tools -> the severity that each stands for here.
SEVERITY_WORDS = {
    **dict.fromkeys(("CRITICAL", "ERROR", "HIGH"), "P0"),
    **dict.fromkeys(("WARNING", "MEDIUM"), "P1"),
    **dict.fromkeys(("INFO", "LOW"), "P2"),
}


def read(root: MapNode, vocabulary: Vocabulary, problems: Problems) -> tuple[Invariant, ...]:
    """Return a clause for each mapping with an id and a statement, in the file's order."""
    _note_others(root, problems)
    blocks.require_scenarios(root, problems)
    clauses = [
        _clause(node, group, vocabulary, problems, named=None)
        for group, node in layout.clauses(root)
    ]
    clauses += [
        _clause(node, "invariants", vocabulary, problems, named=name)
        for name, node in layout.named_invariants(root)
    ]
    return tuple(clauses)


def _note_others(root: MapNode, problems: Problems) -> None:
    for node in layout.strays(root):
        message = "has no id, though others in its list have one; give it an id to make it a clause"
        problems.warn(node.at, f"this mapping {message}")
    groups: dict[str, list[MapNode]] = {}
    for group, node in layout.records_of_work(root):
        groups.setdefault(group, []).append(node)
    for group, nodes in groups.items():
        ids = [child.text for node in nodes if isinstance(child := node.fields["id"], ScalarNode)]
        named = listed(ids, most=_NAMES_MAX)
        why = "no invariant, postcondition or other statement, so they are data, not clauses"
        problems.note(nodes[0].at, f"{group}: {named}: {why}")


def _clause(
    node: MapNode, group: str, vocabulary: Vocabulary, problems: Problems, *, named: str | None
) -> Invariant:
    id_node = node.fields.get("id")
    title = id_node.text if isinstance(id_node, ScalarNode) else named
    what = "clause" if title is None else f"clause {title}"
    record = Record(node, what=what, known=layout.CLAUSE_KEYS, problems=problems)
    nested = layout.groups_in(node)
    clause_id = record.identifier() if named is None else named
    tolerance, kind = _tolerance(record)
    statements = {key: record.text(key) for key in layout.STATEMENT_KEYS if key not in nested}
    description = record.text("description")
    clause = Invariant(
        id=clause_id,
        name=record.text("name") or clause_id,
        statement=next(filter(None, statements.values()), description),
        position=node.at,
        group=group,
        description=description,
        severity=record.choice("severity", SEVERITIES, words=SEVERITY_WORDS) or "P1",
        critical=record.flag("critical"),
        precondition=_joined(record, "precondition", "preconditions"),
        postcondition=_joined(record, "postcondition", "postconditions"),
        tolerance=tolerance,
        tolerance_kind=kind,
        reference=record.text("reference"),
        check=record.text("check") or None,
        scenarios=tuple(plain(entry) for entry in record.maps("scenarios")),
        mutants=record.texts("mutants"),
        extra=record.extra("clauses", read_elsewhere=nested),
    )
    check_names(record, clause, vocabulary)
    return clause


def _joined(record: Record, *keys: str) -> str:
    return "; ".join(filter(None, (record.text(key) for key in keys)))


def _tolerance(record: Record) -> tuple[float | None, str | None]:
    kind = record.choice("tolerance_kind", TOLERANCE_KINDS)
    word = record.text("tolerance")
    if word in EQUALITY_KINDS and kind in (None, word):
        return 0.0, word
    if kind is None and record.is_percentage("tolerance"):
        kind = "relative"
    return record.amount("tolerance"), kind
