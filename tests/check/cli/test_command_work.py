"""What a call without a contract takes as advice, and looks at aside."""

from __future__ import annotations

import argparse
import io
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console

from entrenar_py.check import contract
from entrenar_py.check.cli import command_work, reporting
from entrenar_py.check.command import judging
from entrenar_py.check.project import configuration
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared import package_data
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive
from tests import traces
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
    entry = command_work._advised(broken(name, scenario), command_work._unnamed(told, TASKS))
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


def job(file: str, *entries: Entry, is_aside: bool = False) -> reporting.Job:
    """Return the job on a contract whose entries are these."""
    names = ("json", "junit", "sarif", "html", "project")
    flags = dict.fromkeys(("quiet", "verbose", "github", "allow_inconclusive", "no_color"), False)
    options = argparse.Namespace(**dict.fromkeys(names), **flags, contract=file, bind=(), only=())
    vocabulary = contract.Vocabulary(checks=None, mutants=lambda: None)
    return reporting.Job(
        options=options,
        contract=contract.load(package_data.contract_path(file), vocabulary=vocabulary),
        work=reporting.Work(
            entries=lambda *_: entries, environment=dict, system="command", seed=0, streams=True
        ),
        standing=configuration.Standing(selected=(), notes={}),
        is_aside=is_aside,
    )


def of_clause(name: str, verdict: Verdict) -> Entry:
    entry = broken(name, {})
    if verdict is Verdict.FALSIFIED:
        return entry
    return Entry(
        invariant=entry.invariant,
        finding=inconclusive(name, "nothing was seen")
        if verdict is Verdict.INCONCLUSIVE
        else Finding(invariant=name, verdict=verdict, compared=3, reason=""),
        num_scenarios=1,
        num_explored=0,
        elapsed_s=0.0,
    )


@pytest.mark.parametrize("verdict", Verdict)
def test_what_is_looked_at_aside_is_told_if_it_is_broken(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody asked whether it holds: a right script's lines and exit code are as without it."""
    text = io.StringIO()
    code = reporting.run_all(
        [
            job(package_data.FOR_SCRIPTS[0], of_clause("F-DP-001", Verdict.HELD)),
            job(package_data.OF_LANGUAGE, of_clause("F-LM-002", verdict), is_aside=True),
        ],
        "entrenar-check",
        Console(file=text),
        runs=nullcontext(),
    )
    is_broken = verdict is Verdict.FALSIFIED
    assert capsys.readouterr().err == ""
    assert (code, "F-LM-002" in text.getvalue()) == (int(is_broken), is_broken)
    assert ("QG-LM-001" in text.getvalue()) is is_broken
