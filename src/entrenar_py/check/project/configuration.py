"""A project's configuration: its keys, its values, and the clauses that it leaves out of a run.

`KEYS` has the type and meaning of each key; the docs are generated from it. A key has the name of
its option, without the dashes, and takes the values that the option allows. A few keys have no
option, such as `command` and `exclude`. All problems are reported together, with their places.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrenar_py.check.contract import Invariant
from entrenar_py.check.project import command_line, toml_file
from entrenar_py.check.reports.report import Excluded, NotApplying
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.shared.untrusted import escaping

# Form of a key -> a description of its values.
HOLDS: Mapping[str, str] = {
    "text": "text",
    "texts": "text, or list of texts",
    "count": "whole number",
    "counts": "whole number, or list of them",
    "seconds": "number of seconds",
    "flag": "`true` or `false`",
    "path": "path",
    "paths": "path, or list of paths",
    "command": "text, or list of words",
    "exclusions": "list of tables, see below",
    "date": "date, without quotes",
    "knobs": "table of tables of text",
    "acceptances": "table of reasons by clause",
}


@dataclass(frozen=True)
class Key:
    """A key: `form` is a row of HOLDS, `usual` is the default in words, `means` is its meaning."""

    form: str
    usual: str
    means: str


_PER_CONTRACT = "; `{contract}` in it is the contract's name, needed where there are several"
KEYS: Mapping[str, Key] = {
    "contract": Key(
        "texts",
        "required",
        "YAML contracts, by path or by the name of a shipped one; each has a report",
    ),
    "command": Key(
        "command",
        "none",
        "the command that trains, with its [placeholders](your-trainer.md#what-is-run); it runs in "
        "the file's folder",
    ),
    "bind": Key(
        "paths",
        "none",
        "files of [bindings](bindings.md), besides those that lie next to a contract; each is for "
        "the contract that it names",
    ),
    "knobs": Key(
        "knobs",
        "each knob's own values",
        "how the script spells a [knob](your-trainer.md#knobs)'s values, as in `knobs.strategy = "
        '{on = "ddp", off = "none"}`; if the value is `""`, a word of the command that is only '
        "the knob is left out",
    ),
    "steps": Key("count", "`8`", "what `{steps}` stands for in the command"),
    "epochs": Key("count", "`2`", "what `{epochs}` stands for in the command"),
    "auto": Key(
        "flag",
        "whether no line of the script calls `observe()`",
        "observe the command's script [even if it doesn't call `observe()`](auto.md)",
    ),
    "deadline": Key("seconds", "`300`", "a run of the command is ended after this time"),
    "in-place": Key(
        "flag",
        "`false`",
        "all runs of the command work in the file's folder itself, instead of each "
        "in [a copy of it](your-trainer.md#where-a-run-works)",
    ),
    "launcher": Key(
        "text",
        "`forked`",
        "`forked` or `as-is`: whether the command's launcher and ranks may be "
        "[forked](your-trainer.md#what-is-run) from a process that has imported torch",
    ),
    "system": Key("text", "the contract's own", "the trainer to try, where there is no command"),
    "backend": Key(
        "texts", "`cpu`", "backends, given to the workers in turn, where there is no command"
    ),
    "examples": Key("count", "`20`", "random scenarios per invariant, where there is no command"),
    "timeout": Key("seconds", "none", "no new run is started after this time; not for a command"),
    "world-size": Key("counts", "the contract's; with a command `2`", "numbers of workers"),
    "seed": Key("count", "`0`", "added to every seed; with a command what `{seed}` stands for"),
    "only": Key("texts", "all", "ids of the clauses to try"),
    "severity": Key("texts", "all", "severities of the clauses to try: `P0`, `P1`, `P2`"),
    "exclude": Key("exclusions", "none", "clauses that are not tried, and why"),
    "accept": Key(
        "acceptances",
        "none",
        "clauses with a falsification that is known and accepted, and why: they are tried and "
        "reported, and don't change the exit code",
    ),
    "allow-inconclusive": Key("flag", "`false`", "exit 0 instead of 4 where nothing broke"),
    "strict": Key("flag", "`false`", "the contract's warnings are errors"),
    "suppress": Key("texts", "none", "[rules](contract-rules.md) that `--validate` ignores"),
    "json": Key("path", "not written", f"the report as JSON{_PER_CONTRACT}"),
    "junit": Key("path", "not written", "the report as JUnit XML; `{contract}` as in `json`"),
    "sarif": Key("path", "not written", "the report as SARIF; `{contract}` as in `json`"),
    "html": Key("path", "not written", "the report as one page; `{contract}` as in `json`"),
    "github": Key("flag", "`false`", "annotations and summary, where a GitHub workflow runs this"),
    "trace-dir": Key(
        "path", "runs are not kept", "folder for every run's trace; `{contract}` as in `json`"
    ),
    "quiet": Key("flag", "`false`", "show only what did not hold"),
}

# The keys of an entry of `exclude`.
EXCLUSION: Mapping[str, Key] = {
    "clause": Key("texts", "required", "ids of clauses"),
    "reason": Key("text", "required", "why; every report repeats it"),
    "until": Key(
        "date",
        "required, unless `kind` says that it can't apply",
        "the last day on which it is left out (`2027-01-31`); from the next day on the clause is "
        "tried again, and the report says so",
    ),
    "kind": Key(
        "text",
        '`"excluded"`',
        '`"not-applicable"`: the clause can never apply to this trainer; such an exclusion '
        "has no end date",
    ),
}
KINDS = ("excluded", "not-applicable")


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A clause that the configuration leaves out, with the place and the reason.

    `until` is the last day of the exclusion, or None if the clause can never apply to this trainer.
    """

    clause: str
    reason: str
    until: datetime.date | None
    place: Position

    def is_void(self, today: datetime.date) -> bool:
        """Return whether the last day of the exclusion is over."""
        return self.until is not None and self.until < today


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """A clause that may be falsified, with the reason and the place in the configuration."""

    clause: str
    reason: str
    place: Position


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table at key path `path` of `file`. `places` has the line and column of all its keys."""

    file: str
    path: toml_file.KeyPath
    places: Mapping[toml_file.KeyPath, toml_file.Place]
    problems: Problems

    def at(self, *path: str | int) -> Position:
        """Return the place of `path` in the table; if it has none, of the nearest key around it."""
        whole = (*self.path, *path)
        while whole and whole not in self.places:
            whole = whole[:-1]
        return Position(self.file, *self.places.get(whole, (1, 1)))

    def error(self, message: str, *path: str | int) -> None:
        """Record an error at `path`."""
        self.problems.error(self.at(*path), message)

    def require_known(
        self, keys: Collection[str], known: Collection[str], *path: str | int, of: str = ""
    ) -> None:
        """Record an error for each of `keys`, in the table at `path`, that is not in `known`."""
        for key in keys:
            if key not in known:
                hint = self.problems.hint(key.replace("_", "-"), known)
                self.error(f"unknown key {key!r}{of}{hint}", *path, key)


def shown(value: Any) -> str:
    """Return a value of the configuration as text for messages."""
    text = repr(value) if isinstance(value, str) else str(value)
    return escaping.shortened(text, chars_max=80)


def read_command(table: Table, key: str, value: Any) -> tuple[str, ...]:
    """Return the words of a command. A single text is split as in a shell."""
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


def read_knobs(table: Table, key: str, value: Any) -> dict[str, dict[str, str]]:
    """Return knob -> value -> the text that stands for the value in the command.

    Whether these knobs exist is checked later, together with the command.
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


