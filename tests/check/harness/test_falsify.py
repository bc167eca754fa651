"""The search tries known, planned, then explored scenarios, and saves a shrunk counterexample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import counterexamples, falsify
from entrenar_py.check.harness.plan import Plan, Task
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Trace
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive

CLAUSE = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))
Decide = Callable[[Scenario], Verdict | None]


def scenario(**changes: Any) -> Scenario:
    """Return a scenario with three workers and five steps."""
    usual = {"system": "reference", "workload": "linear", "world_size": 3, "seed": 0}
    return Scenario(**{**usual, **changes})


@pytest.fixture(autouse=True)
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """Return the scenarios that were run, in order. Runs with learning rate 9 end as failed."""
    monkeypatch.chdir(tmp_path)
    seen: list[Scenario] = []

    def run(one: Scenario) -> Trace:
        seen.append(one)
        status = "failed" if one.learning_rate == 9 else "completed"
        return Trace(scenario=one, environment={}, promises=(), events=(End(status=status),))

    monkeypatch.setattr(systems, "run", run)
    return seen


def check_that(decide: Decide, *, explores: bool = True) -> Check:
    """Return a check that judges each run by `decide(scenario)`; None: nothing was compared."""

    def judge(clause: Invariant, runs: Runs[Trace]) -> Finding:
        (trace,) = runs
        verdict = decide(trace.scenario)
        if verdict is None:
            return inconclusive(clause.id, f"nothing to see, {trace.end.status}")
        if verdict is Verdict.HELD:
            return Finding(invariant=clause.id, verdict=verdict, compared=1, notes=("seen",))
        return Finding(
            invariant=clause.id,
            verdict=verdict,
            compared=1,
            reason="it broke",
            counterexample=Counterexample(message="it broke", scenario=trace.scenario.to_dict()),
        )

    usual = checks.CHECKS["replica_identity"]
    return replace(usual, name="fake", judge=judge, explores=explores)


def task(decide: Decide, *planned: Scenario, explores: bool = True, **changes: Any) -> Task:
    check = check_that(decide, explores=explores)
    return Task(invariant=CLAUSE, check=check, planned=planned, **changes)


def attempt(one: Task, **wishes: Any) -> Entry:
    """Return the entry of one task."""
    (entry,) = falsify.falsify([one], Plan(**wishes))
    return entry


def held(one: Scenario) -> Verdict:
    return Verdict.HELD


def test_held(ran: list[Scenario]) -> None:
    """Every planned scenario and every example is tried once, and all comparisons count."""
    entry = attempt(task(held, scenario(), scenario(seed=1)), num_examples=7)
    assert (entry.verdict, entry.num_scenarios, entry.num_explored) == (Verdict.HELD, 2, 7)
    assert entry.finding.compared == 9
    assert entry.finding.notes == ("seen",)
    assert entry.replay is None
    assert ran[:2] == [scenario(), scenario(seed=1)]


def test_a_planned_break_ends_the_search(ran: list[Scenario]) -> None:
    """After a break, nothing more is tried, and the smallest scenario that breaks is saved."""
    broken = task(
        lambda one: Verdict.FALSIFIED if one.world_size > 1 else Verdict.HELD,
        scenario(world_size=1),
        scenario(),
        scenario(seed=99),
    )
    entry = attempt(broken)
    assert (entry.verdict, entry.num_scenarios, entry.num_explored) == (Verdict.FALSIFIED, 2, 0)
    assert scenario(seed=99) not in ran
    assert entry.replay is not None
    saved = counterexamples.load(Path(entry.replay))
    assert (saved.scenario.world_size, saved.scenario.num_steps) == (2, 1)
    assert entry.finding.counterexample == saved.finding.counterexample
    assert entry.finding.reason == "it broke"


def test_a_break_found_by_exploring() -> None:
    """If the planned scenarios hold, exploring goes on until one breaks."""
    entry = attempt(
        task(
            lambda one: Verdict.FALSIFIED if one.optimizer == "adamw" else Verdict.HELD, scenario()
        ),
        num_examples=50,
    )
    assert entry.verdict is Verdict.FALSIFIED
    assert entry.num_scenarios == 1
    assert 1 <= entry.num_explored < 50
    assert entry.replay is not None
    assert counterexamples.load(Path(entry.replay)).scenario.optimizer == "adamw"


def test_known_first(ran: list[Scenario]) -> None:
    """A scenario that broke the clause before is tried before the contract's own."""
    attempt(task(held, scenario(), known=(scenario(seed=5),)), num_examples=0)
    assert [one.seed for one in ran] == [5, 0]


def test_no_exploring(ran: list[Scenario]) -> None:
    """Nothing is explored without examples, for probes, or without a planned scenario."""
    assert attempt(task(held, scenario()), num_examples=0).num_explored == 0
    assert attempt(task(held, scenario(), explores=False)).num_explored == 0
    entry = attempt(task(held))
    assert entry.finding.reason == "c.yaml:3:5: no run of it was seen: nothing was compared"
    assert len(ran) == 2


