"""The keys of a contract, and the places in the file where its clauses may be.

A clause is a mapping with an `id` and a statement (`is_clause`), in a list at any depth of any
block except the reserved ones. Other mappings with an id, such as steps of work, are plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode, plain

# Top-level blocks with a fixed meaning, which are not searched for clauses.
RESERVED = (
    *("metadata", "equations", "proof_obligations"),
    *("falsification_tests", "kani_harnesses", "qa_gate"),
)

METADATA_KEYS = (
    *("version", "created", "author", "description", "references", "depends_on", "registry"),
    "kind",
)
# Keys of a clause's statement. The first that is present is used.
STATEMENT_KEYS = (
    *("invariant", "invariants", "postcondition", "postconditions"),
    *("statement", "property", "formal", "formula"),
)
CLAUSE_KEYS = (
    *("id", "name", "description", "severity", "critical", "precondition", "preconditions"),
    *STATEMENT_KEYS,
    *("tolerance", "reference"),
    *("check", "tolerance_kind", "scenarios", "mutants"),
)
EQUATION_KEYS = (
    *("id", "name", "formula", "formal", "domain", "codomain"),
    *("invariants", "preconditions", "postconditions", "reference"),
)
OBLIGATION_KEYS = (
    *("id", "type", "property", "statement", "formal", "tolerance", "applies_to"),
    *("equation", "lean"),
)
TEST_KEYS = ("id", "rule", "obligation", "prediction", "claim", "test", "if_fails")
HARNESS_KEYS = ("id", "obligation", "property", "bound", "strategy", "solver", "harness")
GATE_KEYS = (
    *("id", "name", "description", "checks", "required_tests"),
    *("pass_criteria", "falsification"),
)

# Keys that may be at the top level of a contract without a metadata block.
TOP_KEYS = (*METADATA_KEYS, "contract", "contract_id", "name")

# Reserved blocks that are read into records, and so are not kept as plain data.
_IN_RECORDS = ("metadata", "falsification_tests", "qa_gate")
# Keys that only a clause has.
_OF_CLAUSES = (
    *STATEMENT_KEYS,
    *("critical", "tolerance", "tolerance_kind", "check", "scenarios", "mutants"),
    *("falsification", "falsifier", "verified_by"),
)
_SAID_OF_ALL = ("id", "name", "description", "reference", "precondition", "preconditions")
# Names of lists with only clauses as items.
_STATING_BLOCKS = ("invariants", "obligations", "clauses", "requirements", "properties")
_NOTHING = object()


def is_clause(item: MapNode, *, group: str) -> bool:
    """Return whether `item`, a mapping with an id in the list `group`, is a clause.

    It is a clause if it has a key that only clauses have, or if its list has a name for clauses
    (`invariants`). An item without a `status` is also a clause if it has a `severity`, or only an
    id and descriptive keys. All other items describe work, such as a step, a gap or a risk.
    """
    keys = item.fields.keys()
    if any(key in keys for key in _OF_CLAUSES) or group.rsplit(".", 1)[-1] in _STATING_BLOCKS:
        return True
    if "status" in keys:
        return False
    return "severity" in keys or all(key in _SAID_OF_ALL for key in keys)


def clauses(root: MapNode) -> Iterator[tuple[str, MapNode]]:
    """Yield each clause with its group, which is the dotted path of its list."""
    for group, item in _items(root):
        if is_clause(item, group=group):
            yield group, item


def records_of_work(root: MapNode) -> Iterator[tuple[str, MapNode]]:
    """Yield every mapping with an id that is not a clause, with its group."""
    for group, item in _items(root):
        if not is_clause(item, group=group):
            yield group, item


def named_invariants(root: MapNode) -> Iterator[tuple[str, MapNode]]:
    """Yield (name, clause) for a top-level `invariants` that maps names to clauses."""
    block = root.fields.get("invariants")
    if isinstance(block, MapNode):
        for name, entry in block.fields.items():
            if isinstance(entry, MapNode) and any(key in entry.fields for key in STATEMENT_KEYS):
                yield name, entry


def _items(root: MapNode) -> Iterator[tuple[str, MapNode]]:
    for name, block in root.fields.items():
        if name not in RESERVED:
            yield from _items_in(block, group=name)


def _items_in(node: Node, *, group: str) -> Iterator[tuple[str, MapNode]]:
    """Yield (group, mapping) for each mapping with an id in a list at any depth of `node`."""
    if isinstance(node, MapNode):
        for key, child in node.fields.items():
            yield from _items_in(child, group=f"{group}.{key}")
    elif isinstance(node, ListNode):
        for item in node.items:
            if isinstance(item, MapNode) and "id" in item.fields:
                yield group, item
                for key in _nesting_keys(item):
                    yield from _items_in(item.fields[key], group=f"{group}.{key}")
            else:
                yield from _items_in(item, group=group)


def _nesting_keys(item: MapNode) -> list[str]:
    return [key for key in item.fields if key not in CLAUSE_KEYS or key == "invariants"]


def groups_in(clause: MapNode) -> set[str]:
    """Return the keys of `clause` that contain other clauses."""
    return {
        key
        for key in _nesting_keys(clause)
        if any(
            is_clause(item, group=group) for group, item in _items_in(clause.fields[key], group=key)
        )
    }


def strays(node: Node) -> Iterator[MapNode]:
    """Yield each mapping without an id, if another mapping in the same list has one."""
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
    """Return the blocks that are not read into records, as plain data without their clauses."""
    rest = {
        name: plain(block) if name in RESERVED else _without_clauses(block, group=name)
        for name, block in root.fields.items()
        if name not in _IN_RECORDS
    }
    return {name: value for name, value in rest.items() if value is not _NOTHING}


def _without_clauses(node: Node, *, group: str) -> Any:
    """Return `plain(node)` without clauses. _NOTHING if it had only clauses."""
    if isinstance(node, MapNode):
        children = {
            key: _without_clauses(child, group=f"{group}.{key}")
            for key, child in node.fields.items()
        }
        kept = {key: value for key, value in children.items() if value is not _NOTHING}
        return kept if kept or not node.fields else _NOTHING
    if isinstance(node, ListNode):
        others = [item for item in node.items if not _is_listed_clause(item, group=group)]
        values = [_without_clauses(item, group=group) for item in others]
        items = [value for value in values if value is not _NOTHING]
        return items if items or not node.items else _NOTHING
    return plain(node)


def _is_listed_clause(item: Node, *, group: str) -> bool:
    return isinstance(item, MapNode) and "id" in item.fields and is_clause(item, group=group)


def is_binding_registry(root: MapNode) -> bool:
    """Return whether the file is a registry that says which functions implement which equations."""
    bindings = root.fields.get("bindings")
    if not isinstance(bindings, ListNode) or any(name in root.fields for name in RESERVED):
        return False
    return any(
        isinstance(item, MapNode) and isinstance(item.fields.get("contract"), ScalarNode)
        for item in bindings.items
    )
