"""A contract's gate: the clauses that must hold for a pass.

A name in `checks` is searched among clauses, groups and tests, then in the descriptions of some
clauses: those that the prose of `pass_criteria` names by id, by severity, or all of them. A name
without a match is unresolved, and the gate can't pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from entrenar_py.check.contract import blocks, layout
from entrenar_py.check.contract.records import Contract, FalsificationTest, Gate, Invariant
from entrenar_py.shared.config.composer import ListNode, MapNode, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems

_WORD = re.compile(r"[^\W_]+")
# Limits of the search in descriptions: names per gate, and words per name.
_TRIES_MAX, _WORDS_MAX = 1000, 8


class Names:
    """The names that a gate may use for a clause: id, name, group, or a test that attacks it.

    Names match as written. Names of clauses and rules of tests also match word by word, so that
    `weight_consistency` matches "Weight consistency".
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
        return [clause_id for name in (test.id, test.target) for clause_id in self.of_id(name)]

    def of_id(self, given: str) -> list[str]:
        """Return the ids of the clauses with `given` as their own id or as their statement's id."""
        return list(self._parts.get(given, ()))

    @property
    def ids(self) -> list[str]:
        """The ids that `pass_criteria` may name: of clauses, of bound statements and of tests."""
        return [*self._parts, *self.tests]

    def resolve(self, name: str) -> list[str]:
        """Return the ids of the clauses that `name` stands for, an empty list if none."""
        words = _words(name)
        ids = self._written.get(name) or (self._worded.get(words) if words else None)
        ids = ids or dict.fromkeys(self.tests.get(name, ()))
        return list(ids or (self._ruled.get(words, {}) if words else {}))


class Described:
    """An index of clauses by the words of their name, group and description."""

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
        """Return [id] if exactly one clause has all words of `name` in its title, or else its text.

        Return [] if no clause or several have them.
        """
        words = _words(name)
        if not words or len(words) > _WORDS_MAX or not self._tries_left:
            return []
        self._tries_left -= 1
        for word_index in (self._titles, self._texts):
            ids = set.intersection(*(word_index.get(word, set()) for word in words))
            if ids:
                return list(ids) if len(ids) == 1 else []
        return []


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