def read_exclusions(table: Table, key: str, value: Any) -> tuple[Exclusion, ...]:
    """Return the exclusions in a list of tables, one for each clause that an entry names."""
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


def read_acceptances(table: Table, key: str, value: Any) -> tuple[Acceptance, ...]:
    """Return the acceptances in a table that maps clauses to reasons."""
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
    """Record an error for a missing end date, or for one on a clause that can never apply."""
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
    """Return the entries of a list of tables. For an entry of another type, report it; add None.

    `first` is the first key of an entry, with an example of its value, for the message.
    """
    form = f'{{{first}, reason = "why", until = DATE}}'
    if not isinstance(value, list):
        table.error(f"{key} = {shown(value)}: give a list of tables, such as {form}", key)
        return []
    for number, entry in enumerate(value):
        if not isinstance(entry, dict):
            table.error(f"{key} = [{shown(entry)}]: give {form}", key, number)
    return [entry if isinstance(entry, dict) else None for entry in value]


# Form of a key without an option -> its reader. Each of these keys has a field of Project.
_PARTS: Mapping[str, Callable[[Table, str, Any], Any]] = {
    "command": read_command,
    "knobs": read_knobs,
    "exclusions": read_exclusions,
    "acceptances": read_acceptances,
}
_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A configuration, as read from a file in `folder`. `command` is empty if it has none.

    The keys of `values` are the names of parsed options (`world_size`). Paths in `values` are
    relative to the current folder. `places` has the place of each value.
    """

    place: Position
    folder: Path
    values: Mapping[str, Any]
    places: Mapping[str, Position]
    command: tuple[str, ...] = ()
    knobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()
    acceptances: tuple[Acceptance, ...] = ()


def load(path: Path) -> Project:
    """Return the configuration at `path`.

    Raises ContractError with all problems at once, each `file:line:column: error: ...`, and
    UsageError for a file that can't be read.
    """
    text = toml_file.read(path)
    file = os.path.relpath(path)
    try:
        content = toml_file.parse(text)
    except ValueError as error:
        raise ContractError([_undecodable(file, text, str(error))]) from error
    where: toml_file.KeyPath = ("tool", toml_file.TABLE)
    tools = content.get("tool", {})
    keys = tools.get(toml_file.TABLE) if isinstance(tools, dict) else None
    if keys is None and path.name != toml_file.SHARED:
        where, keys = (), content
    if keys is None:
        raise UsageError(
            f"configuration {file}: has no table [tool.{toml_file.TABLE}]; "
            f"{command_line.PROG} init writes one"
        )
    problems = Problems()
    table = Table(file=file, path=where, places=toml_file.scan(text), problems=problems)
    if not isinstance(keys, dict):
        name = ".".join(map(str, where))
        known = ", ".join(KEYS)
        table.error(f"{name} = {shown(keys)}: give a table with keys among {known}")
        keys = {}
    project = _project(table, keys, path.parent)
    problems.settle(strict=True)
    return project


def _undecodable(file: str, text: str, message: str) -> str:
    found = _PLACE.search(message)
    line, column = found.groups() if found else (text.count("\n") + 1, 1)
    return f"{file}:{line}:{column}: error: no TOML: {_PLACE.sub('', message)}"


def _project(table: Table, keys: Mapping[str, Any], folder: Path) -> Project:
    """Return the project with the values of all keys.

    A wrong value is reported, and its key left out.
    """
    table.require_known(keys, KEYS)
    options = {action.dest: action for action in command_line.build()._actions}
    values: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for name, key in KEYS.items():
        if name not in keys:
            continue
        if _has_nul(keys[name]):
            table.error(
                f"{name} contains a NUL character, which no path, word or id may contain; "
                "remove it",
                name,
            )
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
    return name.replace("-", "_")


def _require_together(table: Table, keys: Collection[str], *, commanded: bool) -> None:
    """Record errors for keys that have no effect with a command, or without one."""
    for name in keys:
        form = KEYS[name].form if name in KEYS else "command"
        if form == "knobs" and "command" not in keys:
            table.error(f"{name} has an effect only with the key command; leave {name} out", name)
        if form in _PARTS or name == "suppress":
            continue
        if commanded and _dest(name) not in command_line.MODES["command"]:
            table.error(f"{name} has no effect with the key command; leave one of them out", name)
        if not commanded and _dest(name) in command_line.COMMANDED:
            table.error(f"{name} has an effect only with the key command; leave {name} out", name)


def _value(
    table: Table, name: str, raw: Any, folder: Path, options: Mapping[str, argparse.Action]
) -> Any:
    """Return the value of option `name` for `raw`. If it is wrong, report that and return None."""
    form = KEYS[name].form
    words = _words(raw, form)
    if words is None:
        holds = HOLDS[form].replace("`", "")
        table.error(f"{name} = {shown(raw)}: give {holds}", name)
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
        table.error(f"{name} = {shown(raw)}: give one of {', '.join(choices)}", name)
        return None
    try:
        return read(",".join(words)) if callable(read) else words[0]
    except argparse.ArgumentTypeError as error:
        table.error(f"{name} = {shown(raw)}: {error}", name)
        return None


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nul, (*value, *value.values())))
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def _words(value: Any, form: str) -> list[str] | None:
    """Return `value` as words for an option of this form, or None if it has a different type."""
    if form == "flag":
        return [] if isinstance(value, bool) else None
    members = value if form in ("texts", "counts", "paths") and isinstance(value, list) else [value]
    types = {"count": (int,), "counts": (int,), "seconds": (int, float)}.get(form, (str,))
    if not members or not all(type(member) in types and member != "" for member in members):
        return None
    return [str(member) for member in members]


def _seen(folder: Path, name: str) -> Path:
    return Path(os.path.relpath(folder / name))


def _contract(folder: Path, name: str) -> str:
    is_path = os.sep in name or (folder / name).exists()
    return str(_seen(folder, name)) if is_path else name


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The clauses that are tested (`selected`), and the clauses that are left out.

    - `notes`: clause id -> a text, if the clause is tested although the configuration excludes it.
    - `accepted`: clause id -> why its falsification is accepted, and the place of that.
    """

    selected: tuple[Invariant, ...]
    excluded: tuple[Excluded, ...] = ()
    not_applying: tuple[NotApplying, ...] = ()
    notes: Mapping[str, str]
    accepted: Mapping[str, str] = field(default_factory=dict)


