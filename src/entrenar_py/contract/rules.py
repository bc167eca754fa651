"""What a contract must say to be valid, block by block.

Each rule reads its block, puts what is wrong into `problems`, and gives back the names that other
parts of the contract may refer to.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from entrenar_py import scenario
from entrenar_py.contract import layout
from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.tree import MapNode, ScalarNode, plain
from entrenar_py.errors import UsageError

# A contract whose lists multiply to more than this would never end.
SCENARIOS_MAX = 10_000


def block(root: MapNode, name: str, problems: Problems) -> MapNode | None:
    """The mapping under `name`; None, with a problem if it is something else, when absent."""
    found = Record(root, what="contract", known=(), problems=problems).present(name)
    if found is None or isinstance(found, MapNode):
        return found
    problems.error(found.at, f"{name} is a mapping; see docs/contract-format.md")
    return None


def entries(root: MapNode, name: str, problems: Problems) -> tuple[MapNode, ...]:
    """The mappings of the top-level list `name`."""
    return Record(root, what="contract", known=(), problems=problems).maps(name)


def metadata(root: MapNode, problems: Problems) -> dict[str, Any]:
    """The metadata as plain data, `version` and `created` as the text that was written.

    A file that has no block of that name may have its keys at the top.
    """
    node = block(root, "metadata", problems)
    if node is None:
        if "version" not in root.fields:
            message = "no metadata: give metadata with a version and references"
            problems.error(root.at, message)
            return {}
        node = _metadata_at_the_top(root)
    record = Record(node, what="metadata", known=layout.METADATA_KEYS, problems=problems)
    if not record.texts("references"):
        at = record.place("references")
        message = "metadata: references is empty; name what the clauses rest on"
        problems.warn(at, message, rule="SCHEMA-001")
    data: dict[str, Any] = plain(node)
    data["version"] = _version(record, root, problems)
    for key in ("created", "author", "description"):
        if record.present(key) is not None:
            data[key] = record.text(key)
    record.extra("metadata")
    return data


def _metadata_at_the_top(root: MapNode) -> MapNode:
    keys = [key for key in root.fields if key in layout.METADATA_KEYS]
    return MapNode(
        at=root.at,
        fields={key: root.fields[key] for key in keys},
        keys={key: root.keys[key] for key in keys if key in root.keys},
    )


def _version(record: Record, root: MapNode, problems: Problems) -> str:
    """The version of the metadata, or the one at the top of the file."""
    if record.present("version") is None and "version" in root.fields:
        return Record(root, what="contract", known=(), problems=problems).filled(
            "version", rule="SCHEMA-002"
        )
    return record.filled("version", rule="SCHEMA-002")


def note_blocks(root: MapNode, problems: Problems) -> None:
    """A note on the blocks in which nothing is looked at: they are kept as data."""
    with_clauses = {group.split(".")[0] for group, _ in layout.clauses(root)}
    with_clauses |= {"invariants" for _ in layout.named_invariants(root)}
    told = {group.split(".")[0] for group, _ in layout.records_of_work(root)}
    known = {*layout.RESERVED, *layout.TOP_KEYS, *with_clauses, *told}
    others = [key for key in root.fields if key not in known]
    if others:
        at = root.keys.get(others[0], root.at)
        message = f"no clause stands in {', '.join(others)}: kept as data, nothing there is checked"
        problems.note(at, message)


# The lists whose items have ids, and the rule that two of one list break that have the same.
_RULES_ON_IDS = {
    "falsification_tests": "SCHEMA-007",
    "proof_obligations": "",
    "kani_harnesses": "SCHEMA-010",
}


def unique_ids(root: MapNode, problems: Problems) -> None:
    """Clauses, tests, obligations, harnesses and the gate share one space of ids."""
    quiet = Problems()  # the shape of these blocks is reported by who reads them
    nodes = [("", node) for _, node in layout.clauses(root)]
    nodes += [(name, node) for name in _RULES_ON_IDS for node in entries(root, name, quiet)]
    gate = block(root, "qa_gate", quiet)
    first: dict[str, tuple[str, Position]] = {}
    for name, node in [*nodes, ("", gate)] if gate else nodes:
        found = node.fields.get("id")
        if not isinstance(found, ScalarNode) or not found.text.strip():
            continue
        given = found.text.strip()
        if given in first:
            before, at = first[given]
            message = (
                f"id {given!r} stands twice, on lines {at.line} and {found.at.line}; rename one"
            )
            rule = _RULES_ON_IDS[name] if name and name == before else ""
            problems.error(found.at, message, rule=rule)
        first.setdefault(given, (name, found.at))


def scenarios(root: MapNode, problems: Problems) -> None:
    """Every entry of every clause expands to valid scenarios, SCENARIOS_MAX in all."""
    left = SCENARIOS_MAX
    quiet = Problems()  # the shape of a clause is reported by who reads it
    for _, clause in layout.clauses(root):
        record = Record(clause, what="", known=(), problems=quiet)
        what = f"clause {record.text('id')}: scenarios"
        for node in record.maps("scenarios"):
            left -= _num_scenarios(node, limit=left + 1, what=what, problems=problems)
            if left < 0:
                message = f"the contract's lists multiply to over {SCENARIOS_MAX} scenarios"
                problems.error(node.at, f"{what}: {message}; use shorter lists")
                return


def _num_scenarios(node: MapNode, *, limit: int, what: str, problems: Problems) -> int:
    expanded = scenario.expand(plain(node))
    num = 0
    try:
        num = sum(1 for _ in islice(expanded, limit))
        if num == 0:
            problems.error(node.at, f"{what}: a list is empty, so nothing would run; fill it")
    except UsageError as error:
        problems.error(node.at, f"{what}: {error}")
    return num
