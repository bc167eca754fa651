"""Reads a contract's gate and resolves its demands to clauses.

A name in `checks` is looked up among clauses, groups and tests, then in the descriptions of the
clauses that `pass_criteria` names. A name without a match is unresolved, and the gate can't pass.
"""

from __future__ import annotations

import re

from entrenar_py.check.contract import gate_criteria, layout, rules
from entrenar_py.check.contract.gate_criteria import Demands
from entrenar_py.check.contract.gate_names import Described, Names
from entrenar_py.check.contract.records import Contract, Gate
from entrenar_py.shared.config.composer import ListNode, MapNode, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems

_OTHER_DEMAND = re.compile(r"(?:min|max|required)_\w+|\w+_threshold")


def read(root: MapNode, problems: Problems) -> Gate | None:
    """Return the gate as written. Without one, warn and return None."""
    node = rules.block(root, "qa_gate", problems)
    if node is None:
        message = "no qa_gate: say which clauses must hold for a pass"
        problems.warn(root.at, message, rule="SCHEMA-013")
        return None
    record = Record(node, what="qa_gate", known=layout.GATE_KEYS, problems=problems)
    others = [
        key for key in node.fields if key not in layout.GATE_KEYS and _OTHER_DEMAND.fullmatch(key)
    ]
    return record.read_as(
        Gate,
        position=node.at,
        other_demands=tuple(_worded(key, node) for key in others),
        extra=record.extra("qa_gate", read_elsewhere=others),
    )


def _worded(key: str, node: MapNode) -> str:
    value = node.fields[key]
    items = value.items if isinstance(value, ListNode) else (value,)
    texts = [item.text.strip() for item in items if isinstance(item, ScalarNode)]
    return f"{key}: {', '.join(texts)}"


def tell_unresolved(contract: Contract, root: MapNode, problems: Problems) -> None:
    """Report the gate's demands that no clause decides. With such a demand, the gate can't pass.

    A name in `checks` that looks misspelled is a warning at its place. All other demands share one
    note, because they may be sentences, or demands on something other than a trainer.
    """
    gate = contract.gate
    if gate is None:
        return
    unresolved = dict.fromkeys(demands(contract).unresolved)
    known = [name for clause in contract.invariants for name in clause.gate_names]
    node = root.fields["qa_gate"]
    assert isinstance(node, MapNode)
    quiet = Record(node, what="qa_gate", known=(), problems=Problems())  # `read` reported these
    for item in quiet.scalars("checks"):
        name = item.text.strip()
        if name in unresolved and problems.is_near(name, known):
            del unresolved[name]
            why = f"check {name!r} names no clause, so the gate can't pass"
            problems.warn(item.at, f"qa_gate: {why}{problems.hint(name, known)}")
    if unresolved:
        named = ", ".join(map(repr, unresolved))
        problems.note(gate.position, f"qa_gate is undecided: no clause decides {named}")


def demands(contract: Contract) -> Demands:
    """Return the demands of the contract's gate, empty if it has no gate.

    They are its `checks`, its `required_tests` and the clauses that `pass_criteria` names. Without
    any of these, the gate demands every clause that is P0 or critical.
    """
    gate = contract.gate
    if gate is None:
        return Demands()
    names = Names(contract)
    criteria = gate_criteria.read(gate.pass_criteria, names)
    described = Described([names.clauses[clause_id] for clause_id in criteria.clauses])
    demanded: dict[str, None] = {}
    unresolved = []
    for name in (*gate.checks, *gate.required_tests):
        ids = names.resolve(name) or described.resolve(name)
        demanded.update(dict.fromkeys(ids))
        if not ids:
            unresolved.append(name if name in gate.checks else f"required test {name}")
    demanded.update(dict.fromkeys(criteria.clauses))
    if not (gate.checks or gate.required_tests or demanded):
        clauses = contract.invariants
        demanded = dict.fromkeys(
            clause.id for clause in clauses if clause.severity == "P0" or clause.critical
        )
    named = (*unresolved, *criteria.unresolved, *gate.other_demands)
    return Demands(clauses=tuple(demanded), unresolved=tuple(dict.fromkeys(named)))
