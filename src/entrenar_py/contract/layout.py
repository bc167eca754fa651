"""Which keys a contract has, and where its clauses stand.

A clause is a mapping with an `id` in a list, at any depth, in any block but the reserved ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from entrenar_py.contract.tree import ListNode, MapNode, Node, plain

# Blocks with a meaning of their own, at the top of the file only: no clause is looked for in them.
RESERVED = (
    *("metadata", "equations", "proof_obligations"),
    *("falsification_tests", "kani_harnesses", "qa_gate"),
)

METADATA_KEYS = (
    *("version", "created", "author", "description", "references", "depends_on", "registry"),
)
CLAUSE_KEYS = (
    *("id", "name", "description", "severity", "critical", "precondition", "postcondition"),
    *("invariant", "tolerance", "reference"),
    *("check", "tolerance_kind", "scenarios", "mutants"),
)
EQUATION_KEYS = ("formula", "domain", "invariants", "preconditions", "postconditions")
OBLIGATION_KEYS = ("id", "type", "property", "formal", "tolerance", "applies_to")
TEST_KEYS = ("id", "rule", "prediction", "test", "if_fails")
GATE_KEYS = ("id", "name", "description", "checks", "pass_criteria", "falsification")

# The reserved blocks that are read into records, and so are not kept as plain data.
_IN_RECORDS = ("metadata", "falsification_tests", "qa_gate")
_NOTHING = object()


def clauses(root: MapNode) -> Iterator[tuple[str, MapNode]]:
    """Every clause with its group, the dotted path of the list it stands in."""
    for name, block in root.fields.items():
        if name not in RESERVED:
            yield from clauses_in(block, group=name)


def clauses_in(node: Node, *, group: str) -> Iterator[tuple[str, MapNode]]:
    """Every clause under `node`, those inside an unknown key of another clause too."""
    if isinstance(node, MapNode):
        for key, child in node.fields.items():
            yield from clauses_in(child, group=f"{group}.{key}")
    elif isinstance(node, ListNode):
        for item in node.items:
            if isinstance(item, MapNode) and "id" in item.fields:
                yield group, item
                for key in unknown_keys(item):
                    yield from clauses_in(item.fields[key], group=f"{group}.{key}")
            else:
                yield from clauses_in(item, group=group)


def unknown_keys(clause: MapNode) -> list[str]:
    """The keys of a clause that CLAUSE_KEYS lacks."""
    return [key for key in clause.fields if key not in CLAUSE_KEYS]


def groups_in(clause: MapNode) -> set[str]:
    """The unknown keys of a clause under which other clauses stand."""
    return {key for key in unknown_keys(clause) if any(clauses_in(clause.fields[key], group=key))}


def strays(node: Node) -> Iterator[MapNode]:
    """Mappings without an id that stand in one list with clauses."""
    if isinstance(node, MapNode):
        for child in node.fields.values():
            yield from strays(child)
    elif isinstance(node, ListNode):
        maps = [item for item in node.items if isinstance(item, MapNode)]
        without = [item for item in maps if "id" not in item.fields]
        if len(without) < len(maps):
            yield from without
        for item in node.items:
            yield from strays(item)


def other_blocks(root: MapNode) -> dict[str, Any]:
    """What no record holds, as plain data: blocks without their clauses, nothing else left out."""
    rest = {
        name: plain(block) if name in RESERVED else _without_clauses(block)
        for name, block in root.fields.items()
        if name not in _IN_RECORDS
    }
    return {name: value for name, value in rest.items() if value is not _NOTHING}


def _without_clauses(node: Node) -> Any:
    """`plain(node)` less its clauses; _NOTHING if it held clauses alone."""
    if isinstance(node, MapNode):
        kept = {key: _without_clauses(child) for key, child in node.fields.items()}
        kept = {key: value for key, value in kept.items() if value is not _NOTHING}
        return kept if kept or not node.fields else _NOTHING
    if isinstance(node, ListNode):
        items = [
            _without_clauses(item)
            for item in node.items
            if not (isinstance(item, MapNode) and "id" in item.fields)
        ]
        items = [item for item in items if item is not _NOTHING]
        return items if items or not node.items else _NOTHING
    return plain(node)
