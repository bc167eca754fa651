"""Stored traces: each judged beside its family, by the clauses that it can say something about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import checks, stored, systems, trace
from entrenar_py.contract import Invariant
from entrenar_py.contract.problems import Position
from entrenar_py.errors import TraceError, UsageError
from entrenar_py.plan import Task
from entrenar_py.reports.report import Entry
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import Verdict


def scenario(**changes: Any) -> Scenario:
    """Two workers, four steps."""
    usual = {"system": "reference", "workload": "linear", "world_size": 2, "seed": 0}
    return Scenario(**{**usual, "num_steps": 4, **changes})


def run(**changes: Any) -> Trace:
    """The trace of `scenario`."""
    return systems.run(scenario(**changes))


def judged(name: str, *traces: Trace, planned: tuple[Scenario, ...] = (scenario(),)) -> Entry:
    """What the check `name` says of `traces`."""
    clause = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 3, 5))
    task = Task(invariant=clause, check=checks.CHECKS.get(name), planned=planned)
    (entry,) = stored.judge_stored([task], traces)
    return entry


def test_planned_and_others() -> None:
    """Runs that the clause plans, and any other training run: all count, none was explored."""
    entry = judged("replica_identity", run(), run(seed=1), run(system="textbook"))
    assert (entry.verdict, entry.num_scenarios, entry.num_explored) == (Verdict.HELD, 3, 0)


def test_a_run_by_others_is_a_training_run() -> None:
    """Its system is not ours, so it is judged like any trainer's."""
    theirs = replace(run(), scenario=scenario(system="their own"))
    assert judged("replica_identity", theirs).verdict is Verdict.HELD


def test_beside_its_family() -> None:
    """A run is compared with those it was compared with when it was run, if they are there."""
    alone = judged("determinism", run())
    assert alone.verdict is Verdict.INCONCLUSIVE
    assert alone.finding.reason.startswith("no scenario was run twice: record a second run")
    assert judged("determinism", run(), run(repeat=1)).verdict is Verdict.HELD


def test_the_nearest_other_trace_is_put_beside() -> None:
    """Where a baseline is missing the reason says how the nearest trace misses it; a copy of the
    trace itself is none.
    """
    entry = judged("determinism", run(), run(repeat=1, seed=7))
    assert entry.finding.reason.endswith("the nearest other trace differs in seed (7, needed 0)")
    assert judged("determinism", run(), run()).verdict is Verdict.INCONCLUSIVE
    theirs = [
        replace(trace, scenario=trace.scenario.with_(system="mine", workload="own"), promises=())
        for trace in (run(detail="values"), run(detail="values", world_size=1, num_shards=1))
    ]
    assert judged("parity", *theirs).verdict is Verdict.HELD


def test_probes_say_that_they_are() -> None:
    """A training trace is no evidence for them, and the reason says what to run."""
    entry = judged("matmul", run(), planned=(scenario(system="matmul", world_size=1),))
    assert "--only F-X and without --judge" in entry.finding.reason


def test_two_traces_of_one_scenario() -> None:
    """Both are judged: the broken one is not hidden by the sound one, in either order."""
    sound = run()
    update = sound.of(trace.Update)[-1]
    drifted = replace(update, weights={"weight": trace.TensorRecord("0" * 32)})
    events = tuple(drifted if event is update else event for event in sound.events)
    for pair in ((replace(sound, events=events), sound), (sound, replace(sound, events=events))):
        assert judged("replica_identity", *pair).verdict is Verdict.FALSIFIED


def test_probes_are_left_to_their_clauses() -> None:
    """A matrix product is no evidence on replicas, not even missing evidence."""
    product = run(system="matmul", world_size=1)
    entry = judged("replica_identity", product)
    assert entry.finding.reason == "c.yaml:3:5: no run of it was seen: nothing was compared"
    assert judged("replica_identity", run(), product).verdict is Verdict.HELD


def test_failed_runs_count() -> None:
    """Whether planned or not: a run that failed is never passed over."""
    failed = replace(run(seed=3), events=(trace.End(status="failed", reason="it crashed"),))
    entry = judged("replica_identity", run(), failed)
    assert entry.verdict is Verdict.INCONCLUSIVE
    assert "it crashed" in entry.finding.reason


def test_uncovered() -> None:
    """A clause without a check stays open."""
    assert judged("no such check", run()).verdict is Verdict.INCONCLUSIVE


def test_load(tmp_path: Path) -> None:
    """Files, and folders of them in the order of their names; nothing else in a folder counts."""
    folder = tmp_path / "t"
    for name, seed in (("b.jsonl", 1), ("a.jsonl", 0), ("notes.txt", 2)):
        trace.save(run(seed=seed), folder / name)
    loaded = stored.load([folder / "notes.txt", folder])
    assert [one.scenario.seed for one in loaded] == [2, 0, 1]
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"none: holds no \*.jsonl file; give one that does"):
        stored.load([tmp_path / "none"])
    with pytest.raises(TraceError, match="gone"):
        stored.load([tmp_path / "gone"])


def test_environment() -> None:
    """What all traces agree on once, what they differ in as a list."""
    one, two = (replace(run(), environment={"torch": v, "python": "3"}) for v in ("1", "2"))
    more = replace(one, environment={"python": "3", "gpu": "a"})
    assert stored.environment([one, two, one, more]) == {
        "torch": ["1", "2"],
        "python": "3",
        "gpu": "a",
    }
