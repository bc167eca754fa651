"""The requirements on each block of a contract.

Each function returns the content of one block, or checks something across blocks. All of them
record problems.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check.contract import layout, scenario_counts
from entrenar_py.shared.config.composer import MapNode, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems


def block(root: MapNode, name: str, problems: Problems) -> MapNode | None:
    """Return the mapping under `name`, or None. A value that is not a mapping is an error."""
    node = Record(root, what="contract", known=(), problems=problems).present(name)
    if node is None or isinstance(node, MapNode):
        return node
    problems.error(node.at, f"{name} is a mapping; see docs/contract-format.md")
    return None


def entries(root: MapNode, name: str, problems: Problems) -> tuple[MapNode, ...]:
    """Return the mappings in the top-level list `name`."""
    return Record(root, what="contract", known=(), problems=problems).maps(name)


def metadata(root: MapNode, problems: Problems) -> dict[str, Any]:
    """Return the metadata as plain data, with `version` and `created` as the text in the file.

    In a file without a `metadata` block the keys may stand at the top level.
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
    """Return the version in the metadata, or else the one at the top level of the file."""
    if record.present("version") is None and "version" in root.fields:
        return Record(root, what="contract", known=(), problems=problems).filled(
            "version", rule="SCHEMA-002"
        )
    return record.filled("version", rule="SCHEMA-002")


def note_blocks(root: MapNode, problems: Problems) -> None:
    """Record a note on the top-level blocks that contain no clause and are kept as plain data."""
    with_clauses = {group.split(".")[0] for group, _ in layout.clauses(root)}
    with_clauses |= {"invariants" for _ in layout.named_invariants(root)}
    work = {group.split(".")[0] for group, _ in layout.records_of_work(root)}
    known = {*layout.RESERVED, *layout.TOP_KEYS, *with_clauses, *work}
    others = [key for key in root.fields if key not in known]
    if others:
        at = root.keys.get(others[0], root.at)
        message = f"no clause is in {', '.join(others)}: kept as data, not checked"
        problems.note(at, message)


# Lists whose items have ids -> the published rule against the same id twice in that list.
_RULES_ON_IDS = {
    "falsification_tests": "SCHEMA-007",
    "proof_obligations": "",
    "kani_harnesses": "SCHEMA-010",
}


def unique_ids(root: MapNode, problems: Problems) -> None:
    """Require that clauses, tests, obligations, harnesses and the gate have distinct ids."""
    quiet = Problems()  # the readers of these blocks report wrong shapes
    gate = block(root, "qa_gate", quiet)
    nodes = [("", node) for _, node in layout.clauses(root)]
    nodes += [(name, node) for name in _RULES_ON_IDS for node in entries(root, name, quiet)]
    nodes += [("", gate)] if gate else []
    id_nodes = [(block_name, node.fields.get("id")) for block_name, node in nodes]
    scalars = [(name, node) for name, node in id_nodes if isinstance(node, ScalarNode)]
    ids = [(name, node.text.strip(), node.at) for name, node in scalars]
    ids += [("", name, node.at) for name, node in layout.named_invariants(root)]
    first: dict[str, tuple[str, Position]] = {}
    for name, text, here in ids:
        if text in first:
            before, at = first[text]
            message = f"id {text!r} is used twice, on lines {at.line} and {here.line}; rename one"
            rule = _RULES_ON_IDS[name] if name and name == before else ""
            problems.error(here, message, rule=rule)
        elif text:
            first[text] = (name, here)


def scenarios(root: MapNode, problems: Problems) -> None:
    """Require that the clauses' `scenarios` are valid, and are at most SCENARIOS_MAX together."""
    room = scenario_counts.Room(problems)
    quiet = Problems()  # the reader of clauses reports wrong shapes
    clauses = [(None, node) for _, node in layout.clauses(root)]
    for name, clause in [*clauses, *layout.named_invariants(root)]:
        record = Record(clause, what="", known=(), problems=quiet)
        for node in record.maps("scenarios"):
            room.take(node, plain(node), f"clause {name or record.text('id')}")
