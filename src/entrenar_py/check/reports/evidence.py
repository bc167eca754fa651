"""The evidence behind an entry of a report: labelled text, place and level, for all formats."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrenar_py.check import clauses as checks
from entrenar_py.check.contract import Invariant, Position
from entrenar_py.check.evidence import run_names
from entrenar_py.check.reports.report import Entry, Report
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict

# Longest text printed for one label. Reasons are shorter, but names and values can have any size.
TEXT_CHARS_MAX = 1200


_RUNS = re.compile(r" \[[^\[\]]*\]$")  # at the end of a reason: the runs that have it
_REFERS = re.compile(r": see (F-[A-Z]+-\d+)$")


def one_line(text: str) -> str:
    """Return `text` on one line with every character visible, cut to TEXT_CHARS_MAX."""
    line = escaping.line(text)
    if len(line) <= TEXT_CHARS_MAX:
        return line
    left = len(line) - TEXT_CHARS_MAX
    return f"{line[:TEXT_CHARS_MAX]}... ({left} more characters: --json FILE writes all)"


def describe(report: Report, entry: Entry) -> list[tuple[str, str]]:
    """Return (label, text) pairs on an entry: where it broke, possible causes, and where to look.

    Each text is one printable line. The labels, in this order and only if they apply, are

    - `accepted`: why the falsification is accepted,
    - `at`, `expected`, `got`: the place and both values,
    - `could mean`: a possible cause, one for each falsification test of the contract,
    - `contract`: the place of the clause in its file,
    - `bound`: which binding connects clause and check, and why,
    - `scenario`, or for a user's command `run`: the run that broke.
    """
    position = entry.invariant.position
    counterexample = entry.finding.counterexample
    rows = [("accepted", entry.accepted)] if entry.is_accepted else []
    if counterexample is not None:
        rows.append(("at", counterexample.place()))
    if counterexample is not None:
        rows += [("expected", counterexample.expected or ""), ("got", counterexample.got or "")]
    rows += [("could mean", meaning) for meaning in report.meanings(entry)]
    rows.append(("contract", f"{position.file}:{position.line}"))
    rows.append(("bound", bound(entry.invariant)))
    if counterexample is not None and counterexample.scenario is not None:
        rows.append(_run(counterexample.scenario))
    return [(label, one_line(text)) for label, text in rows if text]


def briefly(report: Report, entry: Entry) -> list[tuple[str, str]]:
    """Return the pairs of `describe` that say what broke: the place with both values, and causes.

    The contract's file, the binding and the run's scenario are left out. `script` is the line of
    the script to look at first. Of advice, only this line is shown.
    """
    script = script_line(report, entry)
    if entry.advice:
        return [("script", script)] if script else []
    rows = describe(report, entry)
    shown = dict(rows)
    values = ", ".join(f"{name} {shown[name]}" for name in ("expected", "got") if name in shown)
    at = ": ".join(filter(None, [shown.get("at"), values]))
    accepted = [row for row in rows if row[0] == "accepted"]
    causes = [row for row in rows if row[0] == "could mean"]
    places = [(label, text) for label, text in (("at", at), ("script", script)) if text]
    return [*accepted, *places, *causes]


def findings(pairs: Iterable[tuple[Report, Entry]]) -> Iterator[list[tuple[Report, Entry]]]:
    """Yield the entries that did not hold, in lists of entries with the same finding.

    Several clauses may find the same fact: the same values at the same place.
    """
    groups: dict[Hashable, list[tuple[Report, Entry]]] = {}
    for report, entry in pairs:
        if entry.verdict is not Verdict.HELD:
            groups.setdefault(_fact(entry), []).append((report, entry))
    yield from groups.values()


def _fact(entry: Entry) -> Hashable:
    broken = entry.finding.counterexample
    if broken is None or entry.verdict is not Verdict.FALSIFIED:
        return id(entry)
    values = (broken.expected, broken.got) if broken.expected and broken.got else broken.message
    place = (broken.step, broken.rank, broken.shard, broken.tensor, broken.element)
    return (entry.is_accepted, *place, values)


def _run(record: Mapping[str, Any]) -> tuple[str, str]:
    # The other fields of a command's scenario (sizes, learning rate) were read from its ranks.
    if record.get("system") != OBSERVED:
        return "scenario", describe_scenario(record)
    try:
        return "run", run_names.of(Scenario.from_dict(record))
    except UsageError:  # a record of another release
        return "run", ""


# Check -> the part of a script that it is about, if that is not the optimizer's step.
_ABOUT = {"coverage": "samples", "resume": "save", "parity": "backward", "weighting": "backward"}


# Part of a script -> words for the line with it.
_LINES = {
    "step": "the optimizer's step",
    "samples": "where samples are drawn",
    "save": "where a checkpoint is saved",
    "backward": "the backward pass",
}


def script_line(report: Report, entry: Entry) -> str:
    """Return the line of the script to look at first, as `train.py:40: ...`, or ""."""
    at = place(report, entry)
    words = [_LINES[what] for what, one in report.places.items() if one == at and at.line > 1]
    if not words or entry.verdict is not Verdict.FALSIFIED:
        return ""  # on line 1, only the script is known
    return f"{below(at.file, Path.cwd()) or at.file}:{at.line}: {words[0]}"


def place(report: Report, entry: Entry) -> Position:
    """Return the line that an entry points to: in the script if known, else in the contract.

    The script's line is the one that saves a checkpoint if a resumed run broke, the one that draws
    samples if these are wrong, the one that calls `backward` if averaged gradients are, and
    otherwise the one that steps the optimizer.
    """
    broken, check = entry.finding.counterexample, checks.bind(entry.invariant)
    about = _ABOUT.get(check.name, "step") if check else "step"
    if broken is not None and broken.tensor is None and broken.sample_ids:
        about = "samples"
    if broken is not None and (broken.scenario or {}).get("stops"):
        about = "save"
    known = report.places
    return known.get(about) or known.get("step") or entry.invariant.position


def detail_lines(report: Report, entry: Entry) -> list[str]:
    """Return the pairs of `describe`, the script's line, the statement and the replay command."""
    rows = describe(report, entry)
    if script := script_line(report, entry):
        rows.append(("script", one_line(script)))
    rows.append(("statement", one_line(entry.invariant.statement)))
    command = report.replay_command(entry)
    if command is not None:
        rows.append(("replay", escaping.exact(command)))
    return [f"{label}: {text}" for label, text in rows]


