"""The statements that a binding may name: clauses, tests, proof obligations and equations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from entrenar_py.check.contract.proofs import OBLIGATIONS, as_clauses
from entrenar_py.check.contract.records import (
    Contract,
    Equation,
    FalsificationTest,
    Invariant,
    Obligation,
)

KINDS = ("clause", "test", "obligation", "equation")
DIGEST_CHARS = 8
TESTS, EQUATIONS = "falsification_tests", "equations"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A statement of a contract that can be bound.

    `names` are those that a binding or a gate may use; the `digest` is over `texts`. `clause` is
    the clause that it becomes in a run. If `counts`, it becomes one even without a binding.
    """

    kind: str
    names: tuple[str, ...]
    texts: tuple[str, ...]
    clause: Invariant
    counts: bool

    @property
    def id(self) -> str:
        """The id in a run: the statement's own, one made from its property, or `equation:name`."""
        return self.clause.id

    @property
    def digest(self) -> str:
        """BLAKE3 of the texts, in DIGEST_CHARS hex digits; any whitespace counts as one space."""
        said = "\0".join(map(_on_one_line, self.texts))
        return str(blake3(said.encode("utf-8", "backslashreplace")).hexdigest()[:DIGEST_CHARS])


def items(
    clauses: Iterable[Invariant],
    tests: Iterable[FalsificationTest],
    obligations: Iterable[Obligation],
    equations: Iterable[Equation],
) -> tuple[Item, ...]:
    """Return every item, the clauses first. Obligations count as clauses if `clauses` holds them;
    tests count as clauses if `clauses` is empty.
    """
    own = tuple(clauses)
    counting = {clause.id: clause for clause in own if clause.group == OBLIGATIONS}
    return (
        *(_clause(clause) for clause in own if clause.group != OBLIGATIONS),
        *(_obligation(obligation, counts=obligation.id in counting) for obligation in obligations),
        *(_test(test, counts=not own) for test in tests),
        *map(_equation, equations),
    )


def of(contract: Contract) -> tuple[Item, ...]:
    """Return every item of a loaded contract, except clauses that are bound."""
    clauses = [
        clause
        for clause in contract.invariants
        if clause.binding is None and clause.group not in (TESTS, EQUATIONS)
    ]
    tests, obligations = contract.falsification_tests, contract.obligations
    return items(clauses, tests, obligations, contract.equations)


def _clause(clause: Invariant) -> Item:
    texts = (clause.statement, clause.precondition, clause.postcondition, clause.description)
    return Item(
        kind="clause",
        names=(clause.id, clause.name),
        texts=(*texts, _text(clause.tolerance), clause.tolerance_kind or ""),
        clause=clause,
        counts=True,
    )


def _obligation(obligation: Obligation, *, counts: bool) -> Item:
    texts = (obligation.property, obligation.formal, _text(obligation.tolerance))
    (clause,) = as_clauses((obligation,))
    names = (obligation.id, obligation.property)
    return Item(kind="obligation", names=names, texts=texts, clause=clause, counts=counts)


def _test(test: FalsificationTest, *, counts: bool) -> Item:
    statement = "; ".join(filter(None, (_on_one_line(test.rule), _on_one_line(test.prediction))))
    clause = Invariant(
        id=test.id,
        name=_on_one_line(test.rule) or test.id,
        statement=statement,
        position=test.position,
        group=TESTS,
    )
    texts = (test.rule, test.prediction, test.test)
    return Item(kind="test", names=(test.id,), texts=texts, clause=clause, counts=counts)


def _equation(equation: Equation) -> Item:
    clause = Invariant(
        id=f"equation:{equation.name}",
        name=equation.name,
        statement=_on_one_line(equation.formula),
        position=equation.position,
        group=EQUATIONS,
    )
    names = (equation.name, clause.id)
    texts = (equation.formula,)
    return Item(kind="equation", names=names, texts=texts, clause=clause, counts=False)


def _text(number: float | None) -> str:
    return "" if number is None else repr(number)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
