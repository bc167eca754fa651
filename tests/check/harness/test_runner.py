"""Running scenarios: once each, stopped if they stall, judged with the runs they need."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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
from entrenar_py.train.coordinator.recorder import Recorder

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
    why = "mutant ddp-bypass had no effect: no function that it replaces was called in this run"
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


SCENARIO = Scenario(system="reference", workload="linear", world_size=2, seed=0, num_steps=3)
STOPPED = "SystemFailure: the run made no progress for 0.05 s and was stopped"


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    """Give the process of these tests back the trust that they take from it."""
    yield
    runner._distrusted.clear()


def hang() -> NoReturn:
    """Wait for ever."""
    threading.Event().wait()
    raise AssertionError("an event that no one sets was set")


def replace_run(monkeypatch: pytest.MonkeyPatch, run: Callable[[Scenario], trace.Trace]) -> None:
    """Let `run` be the system of SCENARIO in this process."""
    monkeypatch.setattr("entrenar_py.systems.reference.run", run)


def test_a_run_that_hangs_is_stopped_and_the_next_is_made_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trace has failed with the reason; the next run is right, and made in another process.

    In this process every run hangs, so one that ends was made elsewhere.
    """
    right = systems.run(SCENARIO)
    replace_run(monkeypatch, lambda one: hang())
    before = signal.getsignal(signal.SIGALRM)
    stopped = Runner(patience_s=0.05).run(SCENARIO).end
    assert (stopped.status, stopped.reason) == ("failed", STOPPED)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    elsewhere = Runner().run(SCENARIO)  # by a process that has loaded less: its environment differs
    assert (elsewhere.events, elsewhere.end) == (right.events, right.end)


def test_a_run_that_goes_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes much longer than the patience is not stopped while it records events."""

    def slow(one: Scenario) -> trace.Trace:
        recorder = Recorder(one)
        for step in range(10):
            recorder.emit(trace.Membership(step=step, rank=0, change="joined"))
            signal.pause()  # until somebody looks whether it stalls
        return recorder.finish(status="completed")

    replace_run(monkeypatch, slow)
    result = Runner(patience_s=0.4).run(SCENARIO)
    assert (result.end.status, result.end.reason) == ("completed", "")
    assert len(result.events) == 11


def test_a_signal_that_comes_at_the_end_of_a_run_has_no_successor() -> None:
    """One that is handled after the timer was stopped leaves it so, and interrupts nothing."""
    with runner._interrupted(60.0):
        signal.setitimer(signal.ITIMER_REAL, 0)
        look = signal.getsignal(signal.SIGALRM)
    assert callable(look)
    look(signal.SIGALRM, None)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_import_is_never_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that takes longer than the patience is loaded whole; then the run is stopped."""
    (tmp_path / "slowly_loaded.py").write_text(
        "import signal\nfor _ in range(20):\n    signal.pause()\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def run(one: Scenario) -> trace.Trace:
        import slowly_loaded  # type: ignore[import-not-found]  # noqa: F401

        return hang()

    replace_run(monkeypatch, run)
    assert Runner(patience_s=0.05).run(SCENARIO).end.reason == STOPPED
    assert sys.modules.pop("slowly_loaded").whole


def test_outside_the_main_thread_no_run_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals reach the main thread alone: elsewhere a run may take as long as it likes."""
    runs = Runner(patience_s=1e-9)
    thread = threading.Thread(target=runs.run, args=(SCENARIO,))
    thread.start()
    thread.join()
    monkeypatch.setattr(systems, "run", pytest.fail)  # it is remembered
    assert runs.run(SCENARIO).end.status == "completed"


@pytest.mark.by_hand
def test_a_process_elsewhere_is_replaced() -> None:
    """One that hangs is killed, and one that dies is noticed; the next run is right each time."""
    # An adapter that another test has opened here is in this process's environment alone.
    elsewhere, right = runner.Elsewhere(), systems.run(SCENARIO).events
    for end, reason in ((signal.SIGSTOP, "made no progress for 1 s"), (signal.SIGKILL, "died")):
        assert elsewhere.run(SCENARIO, patience_s=60.0).events == right
        process = elsewhere._process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, end)
        assert reason in elsewhere.run(SCENARIO, patience_s=1.0).end.reason
    assert elsewhere.run(SCENARIO, patience_s=60.0).events == right
    elsewhere.end()
