"""The gate of a contract: what it asks for, in clauses.

A name in `checks` is looked up among clauses, groups and tests, then among the clauses that
`pass_criteria` names. What is found nowhere stays unresolved: such a gate can't pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from entrenar_py.contract import layout, rules
from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Problems
from entrenar_py.contract.records import Contract, FalsificationTest, Gate, Invariant
from entrenar_py.contract.tree import ListNode, MapNode, ScalarNode

# An id, or a range of them: F-DP-001..004, F-DP-001 to F-DP-004.
_IDS = re.compile(
    r"(?<![\w-])([A-Za-z][\w-]*-)(\d{1,6})"
    r"(?:\s*(?:\.{2,3}=?|…|–|—|\bto\b|\bthrough\b)\s*(?:\1)?(\d{1,6}))?(?!\w)"
)
_RANGE_MAX = 1000
_ALL_OF = re.compile(r"\ball\s+(P[0-2])\b", re.IGNORECASE)
_ALL_TESTS = re.compile(r"\ball\s+(?:\d+\s+)?(?:falsification|FALSIFY)\s+tests\b", re.IGNORECASE)
_KANI = re.compile(r"\bkani\b", re.IGNORECASE)
_OTHER_DEMAND = re.compile(r"(?:min|max|required)_\w+|\w+_threshold")
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What must hold for a pass: ids of `clauses`, and what is `unresolved`, which none decides."""

    clauses: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def read(root: MapNode, problems: Problems) -> Gate | None:
    """The gate as it is written; None, and a warning, if there is none."""
    node = rules.block(root, "qa_gate", problems)
    if node is None:
        problems.warn(root.at, "no qa_gate: say which clauses must hold for a pass")
        return None
    record = Record(node, what="qa_gate", known=layout.GATE_KEYS, problems=problems)
    others = [key for key in node.fields if _OTHER_DEMAND.fullmatch(key)]
    return Gate(
        id=record.text("id"),
        name=record.text("name"),
        description=record.text("description"),
        checks=record.texts("checks"),
        pass_criteria=record.text("pass_criteria"),
        position=node.at,
        falsification=record.text("falsification"),
        other_demands=tuple(_worded(key, node) for key in others),
        extra=record.extra("qa_gate", read_elsewhere=others),
    )


def _worded(key: str, node: MapNode) -> str:
    value = node.fields[key]
    items = value.items if isinstance(value, ListNode) else (value,)
    texts = [item.text.strip() for item in items if isinstance(item, ScalarNode)]
    return f"{key}: {', '.join(texts)}"


def tell_unresolved(contract: Contract, root: MapNode, problems: Problems) -> None:
    """Tells of a gate that can't pass, for it asks for what no clause of its contract says.

    A name that looks like a slip of a clause's is a warning where it stands; the others, which may
    be sentences or demands on something else than a trainer, are one note.
    """
    gate = contract.gate
    if gate is None:
        return
    unresolved = dict.fromkeys(demands(contract).unresolved)
    known = [name for clause in contract.invariants for name in clause.gate_names]
    node = root.fields["qa_gate"]
    assert isinstance(node, MapNode)
    quiet = Record(node, what="qa_gate", known=(), problems=Problems())  # told when it was read
    for item in quiet.scalars("checks"):
        name = item.text.strip()
        if name in unresolved and problems.is_near(name, known):
            del unresolved[name]
            why = f"check {name!r} names no clause, so that the gate can't pass"
            problems.warn(item.at, f"qa_gate: {why}{problems.hint(name, known)}")
    if unresolved:
        named = ", ".join(map(repr, unresolved))
        problems.note(gate.position, f"qa_gate: undecided, for no clause decides: {named}")


