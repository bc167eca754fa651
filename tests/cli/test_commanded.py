"""What a call without a contract takes as advice."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from entrenar_py.cli import commanded
from entrenar_py.command import judging
from entrenar_py.reports.report import Entry
from entrenar_py.verdict import Counterexample, Finding, Verdict
from tests.checks import traces
from tests.conftest import shipped_invariants

TASKS = judging.tasks([shipped_invariants()[name] for name in ("F-DP-001", "F-DP-003")])
POISONED = traces.scenario(faults=(traces.leave(1, 2),)).to_dict()


def broken(name: str, scenario: dict[str, Any]) -> Entry:
    """Return the entry of a clause that a run of this scenario breaks."""
    found = Finding(
        invariant=name,
        verdict=Verdict.FALSIFIED,
        compared=1,
        reason="went on",
        counterexample=Counterexample(message="went on", scenario=scenario),
    )
    clause = shipped_invariants()[name]
    return Entry(invariant=clause, finding=found, num_scenarios=1, num_explored=0, elapsed_s=0.0)


def accepted(name: str, scenario: dict[str, Any], **options: Any) -> str:
    told = argparse.Namespace(**{"typed": (), "used": (), "only": (), **options})
    entry = commanded._advised(broken(name, scenario), commanded._advice(told, TASKS))
    assert entry.advice is entry.is_accepted
    return entry.accepted


def test_a_planted_nan_is_advice_where_no_contract_is_named() -> None:
    """Most scripts go on at a NaN, as their libraries do."""
    assert accepted("F-DP-003", POISONED).startswith("advice, since no contract was named: torch, ")


@pytest.mark.parametrize(
    "named", [{"typed": ("contract",)}, {"used": ("contract",)}, {"only": ("F-DP-003",)}]
)
def test_what_somebody_named_is_demanded(named: dict[str, Any]) -> None:
    """The contract, on the command line or in the configuration, or the clause."""
    assert accepted("F-DP-003", POISONED, **named) == ""


def test_a_nan_of_the_script_s_own_is_no_advice() -> None:
    """Nor is a break of another clause in a run with a planted value."""
    assert accepted("F-DP-003", traces.scenario().to_dict()) == ""
    assert accepted("F-DP-001", POISONED) == ""
