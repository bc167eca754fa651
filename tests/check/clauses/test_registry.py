"""The table of checks and the scenarios that it plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import getsource
from pathlib import Path

import pytest

from entrenar_py.check import contract
from entrenar_py.check.clauses import CHECKS, Check, bind, plans, terms
from entrenar_py.check.contract import TOLERANCE_KINDS, Invariant, Vocabulary
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import companions
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import held, left_open, undecided

CONTRACTS = sorted((Path(__file__).parents[3] / "contracts").glob("*.yaml"))
TRAINING = [check for check in CHECKS.values() if check.explores]


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
def test_every_plan_holds_on_the_reference(check: Check) -> None:
    """The unbroken reference trainer holds on every plan, after real comparisons."""
    clause = traces.clause(check.name)
    runs = [trace for one in check.plan(clause) for trace in traces.family(check.name, one)]
    finding = held(check.name, *runs)
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
    undecided(check.judge(traces.clause(check.name), Runs(traces.hand_written())))


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
def test_a_failed_run_is_inconclusive_and_named(check: Check) -> None:
    """One crashed run among good ones prevents HELD, and its reason is repeated."""
    clause = traces.clause(check.name)
    good = traces.family(check.name, check.plan(clause)[0])
    assert "out of luck" in left_open(check.name, *good, traces.failed(traces.scenario()))


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


Plan = Callable[[Invariant], list[Scenario]]
PLANS: tuple[Plan, ...] = (
    plans.training,
    plans.movement,
    plans.epochs,
    plans.non_finite,
    plans.parity,
    plans.departures,
    plans.stops,
    plans.random_streams,
    plans.step_rules,
)
CLAUSE = traces.clause("parity")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_sizes_divide_nothing(plan: Plan) -> None:
    """Several workers, unequal shards, and more steps than one epoch where data order matters."""
    for subject in plan(CLAUSE):
        assert subject.world_size > 1
        assert subject.batch_size % subject.num_shards
        assert subject.batch_size % subject.world_size
        assert subject.num_steps >= 2


@pytest.mark.parametrize("plan", [plans.training, plans.epochs, plans.stops, plans.random_streams])
def test_more_than_one_epoch(plan: Plan) -> None:
    """Plans that concern the order of the data go through at least two epochs."""
    for subject in plan(CLAUSE):
        per_epoch = -(-subject.num_samples // subject.batch_size)
        assert subject.num_steps >= 2 * per_epoch


def test_parity_hides_no_constant_factor() -> None:
    """Plain SGD without clipping at accumulation 1, 2 and 4; clipping active; past step 100."""
    subjects = plans.parity(CLAUSE)
    plain = [s for s in subjects if s.optimizer == "sgd" and s.clip_norm is None]
    assert {s.accumulation for s in plain} >= {1, 2, 4}
    assert any(s.clip_norm for s in subjects)
    assert any(s.num_steps > 100 for s in subjects)
    assert any(s.dropout for s in subjects)


def test_stops_in_the_middle_of_an_epoch() -> None:
    """Each run stops twice or more, once inside epoch 1, with state in optimizer and schedule."""
    for subject in plans.stops(CLAUSE):
        per_epoch = -(-subject.num_samples // subject.batch_size)
        assert len(subject.stops) >= 2
        assert any(stop // per_epoch == 1 and stop % per_epoch for stop in subject.stops)
        assert subject.optimizer != "sgd"
        assert subject.schedule != "constant"


def test_every_kind_of_non_finite_value() -> None:
    """NaN and both infinities, in gradient and loss, a huge finite value, and no fault."""
    faults = [subject.faults for subject in plans.non_finite(CLAUSE)]
    assert () in faults
    assert {(f.kind, f.value) for group in faults for f in group} >= {
        ("non_finite_gradient", "nan"),
        ("non_finite_gradient", "inf"),
        ("non_finite_gradient", "-inf"),
        ("non_finite_loss", "nan"),
        ("huge_gradient", "1e38"),
    }


def test_departures_leave_and_return() -> None:
    """Workers leave, and one comes back."""
    kinds = [[fault.kind for fault in s.faults] for s in plans.departures(CLAUSE)]
    assert ["leave"] in kinds
    assert any("join" in group for group in kinds)


def test_clipping_is_off_active_and_idle() -> None:
    """Every schedule; no limit on the norm, one far below it and one far above."""
    subjects = plans.step_rules(CLAUSE)
    assert {s.schedule for s in subjects} == {"constant", "linear", "cosine"}
    limits = [s.clip_norm for s in subjects]
    assert None in limits
    assert min(limit for limit in limits if limit) < 0.1 < 10 < max(x for x in limits if x)
