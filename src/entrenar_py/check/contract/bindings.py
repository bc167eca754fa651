"""Bindings: which check tests which statement of a contract that was written for other tools.

Clauses, falsification tests, proof obligations and equations can be bound. Bindings have three
sources: the shipped file for the contract's name, the file next to the contract, and the files that
the user names. If several sources bind a statement, the last of these wins. As in a contract,
values have places, problems are reported together, and nothing is executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.check.contract.blocks import OBLIGATIONS, Room, as_clauses
from entrenar_py.check.contract.clauses import CheckTerms, Vocabulary, check_names
from entrenar_py.check.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Binding,
    Contract,
    Equation,
    FalsificationTest,
    Invariant,
    Obligation,
)
from entrenar_py.shared import package_data
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.untrusted import escaping

KINDS = ("clause", "test", "obligation", "equation")
DIGEST_CHARS = 8
TESTS, EQUATIONS = "falsification_tests", "equations"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A statement of a contract that can be bound to a check.

    - `names`: the names that a binding or a gate may use.
    - `texts`: the texts that the `digest` covers.
    - `clause`: the clause that the statement becomes in a run.
    - `counts`: whether the statement becomes a clause even without a binding.
    """

    kind: str
    names: tuple[str, ...]
    texts: tuple[str, ...]
    clause: Invariant
    counts: bool

    @property
    def id(self) -> str:
        """The id in a run: the statement's own, one made from its property, or `equation:name`."""
        return self.clause.id

    @property
    def digest(self) -> str:
        """BLAKE3 of `texts`, as DIGEST_CHARS hex digits. Any whitespace counts as one space."""
        said = "\0".join(map(_on_one_line, self.texts))
        return str(blake3(said.encode("utf-8", "backslashreplace")).hexdigest()[:DIGEST_CHARS])


def items(
    clauses: Iterable[Invariant],
    tests: Iterable[FalsificationTest],
    obligations: Iterable[Obligation],
    equations: Iterable[Equation],
) -> tuple[Item, ...]:
    """Return every statement of a contract that can be bound, the clauses first.

    Obligations count as clauses if `clauses` contains them. Tests count as clauses if `clauses` is
    empty.
    """
    own = tuple(clauses)
    counting = {clause.id: clause for clause in own if clause.group == OBLIGATIONS}
    return (
        *(_item_of_clause(clause) for clause in own if clause.group != OBLIGATIONS),
        *(
            _item_of_obligation(obligation, counts=obligation.id in counting)
            for obligation in obligations
        ),
        *(_item_of_test(test, counts=not own) for test in tests),
        *map(_item_of_equation, equations),
    )


def items_of(contract: Contract) -> tuple[Item, ...]:
    """Return every statement of a loaded contract, except clauses that are already bound."""
    clauses = [
        clause
        for clause in contract.invariants
        if clause.binding is None and clause.group not in (TESTS, EQUATIONS)
    ]
    tests, obligations = contract.falsification_tests, contract.obligations
    return items(clauses, tests, obligations, contract.equations)


def _item_of_clause(clause: Invariant) -> Item:
    texts = (clause.statement, clause.precondition, clause.postcondition, clause.description)
    return Item(
        kind="clause",
        names=(clause.id, clause.name),
        texts=(*texts, _text(clause.tolerance), clause.tolerance_kind or ""),
        clause=clause,
        counts=True,
    )


def _item_of_obligation(obligation: Obligation, *, counts: bool) -> Item:
    texts = (obligation.property, obligation.formal, _text(obligation.tolerance))
    (clause,) = as_clauses((obligation,))
    names = (obligation.id, obligation.property)
    return Item(kind="obligation", names=names, texts=texts, clause=clause, counts=counts)


def _item_of_test(test: FalsificationTest, *, counts: bool) -> Item:
    statement = "; ".join(filter(None, (_on_one_line(test.rule), _on_one_line(test.prediction))))
    clause = Invariant(
        id=test.id,
        name=_on_one_line(test.rule) or test.id,
        statement=statement,
        position=test.position,
        group=TESTS,
    )
    texts = (test.rule, test.prediction, test.test)
    return Item(kind="test", names=(test.id,), texts=texts, clause=clause, counts=counts)


