"""Traces to judge: real runs, and copies with one thing broken by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import UnionType
from typing import Any

import numpy as np

from entrenar_py import systems
from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.check.harness import companions
from entrenar_py.check.harness.judgement import combine
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS, traits_of
from entrenar_py.shared.trace import (
    E,
    End,
    Event,
    Shard,
    Start,
    TensorRecord,
    Tensors,
    Trace,
    Traits,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Counterexample, Finding, Tally, Verdict

Kind = type[Event] | UnionType
FAILED = End(status="failed", reason="RuntimeError: out of luck")
# The published tolerances; the other clauses are exact.
TOLERANCES = {"parity": 0.01, "recovery": 50.0}


def scenario(**changes: Any) -> Scenario:
    """Return a scenario of two epochs: 12 samples in batches of 5, 5, 2, on 3 workers, 5 shards."""
    usual: dict[str, Any] = {
        "system": "reference",
        "workload": "mlp",
        "world_size": 3,
        "seed": 4,
        "num_shards": 5,
        "num_samples": 12,
        "batch_size": 5,
        "num_steps": 6,
        "width": 3,
    }
    return Scenario(**{**usual, **changes})


@cache
def run(subject: Scenario) -> Trace:
    """Return the trace of a run that did not fail."""
    trace = systems.run(subject)
    assert trace.end.status != "failed", trace.end.reason
    return trace


def family(check: str, subject: Scenario) -> list[Trace]:
    """Return the traces on which `check` judges `subject`, with its own first."""
    runs = companions.of(CHECKS[check].needs, subject)
    return [run(member) for member in dict.fromkeys((subject, *runs))]


def clause(check: str, tolerance: float | None = None) -> Invariant:
    """Return a clause that `check` decides; without `tolerance`, the published one."""
    return Invariant(
        id=CHECKS[check].id,
        name=check,
        statement="",
        position=Position("tests.yaml", 1, 1),
        tolerance=TOLERANCES.get(check) if tolerance is None else tolerance,
    )


def judge(
    check: str, traces: Sequence[Trace] | Runs[Trace], tolerance: float | None = None
) -> Finding:
    """Return the finding on the first of `traces`, with the others as the runs it needs."""
    row, invariant = CHECKS[check], clause(check, tolerance)
    if isinstance(traces, Runs):
        return row.judge(invariant, traces)
    if not row.needs:
        return row.judge(invariant, several(traces))
    scenarios = {number: trace.scenario for number, trace in enumerate(traces)}
    findings, left = [], [*scenarios]
    while left:
        runs = companions.among(row.needs, left[0], scenarios)
        findings.append(row.judge(invariant, runs.chosen(lambda number: traces[number])))
        done = {left[0], *runs, *(near.run for near in runs.near.values())}
        left = [number for number in left if number not in done]
    telling = [finding for finding in findings if not finding.vacuous]
    return combine(telling or findings or [row.judge(invariant, Runs())])


def held(check: str, *runs: Trace | Runs[Trace], tolerance: float | None = None) -> Finding:
    """Return the finding of `check`, which holds."""
    finding = _judge(check, runs, tolerance)
    assert finding.verdict is Verdict.HELD, finding
    return finding


def falsified(
    check: str, *runs: Trace | Runs[Trace], tolerance: float | None = None
) -> Counterexample:
    """Return the counterexample of `check`, which is falsified."""
    return broken(_judge(check, runs, tolerance))


def left_open(check: str, *runs: Trace | Runs[Trace], tolerance: float | None = None) -> str:
    """Return the reason of `check`, which is inconclusive."""
    return undecided(_judge(check, runs, tolerance))


def _judge(check: str, runs: Sequence[Trace | Runs[Trace]], tolerance: float | None) -> Finding:
    if runs and isinstance(runs[0], Runs):
        return judge(check, runs[0], tolerance)
    return judge(check, [run for run in runs if isinstance(run, Trace)], tolerance)


def several(traces: Sequence[Trace]) -> Runs[Trace]:
    """Return Runs in which each run is judged by itself."""
    return Runs(traces[0], {ALONE: tuple(traces[1:])}) if traces else Runs()


def broken(judged: Finding | Tally) -> Counterexample:
    """Return the counterexample of what is falsified."""
    if isinstance(judged, Tally):
        assert judged.broken is not None, judged
        return judged.broken
    assert judged.verdict is Verdict.FALSIFIED, judged
    assert judged.counterexample is not None
    return judged.counterexample


def undecided(finding: Finding) -> str:
    """Return the reason of an inconclusive finding."""
    assert finding.verdict is Verdict.INCONCLUSIVE, finding
    return finding.reason


def one(trace: Trace, kind: type[E], **at: Any) -> E:
    """Return the first event of `kind` whose fields equal `at`."""
    return next(event for event in trace.of(kind) if _matches(event, kind, at))


def altered(trace: Trace, kind: Kind, at: dict[str, Any], **changes: Any) -> Trace:
    """Return `trace` with `changes` in each event of `kind` whose fields equal `at`.

    A change may be a function of the event, and what a field has to equal one of its value.
    """
    depends = any(callable(change) for change in changes.values())
    events = [
        replace(event, **{n: v(event) if callable(v) else v for n, v in changes.items()})
        if _matches(event, kind, at)
        else event
        for event in trace.events
    ]
    assert depends or events != list(trace.events), f"no {kind} at {at}, or nothing changed"
    return replace(trace, events=tuple(events))


def without_gradients(trace: Trace) -> Trace:
    """Return `trace` with gradients of zero in all micro-batches and steps."""
    zeros = {"gradient": lambda event: {n: _zero(one) for n, one in event.gradient.items()}}
    return altered(trace, Shard | Update, {}, **zeros)


def _zero(tensor: TensorRecord) -> TensorRecord:
    return values(*[0.0] * (tensor.size or 0))


def without_motion(trace: Trace, *, until: float = math.inf) -> Trace:
    """Return `trace` in which no rank moves its weights before step `until`."""
    first = {start.rank: start.weights for start in reversed(trace.of(Start)) if start.step == 0}
    early = {"step": lambda step: step < until}
    return altered(trace, Start | Update, early, weights=lambda event: first[event.rank])


def without(trace: Trace, kind: Kind, **at: Any) -> Trace:
    """Return `trace` without the events of `kind` whose fields equal `at`."""
    events = tuple(event for event in trace.events if not _matches(event, kind, at))
    assert len(events) < len(trace.events), f"no {kind} at {at}"
    return replace(trace, events=events)


def failed(subject: Scenario) -> Trace:
    """Return the trace of a run that crashed."""
    return hand_written(subject=subject, end=FAILED)


def hand_written(*events: Event, subject: Scenario | None = None, end: End | None = None) -> Trace:
    """Return a trace of `events`, by default a completed one."""
    subject = subject or scenario()
    traits = traits_of(subject) if subject.system in SYSTEMS else Traits()
    events = (*events, end or End(status="completed"))
    return Trace(scenario=subject, environment={}, promises=(), events=events, traits=traits)


def was(trace: Trace, **traits: Any) -> Trace:
    """Return `trace` with other traits."""
    return replace(trace, traits=replace(trace.traits, **traits))


def observed(subject: Scenario | None = None, **traits: Any) -> Trace:
    """Return the run of a script, with these traits."""
    trace = run(subject or scenario())
    own = trace.scenario.with_(system="command", workload="own")
    return was(replace(trace, scenario=own, promises=()), **traits)


def values(*numbers: float, dtype: str = "float32") -> TensorRecord:
    """Return the record of a vector, with its values."""
    return record_tensor(np.array(numbers, dtype), values=True)


def numbers(record: TensorRecord) -> list[float]:
    """Return the elements of a record that has them."""
    known = record.values()
    assert known is not None
    return [float(one) for one in known]


def records(vectors: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Return the records of arrays in float32, with their values."""
    arrays = {name: np.ascontiguousarray(one, np.float32) for name, one in vectors.items()}
    return {name: record_tensor(one, values=True) for name, one in arrays.items()}


