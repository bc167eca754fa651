"""Applies files of bindings to the statements of a contract.

Bindings have three sources: the shipped file for the contract's name, the file next to the
contract, and the files given by the user. The last source that binds a statement wins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py.check.contract import binding_file, bound_clauses, scenario_counts
from entrenar_py.check.contract.binding_file import SUFFIX, BindingFile, Entry
from entrenar_py.check.contract.bound_clauses import Bound
from entrenar_py.check.contract.items import Item
from entrenar_py.check.contract.records import Invariant
from entrenar_py.check.contract.vocabulary import Vocabulary
from entrenar_py.shared import shipped
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.untrusted import escaping


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of bindings for the contract with this `stem`; None for one that does not exist.

    `shipped` is part of this package, `beside` lies next to the contract, `given` are the user's.
    """

    stem: str
    shipped: Path | None
    beside: Path | None
    given: tuple[Path, ...]


def files(contract: Path, given: Sequence[Path]) -> Files:
    """Return the files that may hold bindings of `contract`."""
    stem = binding_file.stem(contract.name)
    beside = contract.with_name(f"{stem}{SUFFIX}")
    return Files(
        stem=stem,
        shipped=shipped.bindings(stem),
        beside=beside if _says_something(beside) else None,
        given=tuple(dict.fromkeys(given)),
    )


def _says_something(beside: Path) -> bool:
    """Return whether `beside` exists and isn't empty; `--suggest > FILE` first creates it empty.

    A pipe, a folder or a link to itself counts as not empty: reading it reports the error.
    """
    is_empty = beside.is_file() and beside.stat().st_size == 0
    return os.path.lexists(beside) and not is_empty


def bind(
    known: Sequence[Item], files: Files, terms: Vocabulary, problems: Problems
) -> tuple[Invariant, ...]:
    """Return the clauses: one for each binding, and one for each unbound statement that `counts`.

    Errors in a file of bindings are added to `problems`.
    """
    chosen = _choose(known, files, problems)
    clauses: list[Invariant] = []
    room = scenario_counts.Room(problems)
    for item in known:
        bound = chosen.get((item.kind, item.id), ())
        if not bound and item.counts:
            clauses.append(item.clause)
        clauses += [bound_clauses.clause(item, binding, terms, room) for binding in bound]
    return tuple(clauses)


def _choose(
    known: Sequence[Item], files: Files, problems: Problems
) -> dict[tuple[str, str], list[Bound]]:
    """Return (kind, id) of an item -> its bindings, from the last source that has some."""
    chosen = _shipped(known, files, problems)
    for paths in ((files.beside,), files.given):
        bindings_by_item: dict[tuple[str, str], list[Bound]] = {}
        for path in paths:
            loaded = None if path is None else binding_file.read(path, problems)
            if loaded is not None and _is_for(loaded, files.stem, problems):
                _collect(loaded, known, bindings_by_item)
        for bound in bindings_by_item.values():
            _require_parts(bound)
        chosen.update(bindings_by_item)
    return chosen


def _is_for(file: BindingFile, wanted: str, problems: Problems) -> bool:
    if file.contract in ("", wanted):
        return True
    given = escaping.shortened(file.contract, chars_max=80)
    message = f"bindings: contract={given!r}: the file was read for {wanted!r}; correct the name"
    problems.error(file.contract_at, message)
    return False


def _shipped(
    known: Sequence[Item], files: Files, problems: Problems
) -> dict[tuple[str, str], list[Bound]]:
    """Return the shipped bindings, if they were written for this contract.

    The file's name is not enough: the digest of at least one bound statement has to match too.
    """
    if files.shipped is None:
        return {}
    quiet = Problems()
    loaded = binding_file.read(files.shipped, quiet)
    bindings_by_item: dict[tuple[str, str], list[Bound]] = {}
    if loaded is not None:
        _collect(loaded, known, bindings_by_item)
    if all(binding.stale for bound in bindings_by_item.values() for binding in bound):
        return {}
    for bound in bindings_by_item.values():
        for binding in bound:
            if binding.stale:
                message = f"{binding.entry.record.what}: {binding.stale}"
                problems.warn(binding.entry.position, message)
    return bindings_by_item


def _collect(
    file: BindingFile, known: Sequence[Item], bindings_by_item: dict[tuple[str, str], list[Bound]]
) -> None:
    """Add each binding of `file` to `bindings_by_item`, under the item that it names."""
    for entry in file.entries:
        named = [
            item
            for item in known
            if item.kind == entry.kind
            and any(" ".join(name.split()) == entry.name for name in item.names)
        ]
        if len(named) != 1:
            _refuse(entry, named, known)
            continue
        item, stale = named[0], ""
        if entry.statement and entry.statement != item.digest:
            stale = (
                f"its binding was made for another wording ({entry.statement}, now {item.digest}): "
                "read the statement again, then write the new digest"
            )
            entry.record.warn("statement", stale)
        bound = Bound(entry=entry, stale=stale)
        bindings_by_item.setdefault((item.kind, item.id), []).append(bound)


def _refuse(entry: Entry, named: Sequence[Item], known: Sequence[Item]) -> None:
    if named:
        ids = ", ".join(item.id for item in named)
        entry.record.error(entry.kind, f"{entry.name!r} is the name of {ids}; use one of these ids")
        return
    names = [name for item in known if item.kind == entry.kind for name in item.names]
    such = "such " if names else ""
    hint = entry.record.problems.hint(entry.name, names, otherwise=None if names else "remove it")
    entry.record.error(entry.kind, f"the contract has no {such}{entry.kind}{hint}")


def _require_parts(bound: Sequence[Bound]) -> None:
    """Require that several bindings of one statement each name a distinct part of it."""
    parts: dict[str, Position] = {}
    for binding in bound:
        part, record = binding.entry.part, binding.entry.record
        if len(bound) > 1 and not part:
            message = "is bound more than once: give each binding a part, or remove one"
            record.problems.error(binding.entry.position, f"{record.what}: {message}")
        elif part in parts:
            record.error("part", f"part {part!r} is used at {parts[part]} too; rename one")
        parts.setdefault(part, binding.entry.position)
