"""The gate of a contract: what it asks for, in clauses.

A name in `checks` is looked up among clauses, groups and tests, then among the clauses that
`pass_criteria` names. What is found nowhere stays unresolved: such a gate can't pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from entrenar_py.contract import layout, rules
from entrenar_py.contract.fields import Record
from entrenar_py.contract.problems import Problems
from entrenar_py.contract.records import Contract, FalsificationTest, Gate, Invariant
from entrenar_py.contract.tree import ListNode, MapNode, ScalarNode

# An id, or a range of them: F-DP-001..004, F-DP-001 to F-DP-004, F-DP-001 - F-DP-004.
_IDS = re.compile(
    r"(?<![\w-])(?P<prefix>[A-Za-z][\w-]*-)(?P<first>\d{1,6})"
    r"(?:\s*(?:\.{2,3}=?|…|–|—|~|\bto\b|\bthrough\b)\s*(?:(?P=prefix))?(?P<last>\d{1,6})"
    r"|\s+-\s+(?P=prefix)(?P<to>\d{1,6}))?(?!\w)"
)
# A number as long, behind an id or another such number, is one too: F-DP-001, 002 and 003.
_MORE_DIGITS_MIN = 2  # of one digit it may count anything
_MORE = re.compile(r"(?:\s*(?:,\s*(?:and|&)?|/|&|\+|\band\b)\s*)(\d{1,6})(?![\w%.]*\w|%|-)")
_NUMBERED = re.compile(r"(.*-)\d{1,6}-")
_IDS_MAX = 1000  # so many of them are read, ranges counted in full
_ALL_OF = re.compile(
    r"\b(?:all|every|each)\s+(P[0-2](?:\s*(?:,|/|&|\+|and|or)+\s*P[0-2])*)\b", re.IGNORECASE
)
_ALL_CLAUSES = re.compile(
    r"\b(?:all|every|each)\s+(?:\d+\s+)?(?:clause|invariant)s?\b", re.IGNORECASE
)
_SEVERITY = re.compile("P[0-2]")
_ALL_TESTS = re.compile(r"\ball\s+(?:\d+\s+)?(?:falsification|FALSIFY)\s+tests\b", re.IGNORECASE)
_KANI = re.compile(r"\bkani\b", re.IGNORECASE)
_OTHER_DEMAND = re.compile(r"(?:min|max|required)_\w+|\w+_threshold")
_WORD = re.compile(r"[^\W_]+")
# So many names, of so many words, are sought in the clauses' descriptions.
_TRIES_MAX, _WORDS_MAX = 1000, 8


@dataclass(frozen=True, kw_only=True)
class Demands:
    """The demands of a gate: ids of `clauses`, and what is `unresolved`, which none decides."""

    clauses: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def read(root: MapNode, problems: Problems) -> Gate | None:
    """The gate as it is written; None, and a warning, if there is none."""
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
    """Return what the contract's gate asks for; nothing if it has none.

    Without `checks` that is what `pass_criteria` names, or else every clause that is P0 or
    critical.
    """
    gate = contract.gate
    if gate is None:
        return Demands()
    names = _Names(contract)
    criteria = _criteria(gate.pass_criteria, names)
    described = _Described([names.clauses[one] for one in criteria.clauses])
    found: dict[str, None] = {}
    unresolved = []
    for name in (*gate.checks, *gate.required_tests):
        ids = names.resolve(name) or described.resolve(name)
        found.update(dict.fromkeys(ids))
        if not ids:
            unresolved.append(name if name in gate.checks else f"required test {name}")
    found.update(dict.fromkeys(criteria.clauses))
    if not (gate.checks or gate.required_tests or found):
        clauses = contract.invariants
        found = dict.fromkeys(one.id for one in clauses if one.severity == "P0" or one.critical)
    named = (*unresolved, *criteria.unresolved, *gate.other_demands)
    return Demands(clauses=tuple(found), unresolved=tuple(dict.fromkeys(named)))


class _Names:
    """Everything by which a gate may call a clause: id, name, group, or a test that attacks it.

    Names match as they are written or, clauses' and rules', word by word (`weight_consistency`).
    """

    def __init__(self, contract: Contract) -> None:
        self.clauses = {clause.id: clause for clause in contract.invariants}
        self._parts: dict[str, dict[str, None]] = {}
        for clause in contract.invariants:
            for name in (clause.id, clause.item):
                self._parts.setdefault(name, {})[clause.id] = None
        self.tests = {test.id: self._attacked(test) for test in contract.falsification_tests}
        self._written: dict[str, dict[str, None]] = {}
        self._worded: dict[tuple[str, ...], dict[str, None]] = {}
        self._ruled: dict[tuple[str, ...], dict[str, None]] = {}
        for clause in contract.invariants:
            for name in clause.gate_names:
                self._written.setdefault(name, {})[clause.id] = None
            self._worded.setdefault(_words(clause.name), {})[clause.id] = None
        for test in contract.falsification_tests:
            attacked = dict.fromkeys(self.tests[test.id])
            self._ruled.setdefault(_words(test.rule), {}).update(attacked)

    def _attacked(self, test: FalsificationTest) -> list[str]:
        """The clauses that `test` attacks; or is, where it is bound as one of its own, or more."""
        return [one for name in (test.id, test.target) for one in self.of_id(name)]

    def of_id(self, given: str) -> list[str]:
        """The clause with an id, or the parts that a statement with it is bound in."""
        return list(self._parts.get(given, ()))

    @property
    def ids(self) -> list[str]:
        """The ids that criteria may name: those of clauses, bound statements and tests."""
        return [*self._parts, *self.tests]

    def resolve(self, name: str) -> list[str]:
        """The ids of the clauses that `name` means; none if it means none."""
        words = _words(name)
        ids = self._written.get(name) or (self._worded.get(words) if words else None)
        ids = ids or dict.fromkeys(self.tests.get(name, ()))
        return list(ids or (self._ruled.get(words, {}) if words else {}))


class _Described:
    """Clauses by the words of their names, groups and descriptions."""

    def __init__(self, clauses: Iterable[Invariant]) -> None:
        self._titles: dict[str, set[str]] = {}
        self._texts: dict[str, set[str]] = {}
        self._tries_left = _TRIES_MAX
        for clause in clauses:
            title = _words(f"{clause.name} {clause.group}")
            for word in title:
                self._titles.setdefault(word, set()).add(clause.id)
            for word in (*title, *_words(clause.description)):
                self._texts.setdefault(word, set()).add(clause.id)

    def resolve(self, name: str) -> list[str]:
        """The one clause whose title, or else whose whole text, has all words of `name`."""
        words = _words(name)
        if not words or len(words) > _WORDS_MAX or not self._tries_left:
            return []
        self._tries_left -= 1
        for said in (self._titles, self._texts):
            ids = set.intersection(*(said.get(word, set()) for word in words))
            if ids:
                return list(ids) if len(ids) == 1 else []
        return []


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _criteria(text: str, names: _Names) -> Demands:
    """Return what the prose of `pass_criteria` asks for by id, by severity, or of all tests."""
    prefixes = {_prefix(one) for one in names.ids} - {""}
    found: dict[str, None] = {}
    unresolved = []
    given_ids = list(islice(_ids(text, prefixes), _IDS_MAX + 1))
    if len(given_ids) > _IDS_MAX:
        unresolved.append(f"more than {_IDS_MAX} ids")
    for given in given_ids[:_IDS_MAX]:
        ids = names.of_id(given) or names.tests.get(given, [])
        found.update(dict.fromkeys(ids))
        if not ids:
            unresolved.append(given)
    severities = {one for told in _ALL_OF.findall(text) for one in _SEVERITY.findall(told.upper())}
    is_all = _ALL_CLAUSES.search(text) is not None
    clauses = names.clauses.values()
    found.update(dict.fromkeys(one.id for one in clauses if is_all or one.severity in severities))
    if _ALL_TESTS.search(text):
        found.update(dict.fromkeys(one for ids in names.tests.values() for one in ids))
        unresolved += [test for test, ids in names.tests.items() if not ids]
    if _KANI.search(text):
        unresolved.append("Kani harnesses (pass_criteria)")
    return Demands(clauses=tuple(found), unresolved=tuple(unresolved))


def _prefix(text: str) -> str:
    match = _IDS.fullmatch(text)
    return "" if match is None else match["prefix"]


def _ids(text: str, prefixes: set[str]) -> Iterator[str]:
    """Every id in `text` that begins like one of the contract's, those in ranges too.

    A range that goes backwards is given as it is written: no clause is called so.
    """
    for found in _IDS.finditer(text):
        prefix, first = found["prefix"], found["first"]
        if prefix not in prefixes:
            if (more := _NUMBERED.fullmatch(prefix)) and more[1] in prefixes:
                yield found[0]  # F-DP-001-004: a range, or the id of nothing here
            continue  # of an issue, a standard, ...
        last = found["last"] or found["to"] or first
        if int(last) < int(first):
            yield " ".join(found[0].split())
        for number in range(int(first), int(last) + 1):
            yield f"{prefix}{number:0{len(first)}d}"
        more = _MORE.match(text, found.end())
        while more and len(more[1]) == len(first) >= _MORE_DIGITS_MIN:
            yield f"{prefix}{more[1]}"
            more = _MORE.match(text, more.end())
