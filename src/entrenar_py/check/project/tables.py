"""Readers of the keys of a configuration that have no option: command, knobs, exclusions, levels.

Each reader takes the table, a key of it and the key's value. It reports problems with their places,
and leaves wrong entries out.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from entrenar_py.check.contract import rules, validation
from entrenar_py.check.contract.rules import DEFAULTS, FIXED
from entrenar_py.check.contract.validation import LEVELS, Suppression
from entrenar_py.check.project import positions
from entrenar_py.check.project.keys import EXCLUSION, HOLDS, KINDS
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A clause that the configuration leaves out, with the place and the reason.

    `until` is the last day of the exclusion; None if the clause can never apply to this trainer.
    """

    clause: str
    reason: str
    until: datetime.date | None
    place: Position

    def is_void(self, today: datetime.date) -> bool:
        """Return whether the exclusion's end date has passed."""
        return self.until is not None and self.until < today


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """A clause whose falsification the configuration accepts, with the reason and the place."""

    clause: str
    reason: str
    place: Position


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table at key path `path` of `file`; `places` has line and column of all its keys."""

    file: str
    path: positions.Path
    places: Mapping[positions.Path, positions.Place]
    problems: Problems

    def at(self, *path: str | int) -> Position:
        """Return the place of `path` in the table, or else of the nearest key that contains it."""
        whole = (*self.path, *path)
        while whole and whole not in self.places:
            whole = whole[:-1]
        return Position(self.file, *self.places.get(whole, (1, 1)))

    def error(self, message: str, *path: str | int) -> None:
        """Note a problem at `path`."""
        self.problems.error(self.at(*path), message)

    def require_known(
        self, given: Collection[str], known: Collection[str], *path: str | int, of: str = ""
    ) -> None:
        """Note a problem for each key in `given`, of the table at `path`, that isn't `known`."""
        for key in given:
            if key not in known:
                hint = self.problems.hint(key.replace("_", "-"), known)
                self.error(f"unknown key {key!r}{of}{hint}", *path, key)


def shown(value: Any) -> str:
    """Return a value of the configuration as messages show it."""
    text = repr(value) if isinstance(value, str) else str(value)
    return escaping.shortened(text, chars_max=80)


def command(table: Table, key: str, value: Any) -> tuple[str, ...]:
    """Return the words of a command; a text is split as in a shell."""
    words: list[Any] = value if isinstance(value, list) else []
    try:
        words = shlex.split(value) if isinstance(value, str) else words
    except ValueError as error:
        table.error(f"{key} = {shown(value)}: {error}", key)
        return ()
    if not words or not all(isinstance(word, str) for word in words) or not words[0]:
        table.error(f"{key} = {shown(value)}: give {HOLDS['command']}", key)
        return ()
    return tuple(words)


def knobs(table: Table, key: str, value: Any) -> dict[str, dict[str, str]]:
    """Return, by knob and value, the text that stands for the value in the command.

    Whether these knobs exist is checked together with the command.
    """
    if not isinstance(value, dict):
        form = f'{key}.strategy = {{on = "ddp", off = "none"}}'
        table.error(f"{key} = {shown(value)}: give a table of tables, such as {form}", key)
        return {}
    texts: dict[str, dict[str, str]] = {}
    for knob, spelled in value.items():
        if not isinstance(spelled, dict):
            form = '{on = "what stands for it", ...}'
            table.error(f"{key}.{knob} = {shown(spelled)}: give a table, such as {form}", key, knob)
            continue
        for name, text in spelled.items():
            if type(text) in (str, int, float):
                texts.setdefault(knob, {})[name] = str(text)
            else:
                message = f"{key}.{knob}.{name} = {shown(text)}: give text or a number"
                table.error(message, key, knob, name)
    return texts


def rule_levels(table: Table, key: str, value: Any) -> dict[str, str]:
    """Return the level of each rule by the rule's id."""
    if not isinstance(value, dict):
        form = f'{key}.SCHEMA-009 = "off"'
        table.error(f"{key} = {shown(value)}: give a table of levels by rule, such as {form}", key)
        return {}
    level_by_rule = {}
    for rule, level in value.items():
        try:
            if not isinstance(level, str):
                raise UsageError(f"level {level!r}: give one of {', '.join(LEVELS)}")
            rules.resolve(DEFAULTS, {rule: level}, fixed=FIXED)
            level_by_rule[rule] = level
        except UsageError as error:
            table.error(f"{key}: {error}", key, rule)
    return level_by_rule


