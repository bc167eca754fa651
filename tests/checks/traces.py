"""Traces to judge: real runs, and the same with one thing broken by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from entrenar_py import systems
from entrenar_py.checks import CHECKS
from entrenar_py.contract import Invariant
from entrenar_py.contract.problems import Position
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.trace import E, End, Event, TensorRecord, Tensors, Trace, record_tensor
from entrenar_py.verdict import Counterexample, Finding, Verdict

# The published tolerances; the other clauses are exact.
TOLERANCES = {"parity": 0.01, "recovery": 50.0}


def scenario(**changes: Any) -> Scenario:
    """Two epochs of 12 samples in batches of 5, 5, 2, on three workers with five shards."""
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
    """The trace of a run that did not fail."""
    trace = systems.run(subject)
    assert trace.end.status != "failed", trace.end.reason
    return trace


def family(check: str, subject: Scenario) -> list[Trace]:
    """The traces on which `check` judges `subject`, its own first."""
    return [run(member) for member in CHECKS[check].family(subject)]


def clause(check: str, tolerance: float | None = None) -> Invariant:
    """A clause that `check` decides; without `tolerance`, the published one."""
    return Invariant(
        id=CHECKS[check].id,
        name=check,
        statement="",
        position=Position("tests.yaml", 1, 1),
        tolerance=TOLERANCES.get(check) if tolerance is None else tolerance,
    )


def judge(check: str, traces: Sequence[Trace], tolerance: float | None = None) -> Finding:
    """The finding of `check` on `traces`."""
    return CHECKS[check].judge(clause(check, tolerance), traces)


def broken(finding: Finding) -> Counterexample:
    """The counterexample of a falsified finding."""
    assert finding.verdict is Verdict.FALSIFIED, finding
    assert finding.counterexample is not None
    return finding.counterexample


def one(trace: Trace, kind: type[E], **at: Any) -> E:
    """The first event of `kind` whose fields are as in `at`."""
    return next(event for event in trace.of(kind) if _matches(event, kind, at))


def altered(trace: Trace, kind: type[Event], at: dict[str, Any], **changes: Any) -> Trace:
    """`trace` with `changes` in each event of `kind` whose fields are as in `at`."""
    events = [
        replace(event, **changes) if _matches(event, kind, at) else event for event in trace.events
    ]
    assert events != list(trace.events), f"no {kind.kind} at {at}, or nothing changed"
    return replace(trace, events=tuple(events))


def without(trace: Trace, kind: type[Event], **at: Any) -> Trace:
    """`trace` without the events of `kind` whose fields are as in `at`."""
    events = tuple(event for event in trace.events if not _matches(event, kind, at))
    assert len(events) < len(trace.events), f"no {kind.kind} at {at}"
    return replace(trace, events=events)


def failed(subject: Scenario) -> Trace:
    """The trace of a run that crashed."""
    end = End(status="failed", reason="RuntimeError: out of luck")
    return Trace(scenario=subject, environment={}, promises=(), events=(end,))


def hand_written(*events: Event, subject: Scenario | None = None) -> Trace:
    """A completed trace of `events`."""
    end = End(status="completed")
    return Trace(scenario=subject or scenario(), environment={}, promises=(), events=(*events, end))


def was(trace: Trace, **traits: Any) -> Trace:
    """`trace` with other traits."""
    return replace(trace, traits=replace(trace.traits, **traits))


def values(*numbers: float, dtype: str = "float32") -> TensorRecord:
    """The record of a vector, with its values."""
    return record_tensor(np.array(numbers, dtype), values=True)


def swapped(tensors: Tensors, name: str, record: TensorRecord) -> Tensors:
    """`tensors` with another record under `name`."""
    return {**tensors, name: record}


def leave(rank: int, step: int) -> Fault:
    """Worker `rank` dies in `step`."""
    return Fault(kind="leave", rank=rank, step=step)


def join(rank: int, step: int) -> Fault:
    """Worker `rank` comes back before `step`."""
    return Fault(kind="join", rank=rank, step=step)


def _matches(event: Event, kind: type[Event], at: dict[str, Any]) -> bool:
    return isinstance(event, kind) and all(getattr(event, k) == v for k, v in at.items())