def _item_of_equation(equation: Equation) -> Item:
    clause = Invariant(
        id=f"equation:{equation.name}",
        name=equation.name,
        statement=_on_one_line(equation.formula),
        position=equation.position,
        group=EQUATIONS,
    )
    names = (equation.name, clause.id)
    texts = (equation.formula,)
    return Item(kind="equation", names=names, texts=texts, clause=clause, counts=False)


def _text(number: float | None) -> str:
    return "" if number is None else repr(number)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


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
    """One binding: a statement (`kind` and `name`), and its `check` or the reason `not_tried`.

    The file's key `options` is already merged into each scenario. `record` is the YAML mapping, for
    messages. If `severity` or `tolerance` is None, the statement's own value applies.
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
    """The bindings in one file.

    `contract` is the file name of their contract, without its suffix.
    """

    path: Path
    contract: str
    contract_at: Position
    entries: tuple[Entry, ...]


def read(path: Path, problems: Problems) -> BindingFile | None:
    """Return the bindings at `path`.

    If it is another kind of file, record an error and return None.
    """
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
    paths: Sequence[Path], contract: str, contracts: Collection[str]
) -> tuple[Path, ...]:
    """Return `paths` without the files that are for one of `contracts` other than `contract`."""
    others = {stem(Path(name).name) for name in contracts} - {stem(Path(contract).name)}
    return tuple(path for path in paths if not others or _contract_of(path) not in others)


def _contract_of(path: Path) -> str:
    file = read(path, Problems())  # problems are reported when its contract is loaded
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
    """Record an error unless an entry has a `check` with a `reason`, or only `not_tried`."""
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
            if isinstance(own, dict):  # for other types, expanding the scenario reports the error
                scenario["options"] = {**plain(options), **own}
    return tuple(scenarios)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A binding of a statement.

    `stale` is the message if the statement has changed since, or "".
    """

    entry: Entry
    stale: str


def bound_clause(item: Item, bound: Bound, terms: Vocabulary, room: Room) -> Invariant:
    """Return the clause that the binding `bound` makes of `item`, or of a part of `item`.

    Errors in the binding are recorded. If a value demands less than that of the contract, a warning
    is recorded.
    """
    entry = bound.entry
    binding = Binding(
        kind=item.kind,
        item=item.id,
        position=entry.position,
        reason=entry.reason,
        untried=entry.not_tried or bound.stale,
        systems=entry.systems,
    )
    bare = _bare(item, entry, binding)
    if entry.not_tried or not entry.check:
        return bare
    tried = replace(
        bare,
        check=entry.check,
        severity=entry.severity or bare.severity,
        critical=entry.critical or bare.critical,
        tolerance=bare.tolerance if entry.tolerance is None else entry.tolerance,
        tolerance_kind=entry.tolerance_kind or bare.tolerance_kind,
        scenarios=entry.scenarios or bare.scenarios,
        mutants=entry.mutants or bare.mutants,
    )
    check_names(entry.record, tried, terms)
    for node, record in zip(entry.record.maps("scenarios"), entry.scenarios, strict=True):
        room.take(node, record, entry.record.what)
    for check in terms.checks or ():
        if check.name == entry.check:
            _check_tolerance(tried, check, entry)
    departures = _departures(item, entry)
    for key, departure in departures.items():
        entry.record.warn(key, departure)
    return replace(tried, binding=replace(binding, departures=tuple(departures.values())))


def _bare(item: Item, entry: Entry, binding: Binding) -> Invariant:
    own, part = item.clause, entry.part
    aliases = tuple(name for name in item.names if name not in (own.id, own.name))
    if part:
        own = replace(own, id=f"{own.id}:{part}", name=f"{own.name} ({part})")
    return replace(own, binding=binding, aliases=(*aliases, *entry.gate_names))


def _departures(item: Item, entry: Entry) -> dict[str, str]:
    """Return key -> description, for each value of a binding that departs from the contract's.

    Reported are a milder severity, a wider tolerance, a different check, and a different kind of
    tolerance.
    """
    clause, departures = item.clause, {}
    is_milder = SEVERITIES.index(entry.severity or "P0") > SEVERITIES.index(clause.severity)
    for key, departs in (("severity", is_milder), ("check", True), ("tolerance_kind", True)):
        own, theirs = getattr(entry, key), getattr(clause, key)
        if departs and None not in (own, theirs) and own != theirs:
            departures[key] = f"{key} {own} instead of the {item.kind}'s {theirs}"
    own, theirs = entry.tolerance, clause.tolerance
    if theirs is not None and own is not None and own > theirs:
        departures["tolerance"] = (
            f"tolerance {own:g} is wider than the {theirs:g} of the {item.kind}"
        )
    return departures