def in_bfloat16(vector: Any) -> Any:
    """Return numbers rounded to bfloat16, as float32."""
    bits = vector.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def update(step: int, rank: int = 0, **fields: Any) -> Update:
    """Return a step of a rank, in which only the given fields matter."""
    usual: dict[str, Any] = {
        "loss": 1.0,
        "weight": 1.0,
        "learning_rate": 0.1,
        "finite": True,
        "weights": {},
    }
    return Update(**{**usual, "step": step, "rank": rank, **fields})


def shard(step: int, rank: int = 0, **fields: Any) -> Shard:
    """Return the micro-batch of a rank in `step`, in which only the given fields matter."""
    usual: dict[str, Any] = {
        "epoch": 0,
        "shard": 0,
        "ids": (),
        "loss_sum": 1.0,
        "weight": 1.0,
        "finite": True,
    }
    return Shard(**{**usual, "step": step, "rank": rank, **fields})


def reaching(
    weights: Sequence[Tensors], *, rank: int = 0, begin: int = 0, **fields: Any
) -> list[Event]:
    """Return a rank's start with the first of `weights`, and a step to each of the others.

    What is `trainable`, `frozen` and of which `shapes` belongs to the start, other fields to the
    steps, of which they may be a function.
    """
    facts = {n: fields.pop(n) for n in ("trainable", "frozen", "shapes") if n in fields}
    start = Start(step=begin, rank=rank, weights=weights[0], resumed=begin > 0, **facts)
    made = [
        update(
            step,
            rank,
            weights=after,
            **{name: value(step) if callable(value) else value for name, value in fields.items()},
        )
        for step, after in enumerate(weights[1:], start=begin)
    ]
    return [start, *made]


def swapping(part: str, name: str, record: TensorRecord) -> dict[str, Callable[[Any], Tensors]]:
    """Return the change of an event that has another record under `name` in a part of its state."""
    return {part: lambda event: {**getattr(event, part), name: record}}


def also(trace: Trace, *events: Event) -> Trace:
    """Return `trace` with more events before its end."""
    return replace(trace, events=(*trace.events[:-1], *events, trace.events[-1]))


def leave(rank: int, step: int) -> Fault:
    """Return the fault that worker `rank` dies in `step`."""
    return Fault(kind="leave", rank=rank, step=step)


def join(rank: int, step: int) -> Fault:
    """Return the fault that worker `rank` comes back before `step`."""
    return Fault(kind="join", rank=rank, step=step)


def _matches(event: Event, kind: Kind, at: dict[str, Any]) -> bool:
    return isinstance(event, kind) and all(
        wanted(getattr(event, name)) if callable(wanted) else getattr(event, name) == wanted
        for name, wanted in at.items()
    )
