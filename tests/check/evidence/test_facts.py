"""Reasons speak of a trace's records, or of a script's calls, never of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from entrenar_py.check.evidence import facts, missing
from entrenar_py.check.evidence.facts import Fact
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.docs import test_traces as page

# What only a person who writes traces knows: events, their fields, and how tensors are recorded.
RECORDS = re.compile(
    r"\b(?:record |(?:Shard|Update|Start|Saved|Halt|Synchronised|Membership)\b|record_tensor"
    r"|repeat=|stops=|faults=|traits|world_size=)"
)
FACTS = {name: fact for name, fact in vars(facts).items() if isinstance(fact, Fact)}
BITS = "F-TI-006"  # judges only trainers that promise bits, as no script does


def observed(found: list[Trace]) -> list[Trace]:
    """Return the traces as those of a user's command."""
    return [replace(one, scenario=one.scenario.with_(system="command")) for one in found]


def judged(clause: str, found: list[Trace]) -> Finding:
    return traces.judge(page.BY_ID[clause].name, observed(found))


@pytest.mark.parametrize(
    ("change", "told"),
    [(list, "record Shard.ids"), (observed, "call obs.samples(ids) before each backward pass")],
)
def test_the_vocabulary_follows_the_runs(
    change: Callable[[list[Trace]], list[Trace]], told: str
) -> None:
    """The tally of a command's runs asks for calls, any other for records."""
    runs = change([traces.run(traces.scenario())])
    tally = missing.tally_for(traces.clause("coverage"), runs)
    missing.ask(tally, "the samples are unknown", facts.IDS)
    assert tally.missing[0].startswith(f"the samples are unknown: {told}")
    assert missing.nothing(tally, "nothing", facts.IDS).startswith(f"nothing: {told}")


@pytest.mark.parametrize("name", FACTS)
def test_calls_are_no_records(name: str) -> None:
    """What a fact asks of a script names no record."""
    assert not RECORDS.search(FACTS[name].call)


@pytest.mark.parametrize(("clause", "fact"), [row for row in page.FACTS if row[0] != BITS])
def test_a_script_is_told_its_calls(clause: str, fact: str) -> None:
    """Whatever fact a script's run lacks, the reason says what to do in the script."""
    finding = judged(clause, [page.without(one, fact) for one in page.recorded(clause)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert not RECORDS.search(finding.reason), finding.reason


@pytest.mark.parametrize("clause", sorted({clause for clause, _ in page.FACTS} - {BITS}))
def test_a_script_is_told_which_run_is_missing(clause: str) -> None:
    """A clause that lacks its second run says so without a scenario's fields."""
    recorded = page.recorded(clause)
    for found in filter(None, (recorded[:1], recorded[1:])):
        finding = judged(clause, found)
        assert not RECORDS.search(finding.reason), finding.reason
