"""The levels of rules: each rule's own, those that a project sets, and `--strict`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from entrenar_py.shared.errors import UsageError, did_you_mean


class Level(StrEnum):
    """The level of a rule's findings; only an error makes the contract invalid."""

    OFF = "off"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LEVELS = tuple(map(str, Level))
_SHORT = {"warn": Level.WARNING}


def parse(text: str) -> Level:
    """Return the level named `text` (`warn` is `warning`). Raises UsageError for any other word."""
    word = text.strip().lower()
    if word in _SHORT:
        return _SHORT[word]
    try:
        return Level(word)
    except ValueError:
        raise UsageError(f"level {text!r}: {did_you_mean(word, LEVELS)}") from None


def resolve(
    defaults: Mapping[str, Level],
    given: Mapping[str, str],
    *,
    fixed: Collection[str] = (),
    strict: bool = False,
) -> dict[str, Level]:
    """Return rule id -> level, from `given` if it names the rule, else from `defaults`.

    Under `strict` each warning becomes an error, even one in `given`. Raises UsageError for an
    unknown rule or level, and for a `fixed` rule with a level other than its default.
    """
    levels = dict(defaults)
    for rule, text in given.items():
        if rule not in defaults:
            raise UsageError(f"rule {rule!r} is unknown: {did_you_mean(rule, defaults)}")
        level = parse(text)
        if rule in fixed and level is not defaults[rule]:
            raise UsageError(f"rule {rule} is always {defaults[rule]}; leave {rule}={text} out")
        levels[rule] = level
    if strict:
        raised = {rule for rule, level in levels.items() if level is Level.WARNING}
        levels |= dict.fromkeys(raised, Level.ERROR)
    return levels