def test_probes_are_not_shrunk(ran: list[Scenario]) -> None:
    """Probes keep their scenario, because shrinking does not know their options."""
    entry = attempt(task(lambda one: Verdict.FALSIFIED, scenario(), explores=False))
    assert entry.replay is not None
    assert counterexamples.load(Path(entry.replay)).scenario == scenario()
    assert ran == [scenario()]


def test_exploring_starts_from_short_runs(ran: list[Scenario]) -> None:
    """Exploring starts from long runs only if there are no short ones."""
    attempt(task(held, scenario(num_steps=104), scenario()), num_examples=10)
    assert all(one.num_steps <= 8 for one in ran[2:])
    ran.clear()
    attempt(task(held, scenario(num_steps=104)), num_examples=3)
    assert {one.num_steps for one in ran} == {104}


def test_explored_runs_without_evidence() -> None:
    """A sound explored run without evidence is ignored; a failed one makes it inconclusive."""

    def decide(one: Scenario) -> Verdict | None:
        return None if one.seed else Verdict.HELD

    assert attempt(task(decide, scenario())).verdict is Verdict.HELD
    entry = attempt(task(decide, scenario(learning_rate=9.0)))
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert entry.finding.reason == "nothing to see, failed"


def test_uncovered() -> None:
    """A clause without a check is inconclusive."""
    entry = attempt(Task(invariant=CLAUSE, check=None))
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert "no check covers it" in entry.finding.reason


def test_stop_early() -> None:
    """No entry follows the first falsified one."""
    tasks = [task(held, scenario()), task(lambda one: Verdict.FALSIFIED, scenario())]
    tasks.append(tasks[0])
    stopped = falsify.falsify(tasks, Plan(num_examples=0), stop_early=True)
    assert [entry.verdict for entry in stopped] == [Verdict.HELD, Verdict.FALSIFIED]


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_timeout_leaves_scenarios_out(monkeypatch: pytest.MonkeyPatch, ran: list[Scenario]) -> None:
    """Scenarios not tried in time make the clause inconclusive; the reason counts them."""
    clock = Clock(monkeypatch)

    def slow(one: Scenario) -> Verdict:
        clock.now += 2.0
        return Verdict.HELD

    entry = attempt(task(slow, *(scenario(seed=n) for n in range(9))), timeout_s=5)
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert entry.finding.reason == "--timeout 5 s ran out after 3 of 9 scenarios"
    assert (entry.finding.compared, entry.num_explored) == (3, 0)


def test_timeout_ends_exploring_and_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the contract's scenarios, a timeout ends exploring with a note, and shrinking."""
    clock = Clock(monkeypatch)

    def slow(one: Scenario) -> Verdict:
        clock.now += 2.0
        return Verdict.HELD if clock.now < 20 else Verdict.FALSIFIED

    entry = attempt(task(slow, scenario()), timeout_s=9, num_examples=10**6)
    assert (entry.verdict, entry.num_explored) == (Verdict.HELD, 4)
    assert "--timeout ended exploring after 4 examples" in entry.finding.notes
    clock.now = 100.0
    entry = attempt(task(slow, scenario()), timeout_s=3)
    assert entry.replay is not None
    saved = counterexamples.load(Path(entry.replay)).scenario
    assert clock.now == 104.0
    assert saved != scenario()


def test_interrupted() -> None:
    """The current clause's result is yielded, later ones are named, the interrupt is raised."""

    def decide(one: Scenario) -> Verdict:
        if one.seed == 2:
            raise KeyboardInterrupt
        return Verdict.HELD

    planned = [scenario(seed=n) for n in range(4)]
    tasks = [task(decide, *planned), task(decide, *planned)]
    entries: Iterator[Entry] = falsify.falsify(tasks, Plan())
    entry = next(entries)
    assert (entry.verdict, entry.finding.compared) == (Verdict.INCONCLUSIVE, 2)
    assert entry.finding.reason == "interrupted after 2 scenarios"
    entry = next(entries)
    assert (entry.verdict, entry.num_scenarios) == (Verdict.INCONCLUSIVE, 0)
    assert entry.finding.reason == "interrupted before it was tried"
    with pytest.raises(KeyboardInterrupt):
        next(entries)


def test_a_counterexample_that_cannot_be_saved() -> None:
    """The verdict stays, and a note says why there is nothing to replay."""
    Path("falsification").write_text("in the way")
    entry = attempt(task(lambda one: Verdict.FALSIFIED, scenario()))
    assert (entry.verdict, entry.replay) == (Verdict.FALSIFIED, None)
    assert entry.finding.notes[-1].startswith("the counterexample could not be saved: ")


def test_progress() -> None:
    """Progress is reported for each scenario, each example and each attempt to shrink."""
    told: list[tuple[str, int, int, str]] = []
    broken = task(
        lambda one: Verdict.FALSIFIED if one.optimizer == "adamw" else Verdict.HELD, scenario()
    )
    list(
        falsify.falsify(
            [broken], Plan(num_examples=50), on_progress=lambda *what: told.append(what)
        )
    )
    assert told[0] == ("F-X", 0, 1, "reference linear x3")
    assert told[1] == ("F-X", 0, 50, "exploring")
    assert told[-1] == ("F-X", 0, 0, "shrinking")


