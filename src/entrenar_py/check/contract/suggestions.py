"""Drafts bindings for a contract: for each statement without a check, the most likely one.

A draft rests on equal ids, or on words shared by a statement and a check. Each binding in it is
marked as a guess, and a file with such marks is refused until a person has read and removed them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from entrenar_py.check.contract import bindings
from entrenar_py.check.contract.bindings import MARK, VERSION, Item, stem
from entrenar_py.check.contract.blocks import OBLIGATIONS
from entrenar_py.check.contract.clauses import CheckTerms
from entrenar_py.check.contract.records import Contract

# Least number of words that a statement and its check share. On 85 statements bound by hand, this
# gave 22 right guesses and 5 wrong ones. Asking for only one shared hint gave 36 and 45.
SHARED_MIN = 3
STEM_CHARS_MIN = 4
_ENDINGS = (
    *("inesses", "iness", "nesses", "ness", "istic", "ism", "ations", "ation", "ings", "ing"),
    *("ers", "er", "ies", "ed", "es", "s", "e", "y"),
)
_HEAD = """\
# Drafted by entrenar-check --suggest: each line `guess:` gives the reason for a binding. Read the
# statement and the check's description, correct the binding, then remove the line. The keys are in
# docs/bindings.md.
"""
# Words too common to distinguish one statement from another.
_COMMON = {
    *("after", "again", "all", "and", "any", "are", "before", "bound", "each", "every", "first"),
    *("for", "from", "have", "into", "its", "more", "must", "never", "none", "not", "one", "only"),
    *("other", "same", "some", "such", "test", "than", "that", "the", "their", "them", "then"),
    *("they", "this", "those", "when", "where", "which", "with", "without", "you", "zero"),
}


def draft(contract: Contract, checks: Sequence[CheckTerms]) -> str:
    """Return the text of a file of bindings for the statements without a check or a binding."""
    bound = {
        (clause.binding.kind, clause.binding.item)
        for clause in contract.invariants
        if clause.binding is not None
    }
    lines = []
    for item in bindings.items_of(contract):
        if (item.kind, item.id) not in bound and not _is_decided(item, contract, checks):
            lines += ["", *_entry(item, checks)]
    head = f"{_HEAD}{MARK}: {VERSION}\ncontract: {json.dumps(stem(contract.name))}\n"
    if not lines:
        return f"{head}# Every statement is bound or has a check: there is nothing to add.\n"
    return "\n".join([f"{head}bindings:", *lines[1:]]) + "\n"


def _is_decided(item: Item, contract: Contract, checks: Sequence[CheckTerms]) -> bool:
    """Return whether `item` names a check, has the id of one, or is a test attacking a clause."""
    if item.kind == "clause":
        return item.clause.check is not None or item.id in {check.id for check in checks}
    targets = {test.id: test.target for test in contract.falsification_tests}
    stated = (OBLIGATIONS, bindings.TESTS, bindings.EQUATIONS)
    own = {clause.item for clause in contract.invariants if clause.group not in stated}
    return item.kind == "test" and targets.get(item.id) in own


def _entry(item: Item, checks: Sequence[CheckTerms]) -> Iterator[str]:
    named = item.names[-1] if item.kind == "obligation" else item.names[0]
    yield f"  - {item.kind}: {_quoted(named)}"
    yield f"    statement: {_quoted(item.digest)}"
    check, reason = guess(item, checks)
    if check is None:
        yield f"    guess: {_quoted(reason)}"
        yield f"    not_tried: {_quoted('no check decides this')}"
        return
    yield f"    guess: {_quoted(reason)}"
    yield f"    check: {check.name}"
    if item.clause.tolerance is not None and check.takes_tolerance:
        yield f"    tolerance_kind: {check.tolerance_kinds[-1]}"
    yield f"    reason: {_quoted(f'the check decides: {check.decides}')}"


def _quoted(text: str) -> str:
    """Return `text` on one line as a JSON string, which YAML reads as a double-quoted scalar."""
    return json.dumps(" ".join(text.split()), ensure_ascii=True)


def guess(item: Item, checks: Sequence[CheckTerms]) -> tuple[CheckTerms | None, str]:
    """Return the check that `item` most likely needs, or None, and the reason for the choice.

    If no ids match, statement and check must share SHARED_MIN words, at least one of them a hint (a
    word of `CheckTerms.spoken_of`). Hints count twice. A wrong guess is worse than none.
    """
    for check in checks:
        if check.id.lower() in item.id.lower() or _number_of(check.id) == _number_of(item.id):
            return check, f"its id is that of {check.id}"
    statement_words = words(f"{item.clause.name} {item.clause.statement}")
    weights = _weights(checks)
    best, most, shared_by_best = None, 0.0, list[str]()
    for check in checks:
        hints = words(check.spoken_of)
        shared = sorted(statement_words & _words_of(check), key=lambda word: (-weights[word], word))
        score = sum(weights[word] * (1 + (word in hints)) for word in shared)
        if len(shared) >= SHARED_MIN and hints & statement_words and score > most:
            best, most, shared_by_best = check, score, shared
    if best is None:
        return None, f"no check shares {SHARED_MIN} words with it"
    return best, f"both speak of: {', '.join(shared_by_best)}"


def _number_of(name: str) -> str:
    """Return the id without its first part: `DP-001` for `FALSIFY-DP-001` and for `F-DP-001`."""
    return "-".join(name.upper().split("-")[1:])


def words(text: str) -> set[str]:
    """Return the words of `text` that aren't common ones, each as its stem."""
    all_words = re.findall(r"[a-z]{3,}", text.lower().replace("-", ""))
    return {_stemmed(word) for word in all_words if word not in _COMMON}


def _stemmed(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= STEM_CHARS_MIN:
            stem = word.removesuffix(ending)
            return stem[:-1] if stem[-1] == stem[-2] else stem  # clipped: clip
    return word


def _words_of(check: CheckTerms) -> set[str]:
    return words(f"{check.name.replace('_', ' ')} {check.decides} {check.spoken_of}")


def _weights(checks: Sequence[CheckTerms]) -> Mapping[str, float]:
    """Return word -> weight. A word that fewer checks use weighs more."""
    used = Counter(word for check in checks for word in _words_of(check))
    return {word: math.log2(1 + len(checks) / count) for word, count in used.items()}
