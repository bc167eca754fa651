"""The rules that the ecosystem of this format publishes: SCHEMA, PROVABILITY, AUDIT.

Each takes the outline of a contract and gives every place that breaks it. What the ids demand is
theirs; the words are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from entrenar_py.contract.problems import Position
from entrenar_py.contract.tree import Node, ScalarNode
from entrenar_py.contract.validation.outline import CLAUSES, Item, Outline, is_filled


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A place that breaks a rule: `item` is its dotted path, `message` says what to do."""

    at: Position
    item: str
    message: str


def references(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-001: metadata.references names what the contract rests on."""
    yield from _if_empty(contract.metadata, "references", "cite the papers it rests on")


def version(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-002: metadata.version is there."""
    top = contract.root.fields.get("version")  # some have it beside the metadata
    if top is None or not is_filled(top):
        yield from _if_empty(contract.metadata, "version", 'give one, such as "1.0.0"')


def some_equation(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-003: a kernel's contract has an equation."""
    if contract.must_be_proved and not contract.equations:
        message = f"no equation; write down what the kernel computes{_judged(contract)}"
        yield Breach(at=contract.at("equations"), item="equations", message=message)


def formulas(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-004: each equation has a formula; a bare text is one."""
    for equation in contract.equations:
        if not isinstance(equation.node, ScalarNode):
            yield from _if_empty(equation, "formula", "write it down")
        elif not is_filled(equation.node):
            message = "formula is empty; write it down"
            yield Breach(at=equation.node.at, item=equation.path, message=message)


def properties(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-005: each proof obligation states a property."""
    for obligation in contract.obligations:
        if not isinstance(obligation.node, ScalarNode) or not is_filled(obligation.node):
            yield from _if_empty(obligation, "property", "say what must hold")


def distinct_formal(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-006: no two proof obligations have one formal predicate."""
    yield from _repeated(contract.obligations, "formal", "formal predicate")


def distinct_tests(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-007: no two falsification tests have one id."""
    yield from _repeated(contract.tests, "id", "id")


def predictions(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-008: each falsification test predicts something."""
    for test in contract.tests:
        yield from _if_empty(test, "prediction", "say what is seen if the contract holds")


def diagnoses(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-009: each falsification test says what a failure would mean."""
    for test in contract.tests:
        yield from _if_empty(test, "if_fails", "say what a failure would mean")


def distinct_harnesses(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-010: no two Kani harnesses have one id."""
    yield from _repeated(contract.harnesses, "id", "id")


def proved_obligations(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-011 and AUDIT-002: each Kani harness names the proof obligation that it proves."""
    for harness in contract.harnesses:
        yield from _if_empty(harness, "obligation", "name the proof obligation that it proves")


def bounds(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-012: each Kani harness has a bound for its loops."""
    for harness in contract.harnesses:
        yield from _if_empty(harness, "bound", "give the number of times that loops are unwound")


def gate(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-013: a kernel's contract, or one of clauses, has a qa_gate."""
    found = contract.root.fields.get("qa_gate")
    wanted = contract.must_be_proved or contract.kind == CLAUSES
    if wanted and (found is None or not is_filled(found)):
        message = "no qa_gate; say which checks must hold for a pass"
        yield Breach(at=contract.at("qa_gate"), item="qa_gate", message=message)


def provability(contract: Outline) -> Iterator[Breach]:
    """PROVABILITY-001: a kernel has obligations, at least as many tests, and Kani harnesses."""
    if not contract.must_be_proved:
        return
    blocks = {
        "proof_obligations": contract.obligations,
        "falsification_tests": contract.tests,
        "kani_harnesses": contract.harnesses,
    }
    for block, items in blocks.items():
        if not items:
            message = f"a kernel's contract has {block}; write some{_judged(contract)}"
            yield Breach(at=contract.at(block), item=block, message=message)
    if len(contract.tests) < len(contract.obligations):
        counts = f"{len(contract.tests)} for {len(contract.obligations)} proof obligations"
        message = f"fewer falsification tests than proof obligations ({counts}); write more"
        yield Breach(
            at=contract.at("falsification_tests"),
            item="falsification_tests",
            message=message + _judged(contract),
        )


def some_test(contract: Outline) -> Iterator[Breach]:
    """AUDIT-001: there is a falsification test."""
    if not contract.tests:
        message = "no falsification test, so that nothing could refute the contract; write one"
        at = contract.at("falsification_tests")
        yield Breach(at=at, item="falsification_tests", message=message)


def some_obligation(contract: Outline) -> Iterator[Breach]:
    """AUDIT-003: where there are equations, proof obligations (or clauses) follow from them."""
    if contract.equations and not contract.obligations and contract.kind != CLAUSES:
        message = "equations, but no proof obligation; derive some from the equations"
        at = contract.at("proof_obligations")
        yield Breach(at=at, item="proof_obligations", message=message)


def _if_empty(item: Item, key: str, advice: str) -> Iterator[Breach]:
    if item.find(key) is None:
        path = f"{item.path}.{key}" if item.path else key
        yield Breach(at=item.at(key), item=path, message=f"{path} is empty; {advice}")


def _repeated(items: Iterable[Item], key: str, what: str) -> Iterator[Breach]:
    first: dict[str, Node] = {}
    for item in items:
        text, node = item.text(key), item.find(key)
        if not text or node is None:
            continue
        if text in first:
            message = f"{what} {text!r} stands on line {first[text].at.line}, too; change one"
            yield Breach(at=node.at, item=f"{item.path}.{key}", message=message)
        first.setdefault(text, node)


def _judged(contract: Outline) -> str:
    if contract.declared:
        return ""
    return " (metadata.kind is not given: judged as a kernel)"
