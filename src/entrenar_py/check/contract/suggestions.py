"""Drafts of bindings for a contract: for each statement without a check, the most likely check.

A check is likely if its id equals the statement's, or if it shares words with the statement. Each
binding in a draft is marked as a guess. A file with such marks is refused until a person has read
and removed them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from entrenar_py.check.contract import bindings
from entrenar_py.check.contract.bindings import MARK, VERSION, Item, stem
from entrenar_py.check.contract.blocks import OBLIGATIONS
from entrenar_py.check.contract.clauses import CheckTerms
from entrenar_py.check.contract.records import Contract

# The number of words that a statement and its check must share. On 85 statements bound by hand,
# this gave 22 right guesses and 5 wrong ones. Requiring only one shared hint gave 36 and 45.
SHARED_MIN = 3
_ENDING = re.compile(
    r"(?<=.{4})(iness(es)?|ness(es)?|istic|ism|ations?|ings?|ers?|ies|ed|es|s|e|y)$"
)
_HEAD = """\
# Drafted by entrenar-check --suggest: each line `guess:` gives the reason for a binding. Read the
# statement and the check's description, correct the binding, then remove the line. The keys are in
# docs/bindings.md.
"""
# Words that are too common to distinguish statements.
_COMMON = {
    *("after", "again", "all", "and", "any", "are", "before", "bound", "each", "every", "first"),
    *("for", "from", "have", "into", "its", "more", "must", "never", "none", "not", "one", "only"),
    *("other", "same", "some", "such", "test", "than", "that", "the", "their", "them", "then"),
    *("they", "this", "those", "when", "where", "which", "with", "without", "you", "zero"),
}


def draft(contract: Contract, checks: Sequence[CheckTerms]) -> str:
    """Return the text of a file of bindings for the statements without a check or a binding."""
    written = [clause.binding for clause in contract.invariants if clause.binding is not None]
    bound = {(binding.kind, binding.item) for binding in written}
    lines = []
    for item in bindings.items_of(contract):
        if (item.kind, item.id) not in bound and not _is_decided(item, contract, checks):
            lines += ["", *_entry(item, checks)]
    head = f"{_HEAD}{MARK}: {VERSION}\ncontract: {json.dumps(stem(contract.name))}\n"
    if not lines:
        return f"{head}# Every statement is bound or has a check: there is nothing to add.\n"
    return "\n".join([f"{head}bindings:", *lines[1:]]) + "\n"


def _is_decided(item: Item, contract: Contract, checks: Sequence[CheckTerms]) -> bool:
    if item.kind == "clause":
        return item.clause.check is not None or item.id in {check.id for check in checks}
    targets = {test.id: test.target for test in contract.falsification_tests}
    stated = (OBLIGATIONS, bindings.TESTS, bindings.EQUATIONS)
    own = {clause.item for clause in contract.invariants if clause.group not in stated}
    return item.kind == "test" and targets.get(item.id) in own


def _entry(item: Item, checks: Sequence[CheckTerms]) -> Iterator[str]:
    check, reason = guess(item, checks)
    # YAML reads JSON strings as double-quoted scalars.
    fields = {
        f"- {item.kind}": item.names[-1] if item.kind == "obligation" else item.names[0],
        "  statement": item.digest,
        "  guess": reason,
    }
    if check is None:
        fields["  not_tried"] = "no check decides this"
    for key, text in fields.items():
        yield f"  {key}: {json.dumps(' '.join(text.split()))}"
    if check is None:
        return
    yield f"    check: {check.name}"
    if item.clause.tolerance is not None and check.takes_tolerance:
        yield f"    tolerance_kind: {check.tolerance_kinds[-1]}"
    yield f"    reason: {json.dumps(f'the check decides: {check.decides}')}"


def guess(item: Item, checks: Sequence[CheckTerms]) -> tuple[CheckTerms | None, str]:
    """Return the check that `item` most likely needs, or None, and the reason for the choice.

    If no ids match, statement and check must share SHARED_MIN words, and at least one of them must
    be a hint (a word of `CheckTerms.spoken_of`). Hints count twice. None is better than a wrong
    guess.
    """
    number = item.id.upper().partition("-")[2]  # FALSIFY-DP-001 is F-DP-001
    for check in checks:
        if check.id.lower() in item.id.lower() or check.id.upper().partition("-")[2] == number:
            return check, f"its id is that of {check.id}"
    stated = words(f"{item.clause.name} {item.clause.statement}")
    of_checks = [
        words(f"{check.name.replace('_', ' ')} {check.decides} {check.spoken_of}")
        for check in checks
    ]
    # A word that fewer checks use has more weight.
    used = Counter(chain.from_iterable(of_checks))
    weights = {word: math.log2(1 + len(checks) / count) for word, count in used.items()}
    best, most, reason = None, 0.0, f"no check shares {SHARED_MIN} words with it"
    for check, own in zip(checks, of_checks, strict=True):
        hints = words(check.spoken_of)
        shared = sorted(stated & own, key=lambda word: (-weights[word], word))
        score = sum(weights[word] * (1 + (word in hints)) for word in shared)
        if len(shared) >= SHARED_MIN and hints & stated and score > most:
            best, most, reason = check, score, f"both speak of: {', '.join(shared)}"
    return best, reason


def words(text: str) -> set[str]:
    """Return the stems of the words of `text`, without common words."""
    all_words = re.findall(r"[a-z]{3,}", text.lower().replace("-", ""))
    return {_stemmed(word) for word in all_words if word not in _COMMON}


def _stemmed(word: str) -> str:
    stem = _ENDING.sub("", word)
    return word if stem == word else re.sub(r"(.)\1$", r"\1", stem)  # clipped -> clip
