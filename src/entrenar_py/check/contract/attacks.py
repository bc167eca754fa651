"""The falsification tests of a contract, and the target that each attacks.

A test's `rule` begins with the id of its target, or is the target's name or property. Any other
rule is kept as free text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from entrenar_py.check.contract import layout, rules
from entrenar_py.check.contract.records import Equation, FalsificationTest, Invariant, Obligation
from entrenar_py.shared.config.composer import MapNode, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems

_FIRST_WORD = re.compile(r"[\w.\-]+")
_ID = re.compile(r"[A-Za-z][\w.]*-[\w.\-]*\d")  # a whole rule of this form is meant as an id


class Targets:
    """The targets that a test may attack, found by id or name."""

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
        # If several have the same name, the first is the target.
        self._names = {_normal(name): target for name, target in reversed(named)}

    def resolve(self, rule: str) -> str:
        """Return the target of `rule`: an id or an equation's name; "" if there is none."""
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


def read(root: MapNode, targets: Targets, problems: Problems) -> tuple[FalsificationTest, ...]:
    """Return the tests in the file's order; record a note on those whose rule is free text."""
    nodes = rules.entries(root, "falsification_tests", problems)
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
        # Some authors write `claim`; --validate reports a missing `prediction`.
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
    """Warn of every P0 clause that no test attacks."""
    attacked = {test.target for test in tests}
    for clause in invariants:
        if clause.severity == "P0" and clause.id not in attacked:
            message = "is P0, but no falsification test names it; write one"
            problems.warn(clause.position, f"clause {clause.id} {message}")