def apply(
    selected: Sequence[Invariant],
    exclusions: Sequence[Exclusion],
    acceptances: Sequence[Acceptance] = (),
    *,
    named: Collection[str] = (),
    today: datetime.date | None = None,
) -> Standing:
    """Return which of the selected clauses are tested, left out or accepted.

    Clauses that are `named` on the command line are tested even if they are excluded. `today` is
    this machine's date by default.
    """
    day = today or datetime.date.today()
    by_clause = {exclusion.clause: exclusion for exclusion in exclusions}
    left: list[Invariant] = []
    excluded: list[Excluded] = []
    not_applying: list[NotApplying] = []
    notes: dict[str, str] = {}
    for clause in selected:
        entry = by_clause.get(clause.id) or by_clause.get(clause.item)
        if entry is None:
            left.append(clause)
        elif {clause.id, clause.item} & set(named):
            left.append(clause)
            notes[clause.id] = f"tried because --only names it, although {entry.place} excludes it"
        elif entry.is_void(day):
            left.append(clause)
            notes[clause.id] = (
                f"its exclusion ended with {entry.until}, so it is tried again: {entry.reason} "
                f"({entry.place})"
            )
        elif entry.until is None:
            why = f"{entry.reason} ({entry.place})"
            not_applying.append(NotApplying(invariant=clause, reason=why))
        else:
            place = str(entry.place)
            excluded.append(
                Excluded(invariant=clause, reason=entry.reason, until=entry.until, place=place)
            )
    return Standing(
        selected=tuple(left),
        excluded=tuple(excluded),
        not_applying=tuple(not_applying),
        notes=notes,
        accepted={
            clause.id: f"{acceptance.reason} ({acceptance.place})"
            for acceptance in acceptances
            for clause in left
            if acceptance.clause in (clause.id, clause.item)
        },
    )


def require_known(
    exclusions: Sequence[Exclusion], ids: Collection[str], acceptances: Sequence[Acceptance] = ()
) -> None:
    """Raise ContractError for a clause that is unknown or has two entries."""
    problems = Problems()
    seen: dict[str, Exclusion | Acceptance] = {}
    entries: list[Exclusion | Acceptance] = [*exclusions, *acceptances]
    for entry in entries:
        clause = entry.clause
        if clause not in ids:
            hint = problems.hint(clause, ids)
            message = f"clause {clause!r} is in none of the contracts{hint}"
            problems.error(entry.place, message)
        elif clause in seen:
            message = f"clause {clause!r} is excluded at {seen[clause].place}, too; keep one"
            problems.error(entry.place, message)
        seen.setdefault(clause, entry)
    problems.settle(strict=True)
