"""A configuration read: every key known and of its type, all problems at once, by place."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.validation import Suppression
from entrenar_py.errors import ContractError, UsageError
from entrenar_py.options import modes, parser
from entrenar_py.project import knobs, location, positions, rules
from entrenar_py.project.keys import EXCLUSION, HOLDS, KEYS, KINDS, Form
from entrenar_py.untrusted import escaping

# What no option of the same name holds, so that it goes with a command and without one.
_NO_OPTIONS = ("command", "knobs", "exclusions", "levels", "suppressions")
_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A clause that the configuration leaves out, where it says so, and why.

    `until` is the last day of it; None where the clause says nothing of this trainer at all.
    """

    clause: str
    reason: str
    until: datetime.date | None
    place: Position

    def is_void(self, today: datetime.date) -> bool:
        """Return whether its end date has passed."""
        return self.until is not None and self.until < today


@dataclass(frozen=True, kw_only=True)
class Project:
    """A configuration. `values` are by the names that parsed options have (`world_size`),
    as these have them; paths in them are seen from the current folder. `places` says where each
    stands. `folder` is the file's, `command` empty where it names none.
    """

    place: Position
    folder: Path
    values: Mapping[str, Any]
    places: Mapping[str, Position]
    command: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    suppressions: tuple[Suppression, ...] = ()
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def load(path: Path) -> Project:
    """The configuration at `path`.

    Raises ContractError with all problems at once, each `file:line:column: error: ...`, and
    UsageError for a file that can't be read.
    """
    text = location.read(path)
    shown = os.path.relpath(path)
    try:
        whole = location.parse(text)
    except ValueError as error:
        raise ContractError([_undecodable(shown, text, str(error))]) from error
    where: positions.Path = ("tool", location.TABLE)
    table = whole.get("tool", {})
    table = table.get(location.TABLE) if isinstance(table, dict) else None
    if table is None and path.name != location.SHARED:
        where, table = (), whole
    if table is None:
        raise UsageError(f"configuration {shown}: has no table [tool.{location.TABLE}]")
    problems = Problems()
    reader = _Reader(table, where, shown, positions.scan(text), problems)
    project = reader.project(path.parent)
    problems.settle(strict=True)
    return project


def _undecodable(shown: str, text: str, message: str) -> str:
    found = _PLACE.search(message)
    line, column = found.groups() if found else (text.count("\n") + 1, 1)
    return f"{shown}:{line}:{column}: error: no TOML: {_PLACE.sub('', message)}"


