"""The table of checks: the lookup of a clause's check, and the properties common to all checks."""

from __future__ import annotations

from dataclasses import replace
from inspect import getsource
from pathlib import Path

import pytest

from entrenar_py.check import contract
from entrenar_py.check.clauses import CHECKS, Check, bind, terms
from entrenar_py.check.contract import TOLERANCE_KINDS, Vocabulary
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import companions
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces

CONTRACTS = sorted((Path(__file__).parents[3] / "contracts").glob("*.yaml"))
TRAINING = [check for check in CHECKS.values() if check.explores]


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
def test_every_plan_holds_on_the_reference(check: Check) -> None:
    """The unbroken reference trainer holds on every plan, after real comparisons."""
    clause = traces.clause(check.name)
    runs = [trace for one in check.plan(clause) for trace in traces.family(check.name, one)]
    finding = traces.judge(check.name, runs)
    assert finding.verdict is Verdict.HELD, finding
    assert finding.compared > 0


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_no_trace_is_inconclusive(check: Check) -> None:
    """Without traces nothing was compared, and the reason says what is missing."""
    finding = check.judge(traces.clause(check.name), Runs())
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.compared == 0
    assert finding.reason


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_a_trace_without_events_is_inconclusive(check: Check) -> None:
    """A completed run without recorded events is inconclusive."""
    finding = check.judge(traces.clause(check.name), Runs(traces.hand_written()))
    assert finding.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
def test_a_failed_run_is_inconclusive_and_named(check: Check) -> None:
    """One crashed run among good ones prevents HELD, and its reason is repeated."""
    clause = traces.clause(check.name)
    good = traces.family(check.name, check.plan(clause)[0])
    finding = traces.judge(check.name, [*good, traces.failed(traces.scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "out of luck" in finding.reason


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_the_runs_of_a_scenario(check: Check) -> None:
    """The scenario itself is among its runs, and no run is there twice."""
    for subject in check.plan(traces.clause(check.name)):
        members = [*companions.of(check.needs, subject)]
        assert subject in members
        assert len(set(members)) == len(members)


def test_names_and_ids_are_unique() -> None:
    """No check hides another in the table."""
    assert all(name == check.name for name, check in CHECKS.items())
    assert len({check.id for check in CHECKS.values()}) == len(CHECKS)


def test_a_clause_finds_its_check_by_name_before_id() -> None:
    """`check:` wins over the id; an unknown name binds nothing, even where the id would."""
    clause = traces.clause("coverage")
    assert bind(clause) is CHECKS["coverage"]
    assert bind(replace(clause, check="resume")) is CHECKS["resume"]
    assert bind(replace(clause, check="no_such_check")) is None
    assert bind(replace(clause, id="F-XX-999")) is None


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.name)
def test_the_shipped_contracts_are_covered(path: Path) -> None:
    """Every clause of every shipped contract has a check."""
    vocabulary = Vocabulary(checks=terms(), mutants=lambda: None)
    for clause in contract.load(path, vocabulary=vocabulary).invariants:
        check, same = bind(clause), vocabulary.check_of(clause)
        assert check is not None
        assert same is not None
        assert check.name == same.name


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_a_check_says_how_it_takes_a_tolerance(check: Check) -> None:
    """Its kinds are those of contracts; `takes_tolerance` says if its judge uses the number."""
    assert check.tolerance_kinds
    assert set(check.tolerance_kinds) <= set(TOLERANCE_KINDS)
    assert check.takes_tolerance == ("invariant.tolerance" in getsource(check.judge))
