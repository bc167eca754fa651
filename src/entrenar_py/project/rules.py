"""Reads what a configuration makes of the rules for contracts: levels, and suppressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entrenar_py.contract.problems import Position
from entrenar_py.contract.validation import Suppression, levels, suppressions
from entrenar_py.contract.validation.rules import DEFAULTS, FIXED
from entrenar_py.errors import UsageError

Step = str | int
Tell = Callable[..., None]  # a message, then the path in the table of what it is about
Place = Callable[..., Position]  # of a path in the table


def read_levels(given: Any, name: str, tell: Tell) -> dict[str, str]:
    """Rule id -> level of the table `given`; what is wrong is told, and left out."""
    if not isinstance(given, dict):
        tell(f'{name} is a table of levels by rule: SCHEMA-009 = "off"', name)
        return {}
    found = {}
    for rule, level in given.items():
        try:
            if not isinstance(level, str):
                raise UsageError(f"level {level!r}: give one of {', '.join(levels.LEVELS)}")
            levels.resolve(DEFAULTS, {rule: level}, fixed=FIXED)
            found[rule] = level
        except UsageError as error:
            tell(f"{name}: {error}", name, rule)
    return found


def read_suppressions(given: Any, name: str, tell: Tell, place: Place) -> tuple[Suppression, ...]:
    """The suppressions of the list of tables `given`; what is wrong is told, and left out."""
    if not isinstance(given, list):
        tell(f"{name} is a list of tables of {', '.join(suppressions.KEYS)}", name)
        return ()
    found = []
    for number, entry in enumerate(given):
        try:
            if not isinstance(entry, dict):
                raise UsageError('give {rule = "ID", reason = "why", until = DATE}')
            at = place(name, number)
            found.append(suppressions.read(entry, source="a suppression", at=at))
        except UsageError as error:
            tell(f"{name}: {error}", name, number)
    return tuple(found)
