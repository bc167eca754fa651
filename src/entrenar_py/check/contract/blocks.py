"""The blocks of a contract besides its clauses: metadata, equations, obligations, tests, harnesses.

Each public function returns the content of a block, or checks something across blocks. All of them
record problems instead of raising, so that a user sees all problems at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from pathlib import Path
from typing import Any

from entrenar_py.check.contract import layout
from entrenar_py.check.contract.records import (
    Equation,
    FalsificationTest,
    Harness,
    Invariant,
    Obligation,
)
from entrenar_py.shared import package_data, scenario
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import UsageError


def block(root: MapNode, name: str, problems: Problems) -> MapNode | None:
    """Return the mapping under the key `name`, or None. Record an error for any other value."""
    node = Record(root, what="contract", known=(), problems=problems).present(name)
    if node is None or isinstance(node, MapNode):
        return node
    problems.error(node.at, f"{name} is a mapping; see docs/contract-format.md")
    return None


def entries(root: MapNode, name: str, problems: Problems) -> tuple[MapNode, ...]:
    """Return the mappings in the top-level list `name`."""
    return Record(root, what="contract", known=(), problems=problems).maps(name)


def metadata(root: MapNode, problems: Problems) -> dict[str, Any]:
    """Return the metadata as plain data. `version` and `created` are text, as in the file.

    If a file has no `metadata` block, its top-level keys are used.
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
        message = "metadata: references is empty; name the sources of the clauses"
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
    if record.present("version") is None and "version" in root.fields:
        return Record(root, what="contract", known=(), problems=problems).filled(
            "version", rule="SCHEMA-002"
        )
    return record.filled("version", rule="SCHEMA-002")


def note_blocks(root: MapNode, problems: Problems) -> None:
    """Record a note on the top-level blocks without a clause, which are kept as plain data."""
    with_clauses = {group.split(".")[0] for group, _ in layout.clauses(root)}
    with_clauses |= {"invariants" for _ in layout.named_invariants(root)}
    work = {group.split(".")[0] for group, _ in layout.records_of_work(root)}
    known = {*layout.RESERVED, *layout.TOP_KEYS, *with_clauses, *work}
    others = [key for key in root.fields if key not in known]
    if others:
        at = root.keys.get(others[0], root.at)
        message = f"no clause is in {', '.join(others)}: kept as data, not checked"
        problems.note(at, message)


# List of items with ids -> the published rule against repeated ids in that list.
_RULES_ON_IDS = {
    "falsification_tests": "SCHEMA-007",
    "proof_obligations": "",
    "kani_harnesses": "SCHEMA-010",
}


def unique_ids(root: MapNode, problems: Problems) -> None:
    """Record an error for an id that two clauses, tests, obligations, harnesses or gates share."""
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


def require_scenarios(root: MapNode, problems: Problems) -> None:
    """Record errors for invalid `scenarios` of clauses, and for more than SCENARIOS_MAX in all."""
    room = Room(problems)
    quiet = Problems()  # the reader of clauses reports wrong shapes
    clauses = [(None, node) for _, node in layout.clauses(root)]
    for name, clause in [*clauses, *layout.named_invariants(root)]:
        record = Record(clause, what="", known=(), problems=quiet)
        for node in record.maps("scenarios"):
            room.take(node, plain(node), f"clause {name or record.text('id')}")


SCENARIOS_MAX = 10_000  # scenarios of one contract; more would take too long to run