# An id, or a range of them: F-DP-001..004, F-DP-001 to F-DP-004, F-DP-001 - F-DP-004.
_IDS = re.compile(
    r"(?<![\w-])(?P<prefix>[A-Za-z][\w-]*-)(?P<first>\d{1,6})"
    r"(?:\s*(?:\.{2,3}=?|…|–|—|~|\bto\b|\bthrough\b)\s*(?:(?P=prefix))?(?P<last>\d{1,6})"
    r"|\s+-\s+(?P=prefix)(?P<to>\d{1,6}))?(?!\w)"
)
# After an id, a bare number with equally many digits continues the list: F-DP-001, 002 and 003.
_MORE_DIGITS_MIN = 2  # a single digit may be a count of something else
_MORE = re.compile(r"(?:\s*(?:,\s*(?:and|&)?|/|&|\+|\band\b)\s*)(\d{1,6})(?![\w%.]*\w|%|-)")
_NUMBERED = re.compile(r"(.*-)\d{1,6}-")
_IDS_MAX = 1000  # ids read from one text, counting each id of a range
_ALL_OF = re.compile(
    r"\b(?:all|every|each)\s+(P[0-2](?:\s*(?:,|/|&|\+|and|or)+\s*P[0-2])*)\b", re.IGNORECASE
)
_ALL_CLAUSES = re.compile(
    r"\b(?:all|every|each)\s+(?:\d+\s+)?(?:clause|invariant)s?\b", re.IGNORECASE
)
_SEVERITY = re.compile("P[0-2]")
_ALL_TESTS = re.compile(r"\ball\s+(?:\d+\s+)?(?:falsification|FALSIFY)\s+tests\b", re.IGNORECASE)
_KANI = re.compile(r"\bkani\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Demands:
    """A gate's demands: `clauses` that must hold (ids), and demands that no clause decides."""

    clauses: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def read_criteria(text: str, names: Names) -> Demands:
    """Return the demands of `text`. Ids without a clause, and Kani harnesses, are `unresolved`."""
    clause_ids, unresolved = _by_id(text, names)
    clause_ids |= dict.fromkeys(_by_severity(text, names))
    if _ALL_TESTS.search(text):
        clause_ids |= dict.fromkeys(clause_id for ids in names.tests.values() for clause_id in ids)
        unresolved += [test for test, ids in names.tests.items() if not ids]
    if _KANI.search(text):
        unresolved.append("Kani harnesses (pass_criteria)")
    return Demands(clauses=tuple(clause_ids), unresolved=tuple(unresolved))


def _by_id(text: str, names: Names) -> tuple[dict[str, None], list[str]]:
    """Return the ids of clauses that `text` names, and the ids in `text` that name no clause."""
    prefixes = {_prefix(clause_id) for clause_id in names.ids} - {""}
    named_ids = list(islice(_ids(text, prefixes), _IDS_MAX + 1))
    unresolved = [f"more than {_IDS_MAX} ids"] if len(named_ids) > _IDS_MAX else []
    clause_ids: dict[str, None] = {}
    for named_id in named_ids[:_IDS_MAX]:
        ids = names.of_id(named_id) or names.tests.get(named_id, [])
        clause_ids |= dict.fromkeys(ids)
        if not ids:
            unresolved.append(named_id)
    return clause_ids, unresolved


def _by_severity(text: str, names: Names) -> Iterator[str]:
    """Yield the ids of the clauses with a severity that is named in `text`.

    If `text` demands all clauses, yield the ids of all.
    """
    severities = {
        severity for match in _ALL_OF.findall(text) for severity in _SEVERITY.findall(match.upper())
    }
    is_all = _ALL_CLAUSES.search(text) is not None
    for clause in names.clauses.values():
        if is_all or clause.severity in severities:
            yield clause.id


def _prefix(text: str) -> str:
    match = _IDS.fullmatch(text)
    return "" if match is None else match["prefix"]


def _ids(text: str, prefixes: set[str]) -> Iterator[str]:
    """Yield every id in `text` with the prefix of a known id, and each id of a range.

    A range that goes backwards is yielded as written, and matches no clause.
    """
    for match in _IDS.finditer(text):
        prefix, first = match["prefix"], match["first"]
        if prefix not in prefixes:
            if (more := _NUMBERED.fullmatch(prefix)) and more[1] in prefixes:
                yield match[0]  # F-DP-001-004 is no id; it stays unresolved
            continue  # the id of something else, such as an issue or a standard
        last = match["last"] or match["to"] or first
        if int(last) < int(first):
            yield " ".join(match[0].split())
        for number in range(int(first), int(last) + 1):
            yield f"{prefix}{number:0{len(first)}d}"
        more = _MORE.match(text, match.end())
        while more and len(more[1]) == len(first) >= _MORE_DIGITS_MIN:
            yield f"{prefix}{more[1]}"
            more = _MORE.match(text, more.end())


_OTHER_DEMAND = re.compile(r"(?:min|max|required)_\w+|\w+_threshold")


def read(root: MapNode, problems: Problems) -> Gate | None:
    """Return the gate as written. If there is none, record a warning and return None."""
    node = blocks.block(root, "qa_gate", problems)
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
    """Report the gate's demands that no clause decides, since the gate can't pass with them.

    A name in `checks` that looks misspelled is a warning at its place. All other demands share one
    note, because they may be sentences, or may be about something other than a trainer.
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
    """Return the demands of the contract's gate, which are empty if it has no gate.

    They are the gate's `checks`, its `required_tests` and the clauses that `pass_criteria` names.
    Without any of these, the gate demands every clause that is P0 or critical.
    """
    gate = contract.gate
    if gate is None:
        return Demands()
    names = Names(contract)
    criteria = read_criteria(gate.pass_criteria, names)
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