class _Reader:
    """One table, read key by key; every problem goes to `problems`, at its place."""

    def __init__(
        self,
        table: Any,
        where: positions.Path,
        file: str,
        places: Mapping[positions.Path, positions.Place],
        problems: Problems,
    ) -> None:
        self._table, self._where, self._problems = table, where, problems
        self._file, self._places = file, places
        self._options = {one.dest: one for one in parser.build()._actions}

    def project(self, folder: Path) -> Project:
        """Read the table; where it is wrong the problem is noted, and the rest read."""
        if not isinstance(self._table, dict):
            self._problems.error(self._at(), f"{self._name('')} is a table of {', '.join(KEYS)}")
            self._table = {}
        self._require_known(self._table, (), KEYS, "")
        values: dict[str, Any] = {}
        places: dict[str, Position] = {}
        command: tuple[str, ...] = ()
        exclusions: list[Exclusion] = []
        levels: dict[str, str] = {}
        aside: tuple[Suppression, ...] = ()
        spelled: dict[str, dict[str, str]] = {}
        for name, key in KEYS.items():
            if name not in self._table:
                continue
            given, dest = self._table[name], name.replace("-", "_")
            places[dest] = self._at(name)
            if _has_nul(given):
                self._error(f"{name} holds a NUL, which is in no path, word or id", name)
            elif key.form == "command":
                command = self._command(given, name)
            elif key.form == "exclusions":
                exclusions += self._exclusions(given, name)
            elif key.form == "knobs":
                spelled = knobs.read(given, name, self._error)
            elif key.form == "levels":
                levels = rules.read_levels(given, name, self._error)
            elif key.form == "suppressions":
                aside = rules.read_suppressions(given, name, self._error, self._at)
            else:
                value = self._value(given, name, key.form, folder)
                values |= {} if value is None else {dest: value}
        self._require_together(bool(command))
        if spelled and "command" not in self._table:
            self._error("knobs means something beside command alone; leave it out", "knobs")
        if "contract" not in self._table:
            self._problems.error(self._at(), "contract is missing; say which are to be tried")
        return Project(
            place=self._at(),
            folder=folder,
            values=values,
            places=places,
            command=command,
            exclusions=tuple(exclusions),
            rules=levels,
            suppressions=aside,
            knobs=spelled,
        )

    def _at(self, *path: str | int) -> Position:
        """Return where `path` of the table stands, or else the nearest thing around it."""
        whole = (*self._where, *path)
        while whole and whole not in self._places:
            whole = whole[:-1]
        return Position(self._file, *self._places.get(whole, (1, 1)))

    def _error(self, message: str, *path: str | int) -> None:
        self._problems.error(self._at(*path), message)

    def _name(self, name: str) -> str:
        return name or ".".join(map(str, self._where)) or "a configuration"

    def _require_known(
        self, table: Mapping[str, Any], path: positions.Path, known: Collection[str], what: str
    ) -> None:
        for name in table:
            if name not in known:
                hint = self._problems.hint(name.replace("_", "-"), known)
                self._error(f"unknown key {name!r}{what}{hint}", *path, name)

    def _require_together(self, commanded: bool) -> None:
        """Notes what would mean nothing beside the command, or without one."""
        for name in self._table:
            if name not in KEYS or KEYS[name].form in _NO_OPTIONS:
                continue
            dest = name.replace("-", "_")
            if commanded and dest not in modes.MODES["command"]:
                self._error(f"{name} means nothing beside command; leave one of them out", name)
            if not commanded and dest in modes.COMMANDED:
                self._error(f"{name} means something beside command alone; leave it out", name)

    def _value(self, given: Any, name: str, form: Form, folder: Path) -> Any:
        """`given` as the option of this name has it; None, and a problem, where it can't be."""
        words = _words(given, form)
        if words is None:
            self._error(f"{name} = {_shown(given)}: give {HOLDS[form].replace('`', '')}", name)
            return None
        if form == "flag":
            return given
        if form == "path":
            return _seen(folder, words[0])
        if form == "paths":
            return [_seen(folder, word) for word in words]
        if name == "contract":
            return tuple(_contract(folder, word) for word in words)
        option = self._options[name.replace("-", "_")]
        try:
            return option.type(",".join(words)) if callable(option.type) else words[0]
        except argparse.ArgumentTypeError as error:
            self._error(f"{name} = {_shown(given)}: {error}", name)
            return None

    def _command(self, given: Any, name: str) -> tuple[str, ...]:
        words: list[Any] = given if isinstance(given, list) else []
        try:
            words = shlex.split(given) if isinstance(given, str) else words
        except ValueError as error:
            self._error(f"{name} = {_shown(given)}: {error}", name)
            return ()
        if not words or not all(isinstance(word, str) for word in words) or not words[0]:
            self._error(f"{name} = {_shown(given)}: give {HOLDS['command']}", name)
            return ()
        return tuple(words)

    def _exclusions(self, given: Any, name: str) -> list[Exclusion]:
        if not isinstance(given, list):
            self._error(f"{name} is a list of tables of {', '.join(EXCLUSION)}", name)
            return []
        found: list[Exclusion] = []
        for number, entry in enumerate(given):
            if isinstance(entry, dict):
                found += self._exclusion(entry, (name, number))
            else:
                told = 'give {clause = "ID", reason = "why", until = DATE}'
                self._error(f"{name} = [{_shown(entry)}]: {told}", name, number)
        return found

    def _exclusion(self, entry: Mapping[str, Any], path: positions.Path) -> list[Exclusion]:
        """One for each clause that `entry` names; none, and a problem, where it is wrong."""
        self._require_known(entry, path, EXCLUSION, " of an exclusion")
        clauses = _words(entry.get("clause"), "texts")
        reason, until, kind = entry.get("reason"), entry.get("until"), entry.get("kind", KINDS[0])
        if clauses is None:
            self._error('an exclusion names no clause: clause = "ID"', *path)
        if not isinstance(reason, str) or not reason.strip():
            self._error("an exclusion has no reason: say why in reason", *path)
        if kind not in KINDS:
            told = self._problems.hint(str(kind), KINDS)
            self._error(f"kind = {_shown(kind)} of an exclusion{told}", *path, "kind")
        elif kind == KINDS[0] and type(until) is not datetime.date:
            told = "has no end date" if until is None else f"until = {_shown(until)}: is no date"
            self._error(
                f"an exclusion {told}: say until = YYYY-MM-DD, without quotes, the last day of it; "
                f'of a clause that can never apply say kind = "{KINDS[1]}"',
                *(*path, *([] if until is None else ["until"])),
            )
        elif kind == KINDS[1] and until is not None:
            self._error(f'kind = "{KINDS[1]}" has no end date; leave until out', *path, "until")
        excluded = partial(Exclusion, reason=str(reason), until=until, place=self._at(*path))
        return [excluded(clause=clause) for clause in clauses or ()]


def _has_nul(given: Any) -> bool:
    if isinstance(given, dict):
        return any(map(_has_nul, (*given, *given.values())))
    if isinstance(given, list):
        return any(map(_has_nul, given))
    return isinstance(given, str) and "\0" in given


def _words(given: Any, form: Form) -> list[str] | None:
    """`given` as the words that the option of this form takes; None where it is of another type."""
    if form == "flag":
        return [] if isinstance(given, bool) else None
    many = form in ("texts", "counts", "paths")
    members = given if many and isinstance(given, list) else [given]
    allowed: tuple[type, ...] = (str,)
    if form in ("count", "counts", "seconds"):
        allowed = (int, float) if form == "seconds" else (int,)
    if not members or not all(type(one) in allowed and one != "" for one in members):
        return None
    return [str(one) for one in members]


def _shown(given: Any) -> str:
    text = repr(given) if isinstance(given, str) else str(given)
    return escaping.shortened(text, chars_max=80)


def _seen(folder: Path, name: str) -> Path:
    """A path of the file, seen from the current folder."""
    return Path(os.path.relpath(folder / name))


def _contract(folder: Path, name: str) -> str:
    """A contract of the file's folder, seen from the current one; else a shipped one's name."""
    is_path = os.sep in name or (folder / name).exists()
    return str(_seen(folder, name)) if is_path else name
