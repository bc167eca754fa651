"""Read a configuration: check all keys and their types, report all problems with their places."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrenar_py.check.cli.options import modes, parser
from entrenar_py.check.contract.validation import Suppression
from entrenar_py.check.project import location, positions, tables
from entrenar_py.check.project.keys import HOLDS, KEYS
from entrenar_py.check.project.tables import Acceptance, Exclusion, Table
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import ContractError, UsageError

# Form -> the reader of keys without an option; each of these keys has a field of Project.
_PARTS: Mapping[str, Callable[[Table, str, Any], Any]] = {
    "command": tables.command,
    "knobs": tables.knobs,
    "exclusions": tables.exclusions,
    "acceptances": tables.acceptances,
    "levels": tables.rule_levels,
    "suppressions": tables.suppressed,
}
_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A configuration as it was read, from a file in `folder`; `command` is empty if it has none.

    `values` are keyed by the names of parsed options (`world_size`), and paths in them are relative
    to the current folder. `places` has the place of each value.
    """

    place: Position
    folder: Path
    values: Mapping[str, Any]
    places: Mapping[str, Position]
    command: tuple[str, ...] = ()
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()
    acceptances: tuple[Acceptance, ...] = ()
    levels: Mapping[str, str] = field(default_factory=dict)
    suppressions: tuple[Suppression, ...] = ()


def load(path: Path) -> Project:
    """Return the configuration at `path`.

    Raises ContractError with all problems at once, each `file:line:column: error: ...`, and
    UsageError for a file that can't be read.
    """
    text = location.read(path)
    file = os.path.relpath(path)
    try:
        content = location.parse(text)
    except ValueError as error:
        raise ContractError([_undecodable(file, text, str(error))]) from error
    where: positions.Path = ("tool", location.TABLE)
    tools = content.get("tool", {})
    keys = tools.get(location.TABLE) if isinstance(tools, dict) else None
    if keys is None and path.name != location.SHARED:
        where, keys = (), content
    if keys is None:
        raise UsageError(
            f"configuration {file}: has no table [tool.{location.TABLE}]; {parser.PROG} init "
            "writes one"
        )
    problems = Problems()
    table = Table(file=file, path=where, places=positions.scan(text), problems=problems)
    if not isinstance(keys, dict):
        name = ".".join(map(str, where))
        known = ", ".join(KEYS)
        table.error(f"{name} = {tables.shown(keys)}: give a table with keys among {known}")
        keys = {}
    project = _project(table, keys, path.parent)
    problems.settle(strict=True)
    return project


def _undecodable(file: str, text: str, message: str) -> str:
    found = _PLACE.search(message)
    line, column = found.groups() if found else (text.count("\n") + 1, 1)
    return f"{file}:{line}:{column}: error: no TOML: {_PLACE.sub('', message)}"


def _project(table: Table, keys: Mapping[str, Any], folder: Path) -> Project:
    """Read every key; a key with a wrong value is reported as a problem and left out."""
    table.require_known(keys, KEYS)
    options = {action.dest: action for action in parser.build()._actions}
    values: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for name, key in KEYS.items():
        if name not in keys:
            continue
        if _has_nul(keys[name]):
            table.error(f"{name} holds a NUL, which is in no path, word or id; remove it", name)
        elif key.form in _PARTS:
            parts[key.form] = _PARTS[key.form](table, name, keys[name])
        elif (value := _value(table, name, keys[name], folder, options)) is not None:
            values[_dest(name)] = value
    _require_together(table, keys, commanded=bool(parts.get("command")))
    if "contract" not in keys:
        table.error("contract is missing; name the contracts to check")
    places = {_dest(name): table.at(name) for name in KEYS if name in keys}
    return Project(place=table.at(), folder=folder, values=values, places=places, **parts)


def _dest(name: str) -> str:
    """Return the name that a key has in parsed options."""
    return name.replace("-", "_")


def _require_together(table: Table, keys: Collection[str], *, commanded: bool) -> None:
    """Report keys that have no effect because there is a command, or because there is none."""
    for name in keys:
        form = KEYS[name].form if name in KEYS else "command"
        if form == "knobs" and "command" not in keys:
            table.error(f"{name} has an effect only with command; leave it out", name)
        if form in _PARTS:
            continue
        if commanded and _dest(name) not in modes.MODES["command"]:
            table.error(f"{name} has no effect with command; leave one of them out", name)
        if not commanded and _dest(name) in modes.COMMANDED:
            table.error(f"{name} has an effect only with command; leave it out", name)


def _value(
    table: Table, name: str, raw: Any, folder: Path, options: Mapping[str, argparse.Action]
) -> Any:
    """Return `raw` as its option would parse it; if it is wrong, report that and return None."""
    form = KEYS[name].form
    words = _words(raw, form)
    if words is None:
        holds = HOLDS[form].replace("`", "")
        table.error(f"{name} = {tables.shown(raw)}: give {holds}", name)
        return None
    if form == "flag":
        return raw
    if form == "path":
        return _seen(folder, words[0])
    if form == "paths":
        return [_seen(folder, word) for word in words]
    if name == "contract":
        return tuple(_contract(folder, word) for word in words)
    read, choices = options[_dest(name)].type, options[_dest(name)].choices
    if choices is not None and words[0] not in choices:
        table.error(f"{name} = {tables.shown(raw)}: give one of {', '.join(choices)}", name)
        return None
    try:
        return read(",".join(words)) if callable(read) else words[0]
    except argparse.ArgumentTypeError as error:
        table.error(f"{name} = {tables.shown(raw)}: {error}", name)
        return None


def _has_nul(given: Any) -> bool:
    if isinstance(given, dict):
        return any(map(_has_nul, (*given, *given.values())))
    if isinstance(given, list):
        return any(map(_has_nul, given))
    return isinstance(given, str) and "\0" in given


def _words(given: Any, form: str) -> list[str] | None:
    """Return `given` as words for an option of this form; None if it has another type."""
    if form == "flag":
        return [] if isinstance(given, bool) else None
    members = given if form in ("texts", "counts", "paths") and isinstance(given, list) else [given]
    types = {"count": (int,), "counts": (int,), "seconds": (int, float)}.get(form, (str,))
    if not members or not all(type(member) in types and member != "" for member in members):
        return None
    return [str(member) for member in members]


def _seen(folder: Path, name: str) -> Path:
    """Return the path `name`, which is relative to `folder`, relative to the current folder."""
    return Path(os.path.relpath(folder / name))


def _contract(folder: Path, name: str) -> str:
    """Return a contract's path relative to the current folder, or a shipped contract's name."""
    is_path = os.sep in name or (folder / name).exists()
    return str(_seen(folder, name)) if is_path else name
