"""A contract: what must hold, as read from a YAML file with the place of every clause.

Decides nothing about trainers: it finds the clauses, keeps what it does not know, and reports
what is wrong with the file.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from entrenar_py.contract import composer, depends, layout, rules
from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Contract,
    FalsificationTest,
    Gate,
    Invariant,
)
from entrenar_py.contract.tree import MapNode, ScalarNode, plain
from entrenar_py.contract.vocabulary import CheckTerms, Vocabulary, check_names

__all__ = [
    "EQUALITY_KINDS",
    "SEVERITIES",
    "TOLERANCE_KINDS",
    "CheckTerms",
    "Contract",
    "FalsificationTest",
    "Gate",
    "Invariant",
    "Position",
    "Vocabulary",
    "load",
]


def load(path: Path, *, vocabulary: Vocabulary, strict: bool = False) -> Contract:
    """The contract at `path`, valid; nothing in it was executed.

    `vocabulary` holds the names that a clause may use beside those in the file. Raises
    ContractError with all problems at once, each `file:line:column: error: ...`; under `strict`
    the warnings are problems too.
    """
    problems = Problems()
    data = composer.read(path)
    root = composer.compose(data, str(path), problems)
    if root is None:
        problems.settle(strict=strict)
    assert root is not None
    metadata = rules.metadata(root, problems)
    invariants = _invariants(root, vocabulary, problems)
    names = {name for clause in invariants for name in (clause.id, clause.name)}
    attackable = names | rules.equations(root, problems) | rules.obligations(root, problems)
    nodes = rules.entries(root, "falsification_tests", problems)
    tests = tuple(_test(node, attackable, problems) for node in nodes)
    gate = _gate(root, invariants, tests, attackable, problems)
    rules.harnesses(root, problems)
    rules.unique_ids(root, problems)
    depends.check(path, root, problems)
    _warn_unexercised(invariants, tests, problems)
    return Contract(
        path=path,
        digest=blake3(data).hexdigest(16),
        metadata=metadata,
        invariants=invariants,
        falsification_tests=tests,
        gate=gate,
        blocks=layout.other_blocks(root),
        warnings=problems.settle(strict=strict),
    )


def _invariants(root: MapNode, vocabulary: Vocabulary, problems: Problems) -> tuple[Invariant, ...]:
    for node in layout.strays(root):
        message = "has no id, though others in its list have one; give it an id to make it a clause"
        problems.warn(node.at, f"this mapping {message}")
    rules.scenarios(root, problems)
    clauses = layout.clauses(root)
    return tuple(_invariant(node, group, vocabulary, problems) for group, node in clauses)


def _invariant(node: MapNode, group: str, vocabulary: Vocabulary, problems: Problems) -> Invariant:
    given = node.fields["id"]
    what = f"clause {given.text}" if isinstance(given, ScalarNode) else "clause"
    record = Record(node, what=what, known=layout.CLAUSE_KEYS, problems=problems)
    record.warn_unread(read_elsewhere=layout.groups_in(node))
    clause_id = record.identifier()
    postcondition, description = record.text("postcondition"), record.text("description")
    tolerance, kind = _tolerance(record)
    clause = Invariant(
        id=clause_id,
        name=record.text("name") or clause_id,
        statement=record.text("invariant") or postcondition or description,
        position=node.at,
        group=group,
        description=description,
        severity=record.choice("severity", SEVERITIES) or "P1",
        critical=record.flag("critical"),
        precondition=record.text("precondition"),
        postcondition=postcondition,
        tolerance=tolerance,
        tolerance_kind=kind,
        reference=record.text("reference"),
        check=record.text("check") or None,
        scenarios=tuple(plain(entry) for entry in record.maps("scenarios")),
        mutants=record.texts("mutants"),
    )
    check_names(record, clause, vocabulary, problems)
    return clause


def _tolerance(record: Record) -> tuple[float | None, str | None]:
    kind = record.choice("tolerance_kind", TOLERANCE_KINDS)
    word = record.text("tolerance")
    if word in EQUALITY_KINDS and kind in (None, word):
        return 0.0, word
    return record.number("tolerance"), kind


def _test(node: MapNode, attackable: set[str], problems: Problems) -> FalsificationTest:
    given = node.fields.get("id", node)
    what = f"test {given.text}" if isinstance(given, ScalarNode) else "falsification test"
    record = Record(node, what=what, known=layout.TEST_KEYS, problems=problems)
    record.warn_unread()
    test = FalsificationTest(
        id=record.identifier(),
        rule=record.text("rule"),
        prediction=record.filled("prediction"),
        position=node.at,
        test=record.text("test"),
        if_fails=record.text("if_fails"),
    )
    if test.rule not in attackable:
        allowed = "the id or name of a clause, an equation, or a proof obligation's property"
        hint = problems.hint(test.rule, sorted(attackable), otherwise=f"use {allowed}")
        problems.error(record.place("rule"), f"{what}: rule {test.rule!r} names no clause{hint}")
    if not test.if_fails:
        problems.warn(node.at, f"{what}: if_fails is missing; say what a failure would mean")
    return test


def _gate(
    root: MapNode,
    invariants: tuple[Invariant, ...],
    tests: tuple[FalsificationTest, ...],
    attackable: set[str],
    problems: Problems,
) -> Gate | None:
    node = rules.block(root, "qa_gate", problems)
    if node is None:
        problems.warn(root.at, "no qa_gate: say which clauses must hold for a pass")
        return None
    record = Record(node, what="qa_gate", known=layout.GATE_KEYS, problems=problems)
    record.warn_unread()
    attacked_by = {test.id: test.rule for test in tests}
    names = {name for clause in invariants for name in clause.gate_names}
    names |= attackable | attacked_by.keys()
    for item in record.scalars("checks"):
        given = item.text.strip()
        if given not in names:
            hint = problems.hint(
                given, sorted(names), otherwise="use the id, name or group of a clause"
            )
            why = f"check {given!r} names no clause, so that the gate can't pass"
            problems.warn(item.at, f"qa_gate: {why}{hint}")
    return Gate(
        id=record.text("id"),
        name=record.text("name"),
        description=record.text("description"),
        checks=tuple(attacked_by.get(name, name) for name in record.texts("checks")),
        pass_criteria=record.text("pass_criteria"),
        position=node.at,
        falsification=record.text("falsification"),
    )


def _warn_unexercised(
    invariants: tuple[Invariant, ...], tests: tuple[FalsificationTest, ...], problems: Problems
) -> None:
    attacked = {test.rule for test in tests}
    for clause in invariants:
        if clause.severity == "P0" and not attacked & {clause.id, clause.name}:
            message = "is P0, but no falsification test names it; write one"
            problems.warn(clause.position, f"clause {clause.id} {message}")