def test_replay() -> None:
    """Only the saved scenario runs, and the entry names its file only if it still breaks."""
    for verdict, again in ((Verdict.FALSIFIED, "f.json"), (Verdict.HELD, None)):
        one = task(lambda one, verdict=verdict: verdict, known=(scenario(),))  # type: ignore[misc]
        entry = falsify.replay(one, Path("f.json"))
        assert (entry.verdict, entry.replay, entry.num_scenarios) == (verdict, again, 1)
    uncovered = falsify.replay(Task(invariant=CLAUSE, check=None), Path("f.json"))
    assert uncovered.verdict is Verdict.INCONCLUSIVE


LARGE = Scenario(
    system="reference",
    workload="mlp",
    world_size=6,
    seed=77,
    num_shards=9,
    num_samples=40,
    num_steps=8,
    accumulation=4,
    optimizer="adamw",
    schedule="cosine",
    warmup_steps=2,
    dropout=0.5,
    weight_decay=0.1,
    clip_norm=1.0,
    stops=(2, 5),
    faults=(Fault(kind="leave", rank=1, step=3), Fault(kind="leave", rank=4, step=6)),
)


Claim = Callable[[Scenario], bool]


def broken_if(claim: Claim, tried: list[Scenario]) -> Callable[[Scenario], Finding]:
    """Return an attempt that falsifies exactly the scenarios for which `claim` holds."""

    def attempt(scenario: Scenario) -> Finding:
        tried.append(scenario)
        verdict = Verdict.FALSIFIED if claim(scenario) else Verdict.HELD
        return Finding(invariant="F", verdict=verdict, compared=1)

    return attempt


def smallest(claim: Claim, **options: Any) -> tuple[Scenario, list[Scenario]]:
    """Return the last scenario to which LARGE is shrunk, and all that were tried."""
    tried: list[Scenario] = []
    *_, (scenario, finding) = falsify.shrink(LARGE, broken_if(claim, tried), **options)
    assert finding.verdict is Verdict.FALSIFIED
    assert claim(scenario)
    return scenario, tried


def test_everything_that_does_not_matter_goes() -> None:
    """A break that needs two workers and a stop keeps only those, and records values."""
    found, tried = smallest(lambda one: one.world_size >= 2 and bool(one.stops))
    assert (found.world_size, found.num_steps, found.num_samples) == (2, 2, 2)
    assert (found.workload, found.optimizer, found.schedule) == ("linear", "sgd", "constant")
    assert (found.accumulation, found.warmup_steps, found.dropout) == (1, 0, 0.0)
    assert (found.clip_norm, found.weight_decay, found.seed) == (None, 0.0, 0)
    assert (found.faults, found.stops, found.detail) == ((), (1,), "values")
    assert len(set(tried)) == len(tried) <= falsify.MAX_RUNS + 1


def test_faults_come_earlier() -> None:
    """A fault that matters moves to an early step and a low rank, so that the rest can shrink."""
    found, _ = smallest(lambda one: any(fault.kind == "leave" for fault in one.faults))
    assert [(fault.step, fault.rank) for fault in found.faults] == [(0, 0)]
    assert (found.world_size, found.num_steps) == (1, 1)


def test_nothing_simpler() -> None:
    """If no simpler scenario breaks, none is yielded, within MAX_RUNS attempts."""
    tried: list[Scenario] = []
    assert list(falsify.shrink(LARGE, broken_if(lambda one: False, tried))) == []
    assert len(tried) <= falsify.MAX_RUNS + 1


def test_values_already_recorded() -> None:
    """A scenario that records values is not run again."""
    tried: list[Scenario] = []
    valued = LARGE.with_(detail="values")
    list(falsify.shrink(valued, broken_if(lambda one: False, tried)))
    assert valued not in tried


def test_fixed_stays() -> None:
    """A fixed number of workers is not reduced."""
    found, tried = smallest(lambda one: True, fixed=("world_size",))
    assert {one.world_size for one in tried} == {6}
    assert found.num_steps == 1


@settings(max_examples=30, deadline=None)
@given(
    least=st.fixed_dictionaries(
        {"num_steps": st.integers(1, 8), "num_samples": st.integers(1, 40)}
    ),
    optimizer=st.sampled_from(("sgd", "momentum", "adamw")),
)
def test_deterministic(least: dict[str, int], optimizer: str) -> None:
    """The same break shrinks the same way, and each step is simpler than the one before."""

    def claim(one: Scenario) -> bool:
        sizes = all(getattr(one, name) >= value for name, value in least.items())
        return (sizes and one.optimizer == optimizer) or one == LARGE

    def run() -> list[Scenario]:
        return [one for one, _ in falsify.shrink(LARGE, broken_if(claim, []))]

    chain = run()
    assert chain == run()
    assert len(set(chain)) == len(chain)
