"""Reads files of bindings: which check tries each statement of a contract.

As in a contract, values have places, problems are reported together, and nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.check.contract.items import DIGEST_CHARS, KINDS
from entrenar_py.check.contract.records import SEVERITIES, TOLERANCE_KINDS
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.untrusted import escaping

SUFFIX = ".bindings.yaml"
VERSION = "1"
MARK = "entrenar_bindings"
_PAGE = "docs/bindings.md"
_FORM = f"a file of bindings is a mapping ({MARK}, contract, bindings); see {_PAGE}"
_FILE_KEYS = (MARK, "contract", "bindings")
_TRIED = (
    *("check", "tolerance", "tolerance_kind", "scenarios", "options", "systems"),
    *("severity", "critical", "mutants", "reason"),
)
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_CHARS}}}")
ENTRY_KEYS = (*KINDS, "part", "statement", "gate_names", "not_tried", "guess", *_TRIED)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One binding: the statement (`kind` and `name`), and its `check` or why it is `not_tried`.

    The file's key `options` is merged into each scenario. `record` is the mapping itself, for
    messages. If `severity` or `tolerance` is None, the statement's own applies.
    """

    kind: str
    name: str
    record: Record
    position: Position
    part: str
    statement: str
    gate_names: tuple[str, ...]
    check: str
    not_tried: str
    reason: str
    tolerance: float | None
    tolerance_kind: str | None
    scenarios: tuple[Mapping[str, Any], ...]
    systems: tuple[str, ...]
    severity: str | None
    critical: bool
    mutants: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BindingFile:
    """The bindings in one file; `contract` is the name of their contract, without its suffix."""

    path: Path
    contract: str
    contract_at: Position
    entries: tuple[Entry, ...]


def read(path: Path, problems: Problems) -> BindingFile | None:
    """Return the bindings at `path`. For any other file, record an error and return None."""
    root = composer.load(path, problems, form=_FORM)
    if root is None:
        return None
    if MARK not in root.fields:
        message = f"no key {MARK}: {VERSION}, so this is not a file of bindings; see {_PAGE}"
        problems.error(root.at, message)
        return None
    file = Record(root, what="bindings", known=_FILE_KEYS, problems=problems)
    _refuse_unknown(file)
    version = file.text(MARK)
    if version != VERSION:
        file.error(MARK, f"{MARK} is {VERSION} in this release; given is {version!r}")
    name = file.filled("contract")
    entries = tuple(_entries(file))
    if not file.maps("bindings"):
        file.error("bindings", "the list is empty; add a binding")
    return BindingFile(
        path=path, contract=stem(name), contract_at=file.place("contract"), entries=entries
    )


def stem(name: str) -> str:
    """Return the file name of a contract without `.yaml` or `.yml`."""
    return name.removesuffix(".yaml").removesuffix(".yml")


def for_contract(
    given: Sequence[Path], contract: str, contracts: Collection[str]
) -> tuple[Path, ...]:
    """Return `given` without the files that are for one of `contracts` other than `contract`."""
    others = {stem(Path(name).name) for name in contracts} - {stem(Path(contract).name)}
    return tuple(path for path in given if not others or _contract_of(path) not in others)


def _contract_of(path: Path) -> str:
    file = read(path, Problems())  # its problems are reported when its contract is loaded
    return "" if file is None else file.contract


def _refuse_unknown(record: Record) -> None:
    for key, at in record.node.keys.items():
        if key not in record.known:
            hint = record.problems.hint(key, record.known)
            record.problems.error(at, f"{record.what}: key {key!r} is unknown{hint}")


def _entries(file: Record) -> Iterator[Entry]:
    for node in file.maps("bindings"):
        record = Record(node, what="binding", known=ENTRY_KEYS, problems=file.problems)
        kinds = [kind for kind in KINDS if kind in node.fields]
        if len(kinds) != 1:
            given_kinds = " and ".join(kinds) or "none"
            message = f"a binding names one of {', '.join(KINDS)}; given is {given_kinds}"
            record.problems.error(node.at, message)
            _refuse_unknown(record)
            continue
        kind = kinds[0]
        value = node.fields[kind]
        name = " ".join(value.text.split()) if isinstance(value, ScalarNode) else ""
        if name:
            record.what = f"binding of {name}"
            yield _entry(kind, name, record)
        else:
            record.error(kind, f"{kind} takes one text, the id or the name of the {kind}")


def _entry(kind: str, name: str, record: Record) -> Entry:
    _refuse_unknown(record)
    if record.present("guess") is not None:
        message = "is still a guess: read the statement and the check, then remove this line"
        record.problems.error(record.node.keys["guess"], f"{record.what}: {message}")
    _require_check_or_reason(record)
    statement = record.text("statement")
    if statement and not _DIGEST.fullmatch(statement):
        given = escaping.shortened(statement, chars_max=80)
        message = f"statement is {DIGEST_CHARS} hex digits, as --suggest writes them"
        record.error("statement", f"{message}; given is {given!r}")
    return record.read_as(
        Entry,
        kind=kind,
        name=name,
        record=record,
        position=record.node.at,
        tolerance=record.number("tolerance"),
        tolerance_kind=record.choice("tolerance_kind", TOLERANCE_KINDS),
        scenarios=_scenarios(record),
        severity=record.choice("severity", SEVERITIES),
        critical=record.flag("critical"),
    )


def _require_check_or_reason(record: Record) -> None:
    """Require a `check` with a `reason`, or `not_tried` without keys that only a check uses."""
    check, not_tried = record.text("check"), record.text("not_tried")
    if bool(check) == bool(not_tried):
        both = "both are" if check else "neither is"
        what = "a binding has a check, or says in not_tried why nothing can be compared"
        record.problems.error(record.node.at, f"{record.what}: {what}; {both} given")
    elif check:
        record.filled("reason")
    for key in _TRIED if not_tried and not check else ():
        if key in record.node.fields:
            message = f"{key} has no effect with not_tried; remove it"
            record.problems.error(record.node.keys[key], f"{record.what}: {message}")


def _scenarios(record: Record) -> tuple[Mapping[str, Any], ...]:
    """Return the scenarios as plain data, with the binding's `options` merged into each."""
    scenarios = [plain(node) for node in record.maps("scenarios")]
    options = record.present("options")
    if options is None:
        return tuple(scenarios)
    if not isinstance(options, MapNode):
        record.error("options", "options is a mapping")
    elif not scenarios:
        record.error(
            "options", "options are added to its scenarios, and it has none; add scenarios"
        )
    else:
        for scenario in scenarios:
            own = scenario.get("options", {})
            if isinstance(own, dict):  # else expanding the scenario reports the error
                scenario["options"] = {**plain(options), **own}
    return tuple(scenarios)