def _check_tolerance(clause: Invariant, check: CheckTerms, entry: Entry) -> None:
    """Record an error for a kind of tolerance that `check` lacks, or that must be stated."""
    kinds = [kind for kind in check.tolerance_kinds if kind not in EQUALITY_KINDS]
    if entry.tolerance_kind not in (None, *check.tolerance_kinds):
        honoured = " or ".join(check.tolerance_kinds)
        message = f"check {check.name} has no tolerance_kind {entry.tolerance_kind}; use {honoured}"
        entry.record.error("tolerance_kind", message)
    if clause.tolerance is not None and clause.tolerance_kind is None and len(kinds) > 1:
        message = f"tolerance {clause.tolerance:g} has no tolerance_kind; add {' or '.join(kinds)}"
        entry.record.error("tolerance", message)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of bindings for the contract called `stem`; None for a file that does not exist.

    `shipped` is part of this package, `adjacent` is next to the contract, `named` are the user's.
    """

    stem: str
    shipped: Path | None
    adjacent: Path | None
    named: tuple[Path, ...]


def files(contract: Path, named: Sequence[Path]) -> Files:
    """Return the files that may contain bindings of `contract`."""
    name = stem(contract.name)
    adjacent = contract.with_name(f"{name}{SUFFIX}")
    return Files(
        stem=name,
        shipped=package_data.bindings(name),
        adjacent=adjacent if _says_something(adjacent) else None,
        named=tuple(dict.fromkeys(named)),
    )


def _says_something(path: Path) -> bool:
    # `--suggest > FILE` first creates an empty file. A pipe, a folder or a link to itself is read,
    # which reports the error.
    is_empty = path.is_file() and path.stat().st_size == 0
    return os.path.lexists(path) and not is_empty


def bind(
    known: Sequence[Item], files: Files, terms: Vocabulary, problems: Problems
) -> tuple[Invariant, ...]:
    """Return the clauses: one for each binding, and one for each unbound statement that `counts`.

    Errors in a file of bindings are added to `problems`.
    """
    chosen = _choose(known, files, problems)
    clauses: list[Invariant] = []
    room = Room(problems)
    for item in known:
        bound = chosen.get((item.kind, item.id), ())
        if not bound and item.counts:
            clauses.append(item.clause)
        clauses += [bound_clause(item, binding, terms, room) for binding in bound]
    return tuple(clauses)


def _choose(
    known: Sequence[Item], files: Files, problems: Problems
) -> dict[tuple[str, str], list[Bound]]:
    """Return (kind, id) of a statement -> its bindings, from the last source that binds it."""
    chosen = _shipped(known, files, problems)
    for paths in ((files.adjacent,), files.named):
        bindings_by_item: dict[tuple[str, str], list[Bound]] = {}
        for path in paths:
            loaded = None if path is None else read(path, problems)
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
    """Return (kind, id) -> the shipped bindings, if they were written for this contract, else {}.

    An equal file name is not enough: the digest of at least one bound statement has to match, too.
    """
    if files.shipped is None:
        return {}
    quiet = Problems()
    loaded = read(files.shipped, quiet)
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
    """Add each binding of `file` to `bindings_by_item`, at the statement that it names."""
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
                f"its binding was made for a different wording ({entry.statement}, now "
                f"{item.digest}): read the statement again, then write the new digest"
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
    """Record an error unless several bindings of one statement each name a distinct part of it."""
    parts: dict[str, Position] = {}
    for binding in bound:
        part, record = binding.entry.part, binding.entry.record
        if len(bound) > 1 and not part:
            message = "is bound more than once: give each binding a part, or remove one"
            record.problems.error(binding.entry.position, f"{record.what}: {message}")
        elif part in parts:
            record.error("part", f"part {part!r} is used at {parts[part]} too; rename one")
        parts.setdefault(part, binding.entry.position)