def demands(contract: Contract) -> Demands:
    """What the contract's gate asks for; nothing if it has none.

    Without `checks` that is what `pass_criteria` names, or else every clause that is P0 or
    critical.
    """
    gate = contract.gate
    if gate is None:
        return Demands()
    clauses, tests = contract.invariants, contract.falsification_tests
    criteria = _criteria(gate.pass_criteria, clauses, tests)
    found: dict[str, None] = {}
    unresolved = []
    for name in gate.checks:
        ids = _named(name, clauses, tests) or _described(name, clauses, criteria.clauses)
        found.update(dict.fromkeys(ids))
        if not ids:
            unresolved.append(name)
    found.update(dict.fromkeys(criteria.clauses))
    if not gate.checks and not found:
        found = dict.fromkeys(one.id for one in clauses if one.severity == "P0" or one.critical)
    named = (*unresolved, *criteria.unresolved, *gate.other_demands)
    return Demands(clauses=tuple(found), unresolved=tuple(dict.fromkeys(named)))


def _named(
    name: str, clauses: Iterable[Invariant], tests: Iterable[FalsificationTest]
) -> list[str]:
    """The clauses that are called `name`, or that the test called so attacks."""
    wanted = _words(name)
    ids = [one.id for one in clauses if name in one.gate_names]
    ids = ids or [one.id for one in clauses if wanted and _words(one.name) == wanted]
    if ids:
        return ids
    meant = [test for test in tests if name == test.id or _words(test.rule) == wanted]
    return _attacked(meant, clauses)


def _attacked(tests: Iterable[FalsificationTest], clauses: Iterable[Invariant]) -> list[str]:
    """The clauses that `tests` attack; a test that is bound as a clause of its own is that."""
    known = {one.id for one in clauses}
    ids = (one for test in tests for one in (test.id, test.target) if one in known)
    return list(dict.fromkeys(ids))


def _described(name: str, clauses: Iterable[Invariant], among: Iterable[str]) -> list[str]:
    """The one clause `among` those that the criteria name whose own words hold all of `name`'s."""
    wanted, allowed = set(_words(name)), set(among)
    candidates = [one for one in clauses if one.id in allowed]
    titles = {one.id: f"{one.name} {one.group}" for one in candidates}
    texts = {one.id: f"{titles[one.id]} {one.description}" for one in candidates}
    for said in (titles, texts):
        ids = [clause for clause, text in said.items() if wanted and wanted <= set(_words(text))]
        if ids:
            return ids if len(ids) == 1 else []
    return []


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _criteria(
    text: str, clauses: tuple[Invariant, ...], tests: tuple[FalsificationTest, ...]
) -> Demands:
    """What the prose of `pass_criteria` asks for by id, by severity, or of all tests."""
    known = {one.id for one in clauses}
    by_test = {test.id: _attacked((test,), clauses) for test in tests}
    prefixes = {_prefix(one) for one in (*known, *by_test)} - {""}
    found: dict[str, None] = {}
    unresolved = []
    for given in _ids(text, prefixes):
        ids = [given] if given in known else by_test.get(given, [])
        found.update(dict.fromkeys(ids))
        if not ids:
            unresolved.append(given)
    severities = {one.upper() for one in _ALL_OF.findall(text)}
    found.update(dict.fromkeys(one.id for one in clauses if one.severity in severities))
    if _ALL_TESTS.search(text):
        found.update(dict.fromkeys(one for ids in by_test.values() for one in ids))
        unresolved += [test for test, ids in by_test.items() if not ids]
    if _KANI.search(text):
        unresolved.append("Kani harnesses (pass_criteria)")
    return Demands(clauses=tuple(found), unresolved=tuple(unresolved))


def _prefix(text: str) -> str:
    match = _IDS.fullmatch(text)
    return "" if match is None else match[1]


def _ids(text: str, prefixes: set[str]) -> Iterator[str]:
    """Every id in `text` that begins like one of the contract's, those in ranges too."""
    for prefix, first, last in _IDS.findall(text):
        if prefix not in prefixes:
            continue  # of an issue, a standard, ...
        end = min(int(last or first), int(first) + _RANGE_MAX)
        for number in range(int(first), end + 1):
            yield f"{prefix}{number:0{len(first)}d}"
