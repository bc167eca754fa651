"""Levels of rules: a rule's own, what a project makes of it, and `--strict`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from entrenar_py.errors import UsageError, did_you_mean


class Level(StrEnum):
    """The effect of a finding on the verdict: an error makes the contract invalid, nothing else."""

    OFF = "off"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LEVELS = tuple(map(str, Level))
_SHORT = {"warn": Level.WARNING}


def parse(text: str) -> Level:
    """Return the level that `text` names (`warn` is `warning`); UsageError if it names none."""
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
    """Return rule id -> level: that in `given` if it names the rule, else that in `defaults`.

    Under `strict` each warning is an error then, one that was asked for by name too. Raises
    UsageError for an id that `defaults` lacks, a `fixed` one, and a level that is none.
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