class Room:
    """Counts the scenarios of a contract, up to SCENARIOS_MAX for all entries together."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._left = SCENARIOS_MAX

    def take(self, node: MapNode, record: Mapping[str, Any], what: str) -> None:
        """Count an entry's scenarios. Record an error if they are invalid, none, or too many."""
        if self._left < 0:
            return  # the error was already recorded
        num = 0
        try:
            num = sum(1 for _ in islice(scenario.expand(record), self._left + 1))
            if num == 0:
                message = "a list is empty, so nothing would run; fill it"
                self._problems.error(node.at, f"{what}: scenarios: {message}")
        except UsageError as error:
            self._problems.error(node.at, f"{what}: scenarios: {error}")
        self._left -= num
        if self._left < 0:
            message = f"the contract's lists multiply to over {SCENARIOS_MAX} scenarios"
            self._problems.error(node.at, f"{what}: scenarios: {message}; use shorter lists")


OBLIGATIONS = "proof_obligations"
# Maximum length, in characters, of an id that is made from an obligation's property.
ID_CHARS_MAX = 28


def equations(root: MapNode, problems: Problems) -> tuple[Equation, ...]:
    """Return the equations in the file's order. A plain text is a formula.

    The file has a mapping from names to equations, or a list of mappings with `id` or `name`.
    """
    value = Record(root, what="contract", known=(), problems=problems).present("equations")
    if isinstance(value, ListNode):
        nodes = entries(root, "equations", problems)
        return tuple(_equation(_name_of(node), node, problems) for node in nodes)
    node = block(root, "equations", problems)
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
    if record.present(key) is None and record.present(other) is not None:
        return record.filled(other, rule=rule)
    return record.filled(key, rule=rule)


def obligations(root: MapNode, problems: Problems) -> tuple[Obligation, ...]:
    """Return the proof obligations in the file's order. One without an id gets a generated id."""
    nodes = entries(root, OBLIGATIONS, problems)
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
    """Return an id made of the first words of a property, and add it to `taken`.

    If that id is taken, a number is appended, beginning with `-2`.
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
    return tuple(_harness(node, problems) for node in entries(root, "kani_harnesses", problems))


def _harness(node: MapNode, problems: Problems) -> Harness:
    known = layout.HARNESS_KEYS
    record = Record(node, what="harness", known=known, problems=problems)
    return record.read_as(Harness, position=node.at, extra=record.extra("kani_harnesses"))


_FIRST_WORD = re.compile(r"[\w.\-]+")
_ID = re.compile(r"[A-Za-z][\w.]*-[\w.\-]*\d")  # a rule that is only such a word is meant as an id


class Targets:
    """The statements that a test may attack, by id or name."""

    def __init__(
        self,
        invariants: Sequence[Invariant],
        equations: Sequence[Equation],
        obligations: Sequence[Obligation],
    ) -> None:
        self.ids = {clause.id for clause in invariants} | {stated.id for stated in obligations}
        named = [(clause.name, clause.id) for clause in invariants]
        named += [(equation.name, equation.name) for equation in equations]
        named += [(obligation.property, obligation.id) for obligation in obligations]
        # If several targets have the same name, the first one is used.
        self._names = {_normal(name): target for name, target in reversed(named)}

    def resolve(self, rule: str) -> str:
        """Return the id or equation name of the statement that `rule` names; "" if none matches."""
        if rule in self.ids:
            return rule
        named = self._names.get(_normal(rule))
        if named is not None:
            return named
        first = _FIRST_WORD.match(rule)
        leading_id = "" if first is None else first[0].rstrip(".-")
        return leading_id if leading_id in self.ids else ""


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def tests(root: MapNode, targets: Targets, problems: Problems) -> tuple[FalsificationTest, ...]:
    """Return the tests in the file's order. Record a note on those with a rule in free text."""
    nodes = entries(root, "falsification_tests", problems)
    tests = tuple(_test(node, targets, problems) for node in nodes)
    free = [test for test in tests if not test.target]
    if free:
        named = ", ".join(test.id for test in free)
        message = f"no clause, obligation or equation is named by the rule of {named}"
        problems.note(free[0].position, f"falsification_tests: {message}; it is kept as free text")
    return tests


