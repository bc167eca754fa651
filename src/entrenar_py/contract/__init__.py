"""A contract: what must hold, as read from a YAML file with the place of every clause.

Decides nothing about trainers: it finds the clauses, keeps what it does not know, and reports
what is wrong with the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.contract import composer, depends, layout, rules
from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.tree import MapNode, ScalarNode, plain

__all__ = [
    *("SEVERITIES", "TOLERANCE_KINDS", "Contract", "FalsificationTest", "Gate", "Invariant"),
    *("Position", "load"),
]

SEVERITIES = ("P0", "P1", "P2")
TOLERANCE_KINDS = ("bitwise", "exact", "absolute", "relative", "ulp", "steps", "bytes")
# Kinds that are a tolerance by themselves: `tolerance: bitwise` says the same as 0 and the kind.
_EQUALITY_KINDS = ("bitwise", "exact")


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """One clause of a contract.

    `group` is the dotted path of the list it stands in (`data_parallel.weight_consistency`).
    `statement` is the clause's `invariant` text (or its postcondition, or description).
    `check` names the check that decides it; None binds by id. `scenarios` are the raw mappings of
    the clause, still to be expanded (`scenario.expand`); empty means the check's own.
    """

    id: str
    name: str
    statement: str
    position: Position
    group: str = ""
    description: str = ""
    severity: str = "P1"
    critical: bool = False
    precondition: str = ""
    postcondition: str = ""
    tolerance: float | None = None
    tolerance_kind: str | None = None
    reference: str = ""
    check: str | None = None
    scenarios: tuple[Mapping[str, Any], ...] = ()
    mutants: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FalsificationTest:
    """A written attempt to break a clause: `rule` is the id (or name) of the clause it attacks."""

    id: str
    rule: str
    prediction: str
    position: Position
    test: str = ""
    if_fails: str = ""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The contract's own bar: `checks` are the ids (or names) of clauses that must hold."""

    id: str
    name: str
    description: str
    checks: tuple[str, ...]
    pass_criteria: str
    position: Position
    falsification: str = ""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A loaded contract.

    `blocks` keeps every other part (equations, proof obligations, harnesses, free extra blocks) as
    plain data. `warnings` are lines `file:line:column: ...`; `digest` is BLAKE3 of the file's
    bytes, 32 hex digits.
    """

    path: Path
    digest: str
    metadata: Mapping[str, Any]
    invariants: tuple[Invariant, ...]
    falsification_tests: tuple[FalsificationTest, ...] = ()
    gate: Gate | None = None
    blocks: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, e.g. `distributed-training-v1.yaml`."""
        return self.path.name

    @property
    def version(self) -> str:
        """metadata.version, as text."""
        return str(self.metadata["version"])


def load(path: Path, *, covers: Callable[[Invariant], bool], strict: bool = False) -> Contract:
    """The contract at `path`, valid; nothing in it was executed.

    `covers` says whether a check exists for a clause; a clause without one is a warning. Raises
    ContractError with all problems at once, each `file:line:column: message`; under `strict` the
    warnings are problems too.
    """
    problems = Problems()
    data = composer.read(path)
    root = composer.compose(data, str(path), problems)
    if root is None:
        problems.settle(strict=strict)
    assert root is not None
    metadata = rules.metadata(root, problems)
    invariants = _invariants(root, problems)
    names = {name for clause in invariants for name in (clause.id, clause.name)}
    attackable = names | rules.equations(root, problems) | rules.obligations(root, problems)
    nodes = rules.entries(root, "falsification_tests", problems)
    tests = tuple(_test(node, attackable, problems) for node in nodes)
    gate = _gate(root, names, problems)
    rules.harnesses(root, problems)
    rules.unique_ids(root, problems)
    depends.check(path, root, problems)
    _warn_unexercised(invariants, tests, covers, problems)
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


def _invariants(root: MapNode, problems: Problems) -> tuple[Invariant, ...]:
    for node in layout.strays(root):
        message = "has no id, though others in its list have one; give it an id to make it a clause"
        problems.warn(node.at, f"this mapping {message}")
    rules.scenarios(root, problems)
    return tuple(_invariant(node, group, problems) for group, node in layout.clauses(root))


def _invariant(node: MapNode, group: str, problems: Problems) -> Invariant:
    given = node.fields["id"]
    what = f"clause {given.text}" if isinstance(given, ScalarNode) else "clause"
    record = Record(node, what=what, known=layout.CLAUSE_KEYS, problems=problems)
    record.warn_unread(read_elsewhere=layout.groups_in(node))
    clause_id = record.identifier()
    postcondition, description = record.text("postcondition"), record.text("description")
    tolerance, kind = _tolerance(record)
    return Invariant(
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


def _tolerance(record: Record) -> tuple[float | None, str | None]:
    kind = record.choice("tolerance_kind", TOLERANCE_KINDS)
    word = record.text("tolerance")
    if word in _EQUALITY_KINDS and kind in (None, word):
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
        message = f"{what}: rule {test.rule!r} names no clause; use {allowed}"
        problems.error(record.place("rule"), message)
    if not test.if_fails:
        problems.warn(node.at, f"{what}: if_fails is missing; say what a failure would mean")
    return test


def _gate(root: MapNode, names: set[str], problems: Problems) -> Gate | None:
    node = rules.block(root, "qa_gate", problems)
    if node is None:
        problems.warn(root.at, "no qa_gate: say which clauses must hold for a pass")
        return None
    record = Record(node, what="qa_gate", known=layout.GATE_KEYS, problems=problems)
    record.warn_unread()
    checks = record.texts("checks")
    for name in checks:
        if name not in names:
            message = f"qa_gate: check {name!r} names no clause, so the gate can't rest on it"
            problems.warn(record.place("checks"), f"{message}; use a clause's id or name")
    return Gate(
        id=record.text("id"),
        name=record.text("name"),
        description=record.text("description"),
        checks=checks,
        pass_criteria=record.text("pass_criteria"),
        position=node.at,
        falsification=record.text("falsification"),
    )


def _warn_unexercised(
    invariants: tuple[Invariant, ...],
    tests: tuple[FalsificationTest, ...],
    covers: Callable[[Invariant], bool],
    problems: Problems,
) -> None:
    attacked = {test.rule for test in tests}
    for clause in invariants:
        if clause.severity == "P0" and not attacked & {clause.id, clause.name}:
            message = "is P0, but no falsification test names it; write one"
            problems.warn(clause.position, f"clause {clause.id} {message}")
        if not covers(clause):
            message = "has no check here and will be inconclusive; name one with check"
            problems.warn(clause.position, f"clause {clause.id} {message}")
