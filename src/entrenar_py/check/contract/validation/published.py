"""The published rules of the contract format: SCHEMA, PROVABILITY, AUDIT.

Each takes the outline of a contract and yields a Breach for every place that breaks the rule. The
ids and demands are the published ones, the messages are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from entrenar_py.check.contract.validation.outline import CLAUSES, Item, Outline, is_filled
from entrenar_py.shared.config.composer import Node, ScalarNode
from entrenar_py.shared.config.problems import Position


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A place that breaks a rule; `item` is its dotted path, `message` says what to do."""

    at: Position
    item: str
    message: str


def filled(block: str, key: str, advice: str) -> Callable[[Outline], Iterator[Breach]]:
    """Return the rule that each item of `block` has a `key`; `advice` says what to do."""

    def find(contract: Outline) -> Iterator[Breach]:
        for item in contract.items[block]:
            yield from _if_empty(item, key, advice)

    return find


def distinct(block: str, key: str, what: str) -> Callable[[Outline], Iterator[Breach]]:
    """Return the rule that no two items of `block` share a `key`, called `what` in messages."""

    def find(contract: Outline) -> Iterator[Breach]:
        first: dict[str, Node] = {}
        for item in contract.items[block]:
            text, node = item.text(key), item.find(key)
            if not text or node is None:
                continue
            if text in first:
                message = f"{what} {text!r} is on line {first[text].at.line}, too; change one"
                yield Breach(at=node.at, item=f"{item.path}.{key}", message=message)
            first.setdefault(text, node)

    return find


def references(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-001: `metadata.references` names the sources of the contract."""
    yield from _if_empty(contract.metadata, "references", "cite the papers it rests on")


def version(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-002: the contract has a version."""
    top = contract.root.fields.get("version")  # some contracts have it next to the metadata
    if top is None or not is_filled(top):
        yield from _if_empty(contract.metadata, "version", 'give one, such as "1.0.0"')


def some_equation(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-003: a kernel's contract has an equation."""
    if contract.must_be_proved and not contract.items["equations"]:
        message = f"no equation; write down what the kernel computes{_judged(contract)}"
        yield _in_block(contract, "equations", message)


def formulas(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-004: each equation has a formula; a bare text is a formula."""
    for equation in contract.items["equations"]:
        if not isinstance(equation.node, ScalarNode):
            yield from _if_empty(equation, "formula", "write it down")
        elif not is_filled(equation.node):
            message = "formula is empty; write it down"
            yield Breach(at=equation.node.at, item=equation.path, message=message)


def properties(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-005: each proof obligation states a property."""
    for obligation in contract.items["proof_obligations"]:
        if not isinstance(obligation.node, ScalarNode) or not is_filled(obligation.node):
            yield from _if_empty(obligation, "property", "say what must hold")


def gate(contract: Outline) -> Iterator[Breach]:
    """SCHEMA-013: a kernel's contract, or one of clauses, has a qa_gate."""
    found = contract.root.fields.get("qa_gate")
    wanted = contract.must_be_proved or contract.kind == CLAUSES
    if wanted and (found is None or not is_filled(found)):
        message = "no qa_gate; say which checks must hold for a pass"
        yield _in_block(contract, "qa_gate", message)


def provability(contract: Outline) -> Iterator[Breach]:
    """PROVABILITY-001: a kernel has obligations, at least as many tests, and Kani harnesses."""
    if not contract.must_be_proved:
        return
    for block in ("proof_obligations", "falsification_tests", "kani_harnesses"):
        if not contract.items[block]:
            message = f"a kernel's contract has {block}; write some{_judged(contract)}"
            yield _in_block(contract, block, message)
    num_tests = len(contract.items["falsification_tests"])
    num_obligations = len(contract.items["proof_obligations"])
    if num_tests < num_obligations:
        counts = f"{num_tests} for {num_obligations} proof obligations"
        message = f"fewer falsification tests than proof obligations ({counts}); write more"
        yield _in_block(contract, "falsification_tests", message + _judged(contract))


def some_test(contract: Outline) -> Iterator[Breach]:
    """AUDIT-001: there is a falsification test."""
    if not contract.items["falsification_tests"]:
        message = "no falsification test, so that nothing could refute the contract; write one"
        yield _in_block(contract, "falsification_tests", message)


def some_obligation(contract: Outline) -> Iterator[Breach]:
    """AUDIT-003: where there are equations, proof obligations (or clauses) follow from them."""
    is_derived = contract.items["proof_obligations"] or contract.kind == CLAUSES
    if contract.items["equations"] and not is_derived:
        message = "equations, but no proof obligation; derive some from the equations"
        yield _in_block(contract, "proof_obligations", message)


def _in_block(contract: Outline, block: str, message: str) -> Breach:
    return Breach(at=contract.at(block), item=block, message=message)


def _if_empty(item: Item, key: str, advice: str) -> Iterator[Breach]:
    if item.find(key) is None:
        path = f"{item.path}.{key}" if item.path else key
        yield Breach(at=item.at(key), item=path, message=f"{path} is empty; {advice}")


def _judged(contract: Outline) -> str:
    if contract.declared:
        return ""
    return " (metadata.kind is not given: judged as a kernel)"