def bound(clause: Invariant) -> str:
    """Return which binding connects the clause to which check, and why; "" without a binding."""
    binding = clause.binding
    if binding is None:
        return ""
    check = f"to {clause.check} " if clause.check and not binding.untried else ""
    at = f"{binding.position.file}:{binding.position.line}"
    why = f": {binding.reason}" if binding.reason else ""
    return f"the {binding.kind} is bound {check}by {at}{why}"


def gate(report: Report) -> str:
    """Return `Gate ID (name) over N clauses: passed`, or why it did not pass; "" without a gate."""
    gate = report.contract.gate
    if gate is None:
        return ""
    word = {True: "passed", False: "NOT PASSED", None: "undecided"}[report.gate_passed]
    why = f" ({report.gate_why})" if report.gate_why else ""
    return f"Gate {gate.id} ({gate.name}) {report.gate_scope}: {word}{why}"


def note_lines(entry: Entry) -> list[str]:
    """Return `note ID: text` for each note of an entry, whatever its verdict.

    For a clause that held, its binding is one of the notes; `describe` shows it for other clauses.
    """
    return [one_line(f"note {entry.invariant.id}: {note}") for note in _notes(entry)]


def all_notes(reports: Sequence[Report]) -> list[str]:
    """Return `note ID, ID: text` for each note in the reports.

    Clauses with equal notes share a line.
    """
    clauses: dict[str, list[str]] = {}
    for report in reports:
        for entry in report.ranked:
            for note in _notes(entry):
                clauses.setdefault(note, []).append(entry.invariant.id)
    return [one_line(f"note {', '.join(ids)}: {note}") for note, ids in clauses.items()]


def _notes(entry: Entry) -> tuple[str, ...]:
    told = bound(entry.invariant) if entry.verdict is Verdict.HELD else ""
    return (*filter(None, [told]), *entry.finding.notes)


def alike(entries: Sequence[Entry], *, whole: bool = True) -> dict[str, list[Entry]]:
    """Return reason -> inconclusive entries without comparisons, for reasons that several share.

    If a reason begins with the clause's place, that is removed, since it would make all reasons
    different. Unless `whole`, all inconclusive entries are returned: the runs at the end of a
    reason don't distinguish it, and a reason that refers to a clause in the result follows it.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.verdict is Verdict.INCONCLUSIVE and not (whole and entry.finding.compared):
            reason = entry.finding.reason.removeprefix(f"{entry.invariant.position}: ")
            groups.setdefault(reason if whole else _RUNS.sub("", reason), []).append(entry)
    if whole:
        return {reason: alike for reason, alike in groups.items() if len(alike) > 1}
    of = {entry.invariant.id: reason for reason, same in groups.items() for entry in same}
    for reason in [*groups]:
        other = of.get(referred[1]) if (referred := _REFERS.search(reason)) else None
        if other is not None and other != reason and not _REFERS.search(other):
            groups[other] += groups.pop(reason)
    return groups


def describe_scenario(record: Mapping[str, Any]) -> str:
    """Return the record of a scenario (`Scenario.to_dict`) as `name=value, ...`.

    The fields without a default are shown, and those that differ from their defaults.
    """
    usual = Scenario(system="", workload="linear", world_size=1, seed=0).to_dict()
    required = ("system", "workload", "world_size", "seed")
    shown = {name: value for name, value in record.items() if value != usual.get(name)}
    shown = {name: record[name] for name in required if name in record} | shown
    return ", ".join(f"{name}={_value(value)}" for name, value in shown.items())


def below(path: str, root: Path) -> str | None:
    """Return `path` relative to the folder `root`, with forward slashes; None if it isn't in it."""
    file, folder = Path(path).resolve(), root.resolve()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else None


def level(entry: Entry, *, allow_inconclusive: bool) -> str | None:
    """Return `error` for a falsified entry, `warning` for an inconclusive one, None for a held one.

    An accepted falsification is a `note`. So is an inconclusive entry if `allow_inconclusive`.
    """
    if entry.verdict is Verdict.FALSIFIED:
        return "note" if entry.is_accepted else "error"
    if entry.verdict is Verdict.INCONCLUSIVE:
        return "note" if allow_inconclusive else "warning"
    return None


def flatten(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) pairs of `environment`, with each list or mapping on one line."""
    return [(one_line(str(name)), one_line(_value(value))) for name, value in environment.items()]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        facts = [f"{name}={_value(fact)}" for name, fact in value.items() if name != "kind"]
        return f"{value.get('kind', '')}({', '.join(facts)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, default=str)
