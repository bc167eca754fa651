"""Scenarios run once each; a crashed check is inconclusive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.check.harness import judgement, runner
from entrenar_py.check.harness.judgement import Judgement
from entrenar_py.check.harness.runner import Runner
from entrenar_py.shared import trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, worst

CLAUSE = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))


def scenario(seed: int = 0) -> Scenario:
    """Return a scenario with two workers and three steps."""
    return Scenario(system="reference", workload="linear", world_size=2, seed=seed, num_steps=3)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """Return the scenarios that were run, in order. The runs themselves are empty."""
    seen: list[Scenario] = []

    def run(one: Scenario) -> trace.Trace:
        seen.append(one)
        return ended(one)

    monkeypatch.setattr(systems, "run", run)
    return seen


def ended(one: Scenario, status: str = "completed") -> trace.Trace:
    """Return a trace without events other than its end."""
    events = (trace.End(status=status),)
    return trace.Trace(scenario=one, environment={}, promises=(), events=events)


def test_each_scenario_runs_once(ran: list[Scenario], monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated scenario is remembered. Beyond the limit the oldest is forgotten."""
    monkeypatch.setattr(runner, "REMEMBERED", 2)
    runs = Runner()
    for seed in (0, 1, 0, 1, 2, 1, 0):
        assert runs.run(scenario(seed)).scenario.seed == seed
    assert [one.seed for one in ran] == [0, 1, 2, 0]


def test_traces_are_kept(tmp_path: Path) -> None:
    """Each trace is saved in a file named after its scenario, or nowhere without a folder."""
    Runner().run(scenario())
    result = Runner(tmp_path).run(scenario())
    (path,) = tmp_path.iterdir()
    assert path.name == f"{scenario().digest}.jsonl"
    assert trace.load(path) == result


Judge = Callable[[Invariant, Runs[trace.Trace]], Finding]


def check_with(judge: Judge) -> checks.Check:
    """Return a check that needs the repeated run."""
    return replace(checks.CHECKS["determinism"], judge=judge)


def held(clause: Invariant, traces: Runs[trace.Trace]) -> Finding:
    """Judge as held, with as many comparisons as there are traces."""
    return Finding(invariant=clause.id, verdict=Verdict.HELD, compared=len([*traces]))


def test_a_scenario_is_judged_beside_its_family(ran: list[Scenario]) -> None:
    """All runs that the check needs are made. Sound ones don't count as failed."""
    judgement = Runner().attempt(CLAUSE, check_with(held), scenario())
    assert judgement.finding.compared == 2
    assert not judgement.failed
    assert [one.repeat for one in ran] == [0, 1]
    assert Runner().try_scenario(CLAUSE, check_with(held), scenario()) == judgement.finding


def test_trouble() -> None:
    """A crashed check and a failed run differ from runs with nothing to compare."""

    def crash(clause: Invariant, runs: Runs[trace.Trace]) -> NoReturn:
        raise KeyError("step")

    crashed = judgement.judge(CLAUSE, check_with(crash), Runs(ended(scenario())))
    assert crashed.failed
    assert crashed.finding.verdict is Verdict.INCONCLUSIVE
    assert crashed.finding.reason == "the check determinism crashed: KeyError: 'step'"
    assert judgement.judge(CLAUSE, check_with(held), Runs(ended(scenario(), "failed"))).failed
    assert not judgement.judge(CLAUSE, check_with(held), Runs(ended(scenario(), "halted"))).failed


def finding(verdict: Verdict, compared: int = 1, reason: str = "", *notes: str) -> Finding:
    """Return a finding on the clause."""
    broken = Counterexample(message=reason) if verdict is Verdict.FALSIFIED else None
    return Finding(
        invariant="F-X",
        verdict=verdict,
        compared=compared,
        reason=reason,
        counterexample=broken,
        notes=notes,
    )


def test_telling() -> None:
    """Explored runs count only if they compared something or failed."""
    silent, loud = finding(Verdict.INCONCLUSIVE, 0), finding(Verdict.HELD)
    broken, failed = finding(Verdict.FALSIFIED), finding(Verdict.INCONCLUSIVE, 0, "crashed")
    explored = [
        Judgement(finding=silent, failed=False),
        Judgement(finding=loud, failed=False),
        Judgement(finding=broken, failed=False),
        Judgement(finding=failed, failed=True),
    ]
    assert judgement.telling(explored) == [loud, broken, failed]


def test_combine() -> None:
    """The first break wins, comparisons add up, and reasons of one verdict and all notes stay."""
    held, one, two = (
        finding(Verdict.HELD, 5, "", "a"),
        finding(Verdict.FALSIFIED, 1, "one", "b"),
        finding(Verdict.FALSIFIED, 2, "two", "a"),
    )
    both = judgement.combine([held, one, two])
    assert (both.verdict, both.compared, both.reason) == (Verdict.FALSIFIED, 8, "one")
    assert both.counterexample == one.counterexample
    assert both.notes == ("a", "b")
    open_ = [finding(Verdict.INCONCLUSIVE, 0, reason) for reason in ("x", "y", "x", "z", "u")]
    assert judgement.combine([held, *open_]).reason == "x; y; z; and 1 more"


@given(verdicts=st.lists(st.sampled_from(Verdict), min_size=1))
def test_the_worst_verdict_wins(verdicts: list[Verdict]) -> None:
    """The worst verdict wins in any order."""
    combined = judgement.combine([finding(verdict) for verdict in verdicts])
    assert combined.verdict is worst(verdicts)
    assert combined.compared == len(verdicts)


def test_a_planted_bug_that_took_no_part_proves_nothing() -> None:
    """If the bug took no part, held becomes inconclusive. Other verdicts stay."""
    check = checks.CHECKS["replica_identity"]
    mutated = scenario().with_(mutant="ddp-bypass")

    def verdict(found: Verdict, *events: trace.Event) -> Verdict:
        finding = Finding(invariant="F-X", verdict=found, compared=1)
        judged = replace(check, judge=lambda *_: finding)
        one = trace.Trace(scenario=mutated, environment={}, promises=(), events=events)
        return judgement.judge(
            CLAUSE, judged, Runs(one, {ALONE: (ended(scenario()),)})
        ).finding.verdict

    assert verdict(Verdict.HELD) is Verdict.INCONCLUSIVE
    assert verdict(Verdict.HELD, trace.Planted(name="ddp-bypass")) is Verdict.HELD
    assert verdict(Verdict.FALSIFIED) is Verdict.FALSIFIED
    idle = judgement.judge(CLAUSE, check_with(held), Runs(ended(mutated))).finding
    why = "mutant ddp-bypass took no part: no function that it replaces was called in this run"
    assert (idle.reason, idle.compared) == (why, 1)


def test_a_bug_in_somebodys_own_trainer_is_not_planted_here() -> None:
    """In a user's own trainer `mutant` is only a name, and the run counts as it is."""
    theirs = ended(scenario().with_(system="mine", workload="own", mutant="my-label"))
    found = judgement.judge(CLAUSE, check_with(held), Runs(theirs)).finding
    assert (found.verdict, found.compared) == (Verdict.HELD, 1)


def test_nothing_to_compare_anywhere() -> None:
    """The combination is vacuous only if every finding is."""
    open_ = finding(Verdict.INCONCLUSIVE, 0, "x")
    empty = replace(open_, vacuous=True)
    assert judgement.combine([empty, empty]).vacuous
    assert not judgement.combine([empty, open_]).vacuous
