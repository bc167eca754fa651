"""Reads the clauses of a contract into `Invariant` records."""

from __future__ import annotations

from entrenar_py.check.contract import layout, rules
from entrenar_py.check.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Invariant,
)
from entrenar_py.check.contract.vocabulary import Vocabulary, check_names
from entrenar_py.shared.config.composer import MapNode, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.wording import listed

# Severity words in contracts of other tools, and the severity that each stands for here.
SEVERITY_WORDS = {
    **dict.fromkeys(("CRITICAL", "ERROR", "HIGH"), "P0"),
    **dict.fromkeys(("WARNING", "MEDIUM"), "P1"),
    **dict.fromkeys(("INFO", "LOW"), "P2"),
}
_NAMES_MAX = 5  # ids that a note lists for mappings that aren't clauses


def read(root: MapNode, vocabulary: Vocabulary, problems: Problems) -> tuple[Invariant, ...]:
    """Return a clause for each mapping with an id and a statement, in the file's order."""
    _note_others(root, problems)
    rules.scenarios(root, problems)
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
