"""The equations, proof obligations and proof harnesses of a contract."""

from __future__ import annotations

from entrenar_py.check.contract import layout, rules
from entrenar_py.check.contract.records import Equation, Harness, Invariant, Obligation
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems

OBLIGATIONS = "proof_obligations"
# Longest id, in characters, made from the property of an obligation without an id.
ID_CHARS_MAX = 28


def equations(root: MapNode, problems: Problems) -> tuple[Equation, ...]:
    """Return the equations in the file's order. A bare text is a formula.

    The file has a mapping from names to equations, or a list of mappings with `id` or `name`.
    """
    block = Record(root, what="contract", known=(), problems=problems).present("equations")
    if isinstance(block, ListNode):
        entries = rules.entries(root, "equations", problems)
        return tuple(_equation(_name_of(node), node, problems) for node in entries)
    node = rules.block(root, "equations", problems)
    if node is None:
        return ()
    return tuple(
        _equation(name, child, problems, named=node) for name, child in node.fields.items()
    )


def _name_of(node: MapNode) -> str:
    for key in ("id", "name"):
        name_node = node.fields.get(key)
        if isinstance(name_node, ScalarNode):
            return name_node.text.strip()
    return ""


def _equation(
    name: str, node: Node, problems: Problems, *, named: MapNode | None = None
) -> Equation:
    what = f"equation {name}"
    at = node.at if named is None else named.keys.get(name, node.at)
    if not isinstance(node, MapNode):
        formula = node.text.strip() if isinstance(node, ScalarNode) else ""
        if not formula:
            message = f"{what}: formula is empty; write it down"
            problems.error(node.at, message, rule="SCHEMA-004")
        return Equation(name=name, formula=formula, position=at)
    record = Record(node, what=what, known=layout.EQUATION_KEYS, problems=problems)
    return record.read_as(
        Equation,
        name=name,
        formula=_either(record, "formula", "formal", rule="SCHEMA-004"),
        position=at,
        extra=record.extra("equations"),
    )


def _either(record: Record, key: str, other: str, *, rule: str) -> str:
    """Return the text of `key`, or of `other` if only that is present; empty text is an error."""
    if record.present(key) is None and record.present(other) is not None:
        return record.filled(other, rule=rule)
    return record.filled(key, rule=rule)


def obligations(root: MapNode, problems: Problems) -> tuple[Obligation, ...]:
    """Return the proof obligations in the file's order. One without an id gets one."""
    nodes = rules.entries(root, OBLIGATIONS, problems)
    known = layout.OBLIGATION_KEYS
    records = [
        Record(node, what="proof obligation", known=known, problems=problems) for node in nodes
    ]
    taken = dict.fromkeys((record.text("id") for record in records), 1)
    return tuple(_obligation(record, taken) for record in records)


def _obligation(record: Record, taken: dict[str, int]) -> Obligation:
    own_id = record.text("id")
    property_text = _either(record, "property", "statement", rule="SCHEMA-005")
    return record.read_as(
        Obligation,
        id=own_id or _id_from(property_text, taken),
        property=property_text,
        position=record.node.at,
        has_id=bool(own_id),
        tolerance=record.amount("tolerance"),
        lean=record.data("lean"),
        extra=record.extra(OBLIGATIONS),
    )


def _id_from(property_text: str, taken: dict[str, int]) -> str:
    """Return an id from the first words of a property, and add it to `taken`.

    If that id is taken, a number is added to it, from `-2` on.
    """
    spaced = "".join(char if char.isalnum() else " " for char in property_text.lower())
    first, *words = spaced.split() or ["obligation"]
    stem = first[:ID_CHARS_MAX]
    for word in words:
        if len(stem) + len(word) >= ID_CHARS_MAX:
            break
        stem += f"-{word}"
    new_id, number = stem, taken.get(stem, 0)
    while new_id in taken:
        number += 1
        new_id = f"{stem}-{number}"
    taken[stem] = number or 1
    taken[new_id] = 1
    return new_id


def as_clauses(stated: tuple[Obligation, ...]) -> tuple[Invariant, ...]:
    """Return the obligations as clauses, for a contract without other clauses."""
    return tuple(
        Invariant(
            id=obligation.id,
            name=obligation.property,
            statement=obligation.formal or obligation.property,
            position=obligation.position,
            group=OBLIGATIONS,
            description=obligation.property,
            tolerance=obligation.tolerance,
            extra=obligation.extra,
        )
        for obligation in stated
    )


def harnesses(root: MapNode, problems: Problems) -> tuple[Harness, ...]:
    """Return the model checker's harnesses in the file's order. None of them is run."""
    return tuple(
        _harness(node, problems) for node in rules.entries(root, "kani_harnesses", problems)
    )


def _harness(node: MapNode, problems: Problems) -> Harness:
    known = layout.HARNESS_KEYS
    record = Record(node, what="harness", known=known, problems=problems)
    return record.read_as(Harness, position=node.at, extra=record.extra("kani_harnesses"))
