"""Makes clauses from statements and their bindings, and reports where the two differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

from entrenar_py.check.contract import scenario_counts, vocabulary
from entrenar_py.check.contract.binding_file import Entry
from entrenar_py.check.contract.items import Item
from entrenar_py.check.contract.records import EQUALITY_KINDS, SEVERITIES, Binding, Invariant
from entrenar_py.check.contract.vocabulary import CheckTerms, Vocabulary


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A binding of a statement. `stale` is the message that the statement has changed, or ""."""

    entry: Entry
    stale: str


def clause(item: Item, bound: Bound, terms: Vocabulary, room: scenario_counts.Room) -> Invariant:
    """Return the clause that `bound` makes of `item`, or of a part of `item`.

    Errors in the binding, and values that demand less than the contract's, become problems.
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
    vocabulary.check_names(entry.record, tried, terms)
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
    """Return the clause of `item` without the binding's check, tolerance and scenarios."""
    own, part = item.clause, entry.part
    aliases = tuple(name for name in item.names if name not in (own.id, own.name))
    if part:
        own = replace(own, id=f"{own.id}:{part}", name=f"{own.name} ({part})")
    return replace(own, binding=binding, aliases=(*aliases, *entry.gate_names))


def _departures(item: Item, entry: Entry) -> dict[str, str]:
    """Return key -> description of each value that departs from the contract's.

    Reported are a milder severity, a wider tolerance, and another check or kind of tolerance.
    """
    clause, departures = item.clause, {}
    is_milder = SEVERITIES.index(entry.severity or "P0") > SEVERITIES.index(clause.severity)
    for key, departs in (("severity", is_milder), ("check", True), ("tolerance_kind", True)):
        own, theirs = getattr(entry, key), getattr(clause, key)
        if departs and None not in (own, theirs) and own != theirs:
            departures[key] = f"{key} {own} in place of the {item.kind}'s {theirs}"
    own, theirs = entry.tolerance, clause.tolerance
    if theirs is not None and own is not None and own > theirs:
        departures["tolerance"] = (
            f"tolerance {own:g} is wider than the {theirs:g} of the {item.kind}"
        )
    return departures


def _check_tolerance(clause: Invariant, check: CheckTerms, entry: Entry) -> None:
    """Require that a tolerance's kind is one of `check`'s, and is stated if `check` has several."""
    kinds = [kind for kind in check.tolerance_kinds if kind not in EQUALITY_KINDS]
    if entry.tolerance_kind not in (None, *check.tolerance_kinds):
        honoured = " or ".join(check.tolerance_kinds)
        message = f"check {check.name} has no tolerance_kind {entry.tolerance_kind}; use {honoured}"
        entry.record.error("tolerance_kind", message)
    if clause.tolerance is not None and clause.tolerance_kind is None and len(kinds) > 1:
        message = f"tolerance {clause.tolerance:g} has no tolerance_kind; add {' or '.join(kinds)}"
        entry.record.error("tolerance", message)
