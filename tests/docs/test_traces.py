"""docs/traces.md lists what clauses need: with all of it each is held, without any it is open."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS, Check
from entrenar_py.check.harness import companions
from entrenar_py.shared import trace as trace_file
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import EVENTS, Event, TensorRecord, Tensors, Trace
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import undecided

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
BY_ID: Mapping[str, Check] = {check.id: check for check in CHECKS.values()}
KINDS = {event.__name__: event for event in EVENTS.values()}
ROUNDS = {check.id for check in CHECKS.values() if check.name.startswith("outer_")}
PARTS = {"F-PAR-006"}  # of a trainer that spreads its parameters over ranks
PROBES = {check.id for check in CHECKS.values() if not check.explores} - ROUNDS - PARTS

VALUES: Mapping[str, Any] = {"detail": "values"}
# What the run of a clause is, beside the usual: whatever its row calls "with" or "under".
SUBJECTS: Mapping[str, Mapping[str, Any]] = {
    "F-DP-001": {"optimizer": "momentum"},
    "F-DP-006": {"faults": (traces.leave(1, 2),)},
    "F-TI-001": VALUES,
    "F-TI-002": {"optimizer": "adamw"},
    "F-TI-003": {"stops": (2, 4)},
    "F-TI-005": {"dropout": 0.3},
    "F-TI-008": {**VALUES, "optimizer": "adamw", "clip_norm": 0.05, "weight_decay": 0.1},
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Return clause, facts and runs of each line of the table."""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| F-"):
            clause, facts, runs, _ = (cell.strip() for cell in line.strip("|").split("|"))
            yield clause.split()[0], facts, runs


def needed(facts: str) -> list[str]:
    """Return the facts that a cell lists, such as `Start` or `Update.weights with values`."""
    found = re.findall(r"`([A-Z]\w+(?:\.\w+)?)`( with values)?", facts)
    return ["".join(parts) for parts in found]


FACTS = [(clause, fact) for clause, facts, _ in rows() for fact in needed(facts)]
SECOND_RUNS = [
    (clause, field)
    for clause, _, runs in rows()
    for field in re.findall(r"second with `(.+?)`", runs)
]


def recorded(clause: str) -> list[Trace]:
    """Return the runs of a clause as a user's own trainer would record them, its base run first."""
    scenario = traces.scenario(system="mine", workload="own", **SUBJECTS.get(clause, {}))
    runs = dict.fromkeys((scenario, *companions.of(BY_ID[clause].needs, scenario)))
    wanted = [one for one in runs if one.system == "mine"]
    return [_own(one, promises=clause == "F-TI-006") for one in wanted]


def _own(scenario: Scenario, *, promises: bool) -> Trace:
    ran = traces.run(scenario.with_(system="reference", workload="mlp"))
    return replace(ran, scenario=scenario, promises=ran.promises if promises else ())


def judged(clause: str, found: list[Trace]) -> Finding:
    """Return the finding of the clause's check."""
    return traces.judge(BY_ID[clause].name, found)


def without(one: Trace, fact: str) -> Trace:
    """Return the trace `one` without a fact: events of a kind, a field of them, or its values."""
    name, _, field = fact.removesuffix(" with values").partition(".")
    if name == "Trace":
        assert field == "promises"
        return replace(one, promises=())
    kind = KINDS[name]
    if not field:
        return replace(one, events=tuple(e for e in one.events if not isinstance(e, kind)))
    bare = digests if fact.endswith(" with values") else unknown(kind, field)
    changed = (
        replace(e, **{field: bare(getattr(e, field))}) if isinstance(e, kind) else e
        for e in one.events
    )
    return replace(one, events=tuple(changed))


def digests(tensors: Tensors) -> Tensors:
    return {name: TensorRecord(record.digest) for name, record in tensors.items()}


def unknown(kind: type[Event], field: str) -> Callable[[Any], Any]:
    """Return the content of a field that was not filled in: its default, or an empty value."""
    found = kind.__dataclass_fields__[field]
    if found.default is not MISSING:
        return lambda _: found.default
    return lambda filled: type(filled)()


def test_every_clause_has_a_row_or_is_a_probe() -> None:
    """The page has a row for every check, and names each probe."""
    assert {clause for clause, _, _ in rows()} == set(BY_ID) - PROBES - ROUNDS - PARTS
    assert all(clause in PAGE.read_text("utf-8") for clause in PROBES | ROUNDS | PARTS)


@pytest.mark.parametrize("clause", [clause for clause, _, _ in rows()])
def test_with_everything_it_is_held(clause: str) -> None:
    """The events that the page lists are enough."""
    finding = judged(clause, recorded(clause))
    assert finding.verdict is Verdict.HELD, finding
    assert finding.compared > 0


@pytest.mark.parametrize(("clause", "fact"), FACTS)
def test_without_any_of_it_it_is_open(clause: str, fact: str) -> None:
    """Without a fact the clause is inconclusive, and the reason names the fact."""
    reason = undecided(judged(clause, [without(one, fact) for one in recorded(clause)]))
    name, _, values = fact.partition(" with ")
    assert name.removeprefix("Trace.") in reason
    assert "values=True" in reason or not values


@pytest.mark.parametrize(("clause", "field"), SECOND_RUNS)
def test_without_the_second_run_it_is_open(clause: str, field: str) -> None:
    """Without the run to compare with, the clause is inconclusive, and the reason names it."""
    assert field in undecided(judged(clause, recorded(clause)[:1]))


@pytest.mark.parametrize("clause", sorted(PROBES))
def test_probes_say_so(clause: str) -> None:
    """A training trace is no evidence for a probe, and the reason says what to run instead."""
    assert f"--only {clause} and without --judge" in undecided(judged(clause, recorded("F-DP-001")))


@pytest.mark.parametrize("clause", sorted(ROUNDS))
def test_rounds_are_asked_for(clause: str) -> None:
    """A trace without outer synchronisations is no evidence for clauses about rounds."""
    reason = undecided(judged(clause, recorded("F-DP-001")))
    assert "Synchronised" in reason or "world_size=1" in reason


def test_the_example_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code on the page runs, and decides the clauses that the page claims."""
    text = PAGE.read_text("utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, PAGE.name, "exec"), {})
    one = trace_file.load(tmp_path / "mine.jsonl")
    promised = re.findall(r"F-\w+-\d+", text.split("With this file, ")[1].split(" hold. ")[0])
    assert len(promised) > 5
    for clause in promised:
        assert judged(clause, [one]).verdict is Verdict.HELD, clause
