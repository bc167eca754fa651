"""Reads the prose of a gate's `pass_criteria`: which clauses it names, by id, severity or "all"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from entrenar_py.check.contract.gate_names import Names

# An id, or a range of them: F-DP-001..004, F-DP-001 to F-DP-004, F-DP-001 - F-DP-004.
_IDS = re.compile(
    r"(?<![\w-])(?P<prefix>[A-Za-z][\w-]*-)(?P<first>\d{1,6})"
    r"(?:\s*(?:\.{2,3}=?|…|–|—|~|\bto\b|\bthrough\b)\s*(?:(?P=prefix))?(?P<last>\d{1,6})"
    r"|\s+-\s+(?P=prefix)(?P<to>\d{1,6}))?(?!\w)"
)
# After an id, a bare number of as many digits continues the list: F-DP-001, 002 and 003.
_MORE_DIGITS_MIN = 2  # a single digit may be a count of something else
_MORE = re.compile(r"(?:\s*(?:,\s*(?:and|&)?|/|&|\+|\band\b)\s*)(\d{1,6})(?![\w%.]*\w|%|-)")
_NUMBERED = re.compile(r"(.*-)\d{1,6}-")
_IDS_MAX = 1000  # ids read from one text, with each id of a range counted
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
    """A gate's demands: the ids of clauses that must hold, and demands that no clause decides."""

    clauses: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def read(text: str, names: Names) -> Demands:
    """Return what `text` demands; ids without a clause and Kani harnesses are `unresolved`."""
    clause_ids, unresolved = _by_id(text, names)
    clause_ids |= dict.fromkeys(_by_severity(text, names))
    if _ALL_TESTS.search(text):
        clause_ids |= dict.fromkeys(clause_id for ids in names.tests.values() for clause_id in ids)
        unresolved += [test for test, ids in names.tests.items() if not ids]
    if _KANI.search(text):
        unresolved.append("Kani harnesses (pass_criteria)")
    return Demands(clauses=tuple(clause_ids), unresolved=tuple(unresolved))


def _by_id(text: str, names: Names) -> tuple[dict[str, None], list[str]]:
    """Return the ids of the clauses that `text` names, and the ids in it that name no clause."""
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
    """Yield the ids of the clauses with a severity that `text` names; of all if it demands all."""
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
    """Yield every id in `text` that has the prefix of a known id; ranges yield each of their ids.

    A range that goes backwards is yielded as written, which matches no clause.
    """
    for match in _IDS.finditer(text):
        prefix, first = match["prefix"], match["first"]
        if prefix not in prefixes:
            if (more := _NUMBERED.fullmatch(prefix)) and more[1] in prefixes:
                yield match[0]  # F-DP-001-004 is not an id; it stays unresolved
            continue  # an id of something else, such as an issue or a standard
        last = match["last"] or match["to"] or first
        if int(last) < int(first):
            yield " ".join(match[0].split())
        for number in range(int(first), int(last) + 1):
            yield f"{prefix}{number:0{len(first)}d}"
        more = _MORE.match(text, match.end())
        while more and len(more[1]) == len(first) >= _MORE_DIGITS_MIN:
            yield f"{prefix}{more[1]}"
            more = _MORE.match(text, more.end())
