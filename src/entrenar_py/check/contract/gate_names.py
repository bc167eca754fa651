"""Finds the clauses that a gate names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from entrenar_py.check.contract.records import Contract, FalsificationTest, Invariant

_WORD = re.compile(r"[^\W_]+")
# Limits of the search in descriptions: names per gate, and words per name.
_TRIES_MAX, _WORDS_MAX = 1000, 8


class Names:
    """The names that a gate may use for a clause: id, name, group, or a test that attacks it.

    Names match as written. Names of clauses and rules of tests also match word by word, so that
    `weight_consistency` finds "Weight consistency".
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
        """Return the ids of the clauses that `test` attacks, or that bindings made from it."""
        return [clause_id for name in (test.id, test.target) for clause_id in self.of_id(name)]

    def of_id(self, given: str) -> list[str]:
        """Return the ids of the clauses whose own id, or whose statement's id, is `given`."""
        return list(self._parts.get(given, ()))

    @property
    def ids(self) -> list[str]:
        """The ids that criteria may name: of clauses, of bound statements and of tests."""
        return [*self._parts, *self.tests]

    def resolve(self, name: str) -> list[str]:
        """Return the ids of the clauses that `name` stands for; an empty list if none."""
        words = _words(name)
        ids = self._written.get(name) or (self._worded.get(words) if words else None)
        ids = ids or dict.fromkeys(self.tests.get(name, ()))
        return list(ids or (self._ruled.get(words, {}) if words else {}))


class Described:
    """Finds a clause by words of its name, group and description."""

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
        """Return [id] if just one clause has all words of `name` in title (or text), else []."""
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