def suppressed(table: Table, key: str, value: Any) -> tuple[Suppression, ...]:
    """Return the suppressions of a list of tables."""
    parsed = []
    for number, entry in enumerate(_tables(table, key, value, 'rule = "ID"')):
        try:
            if entry is not None:
                at = table.at(key, number)
                parsed.append(validation.read(entry, source="a suppression", at=at))
        except UsageError as error:
            table.error(f"{key}: {error}", key, number)
    return tuple(parsed)


def exclusions(table: Table, key: str, value: Any) -> tuple[Exclusion, ...]:
    """Return the exclusions of a list of tables, one for each clause that an entry names."""
    parsed = []
    for number, entry in enumerate(_tables(table, key, value, 'clause = "ID"')):
        if entry is None:
            continue
        table.require_known(entry, EXCLUSION, key, number, of=" of an exclusion")
        clauses = entry.get("clause")
        clauses = clauses if isinstance(clauses, list) else [clauses]
        if not clauses or not all(isinstance(clause, str) and clause for clause in clauses):
            table.error('an exclusion names no clause; give clause = "ID"', key, number)
            clauses = []
        reason = entry.get("reason")
        if not isinstance(reason, str) or not reason.strip():
            table.error('an exclusion has no reason; give reason = "why"', key, number)
        _require_end(table, entry, key, number)
        until, place = entry.get("until"), table.at(key, number)
        parsed += [
            Exclusion(clause=clause, reason=str(reason), until=until, place=place)
            for clause in clauses
        ]
    return tuple(parsed)


def acceptances(table: Table, key: str, value: Any) -> tuple[Acceptance, ...]:
    """Return the acceptances of a table of reasons by clause."""
    if not isinstance(value, dict):
        form = f'{key} = {{F-DP-003 = "why"}}'
        table.error(f"{key} = {shown(value)}: give a table of reasons by clause: {form}", key)
        return ()
    accepted = []
    for clause, reason in value.items():
        if isinstance(reason, str) and reason.strip():
            place = table.at(key, clause)
            accepted.append(Acceptance(clause=clause, reason=reason, place=place))
        else:
            table.error(f"{key}.{clause} = {shown(reason)}: give the reason, as text", key, clause)
    return tuple(accepted)


def _require_end(table: Table, entry: Mapping[str, Any], *path: str | int) -> None:
    """Require an end date for an exclusion, and none for a clause that can never apply."""
    until, kind = entry.get("until"), entry.get("kind", KINDS[0])
    if kind not in KINDS:
        hint = table.problems.hint(str(kind), KINDS)
        table.error(f"kind = {shown(kind)} of an exclusion{hint}", *path, "kind")
    elif kind == KINDS[1] and until is not None:
        table.error(f'kind = "{KINDS[1]}" has no end date; leave until out', *path, "until")
    elif kind == KINDS[0] and type(until) is not datetime.date:
        problem = "has no end date" if until is None else f"has until = {shown(until)}, no date"
        table.error(
            f"an exclusion {problem}; give its last day, until = YYYY-MM-DD without quotes, or "
            f'kind = "{KINDS[1]}" if the clause can never apply',
            *path,
            *([] if until is None else ["until"]),
        )


def _tables(table: Table, key: str, value: Any, first: str) -> list[dict[str, Any] | None]:
    """Return the entries of a list of tables; one that is no table is reported, and is None.

    `first` is the first key of an entry, with an example of its value.
    """
    form = f'{{{first}, reason = "why", until = DATE}}'
    if not isinstance(value, list):
        table.error(f"{key} = {shown(value)}: give a list of tables, such as {form}", key)
        return []
    for number, entry in enumerate(value):
        if not isinstance(entry, dict):
            table.error(f"{key} = [{shown(entry)}]: give {form}", key, number)
    return [entry if isinstance(entry, dict) else None for entry in value]