def _test(node: MapNode, targets: Targets, problems: Problems) -> FalsificationTest:
    id_node = node.fields.get("id", node)
    what = f"test {id_node.text}" if isinstance(id_node, ScalarNode) else "falsification test"
    record = Record(node, what=what, known=layout.TEST_KEYS, problems=problems)
    rule = record.text("rule")
    test = record.read_as(
        FalsificationTest,
        id=record.identifier(),
        # Some authors write `claim` instead. --validate reports a missing `prediction`.
        prediction=record.text("prediction")
        or record.text("claim")
        or record.filled("prediction", rule="SCHEMA-008"),
        position=node.at,
        target=targets.resolve(rule) or targets.resolve(record.text("obligation")),
        extra=record.extra("falsification_tests"),
    )
    if not test.target and _ID.fullmatch(rule):
        hint = problems.hint(rule, sorted(targets.ids), otherwise="use the id of a clause")
        record.warn("rule", f"rule {rule!r} names no clause{hint}")
    if not test.if_fails:
        message = f"{what}: if_fails is missing; say what a failure would mean"
        problems.warn(node.at, message, rule="SCHEMA-009")
    return test


def warn_unexercised(
    invariants: Iterable[Invariant], tests: Iterable[FalsificationTest], problems: Problems
) -> None:
    """Warn about every P0 clause that no test attacks."""
    attacked = {test.target for test in tests}
    for clause in invariants:
        if clause.severity == "P0" and clause.id not in attacked:
            message = "is P0, but no falsification test names it; write one"
            problems.warn(clause.position, f"clause {clause.id} {message}")


def follow_dependencies(path: Path, root: MapNode, problems: Problems) -> None:
    """Follow `metadata.depends_on` from the contract at `path`, and from each file it leads to.

    A cycle is recorded as an error. A name that leads to no readable contract is a note.
    """
    start = path.resolve()
    direct: dict[Path, Position] = {}
    graph: dict[Path, list[Path]] = {start: []}
    for name, at in _dependency_names(root, problems):
        target = _resolve(name, start.parent)
        if target is None or not _follow(target, graph):
            words = "is neither a contract next to this file nor a shipped one"
            problems.note(at, f"metadata: depends_on {name!r} {words}; its clauses are not read")
            continue
        direct.setdefault(target, at)
        graph[start].append(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[Path] = error.args[1][::-1]  # graphlib lists a file before those that need it
        at = next((direct[file] for file in circle if file in direct), min(direct.values()))
        chain = " -> ".join(file.name for file in circle)
        problems.error(at, f"metadata: depends_on is circular: {chain}; remove one")


def _dependency_names(root: MapNode, problems: Problems) -> list[tuple[str, Position]]:
    metadata = root.fields.get("metadata", root)
    if not isinstance(metadata, MapNode):
        return []
    record = Record(metadata, what="metadata", known=(), problems=problems)
    return [(item.text.strip(), item.at) for item in record.scalars("depends_on")]


def _resolve(name: str, folder: Path) -> Path | None:
    for candidate in (folder / name, folder / f"{name}.yaml", folder / f"{name}.yml"):
        try:
            if candidate.is_file():
                return candidate.resolve()
        except OSError:  # for example, a name that is too long for the file system
            continue
    found = package_data.shipped_contract(name)
    return None if found is None else found.resolve()


def _follow(start: Path, graph: dict[Path, list[Path]]) -> bool:
    """Add to `graph` the files that `start` depends on. Return False if `start` is no contract."""
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in graph:
            continue
        names = _dependencies(path)
        if names is None and path == start:
            return False
        targets = [_resolve(name, path.parent) for name in names or ()]
        graph[path] = [target for target in targets if target is not None]
        waiting += graph[path]
    return True


def _dependencies(path: Path) -> list[str] | None:
    quiet = Problems()  # a file's problems are reported when that file itself is loaded
    root = composer.load(path, quiet)
    return None if root is None else [name for name, _ in _dependency_names(root, quiet)]
