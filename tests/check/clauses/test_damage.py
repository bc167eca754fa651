"""Foreign and damaged traces: every judge returns a finding on any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from entrenar_py.check.clauses import CHECKS, Check
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Event, TensorRecord, Tensors, Trace
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import scenario, values

TRAINING = [check for check in CHECKS.values() if check.explores]
SUBJECTS = (
    scenario(detail="values"),
    scenario(
        optimizer="momentum",
        dropout=0.3,
        stops=(2, 4),
        faults=(traces.leave(1, 1), traces.join(1, 4)),
    ),
    scenario(faults=(Fault(kind="non_finite_loss", step=3, rank=1, value="nan"),)),
    scenario(system="textbook", workload="linear", detail="values", clip_norm=0.05),
)
RECORDS = (
    values(),
    values(1.0),
    values(math.nan, math.inf),
    values(1.0, 2.0, dtype="float64"),
    TensorRecord("0" * 32),
)
# What a field of an annotated type may hold in a trace that some other tool wrote, or someone
# edited: by the start of the annotation.
STRANGE: dict[str, st.SearchStrategy[Any]] = {
    "int | None": st.sampled_from([None, -1, 0, 7, 2**40]),
    "int": st.sampled_from([-1, 0, 1, 7, 2**40]),
    "float | None": st.sampled_from([None, 0.0, math.nan, math.inf, 1e300]),
    "float": st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e300]),
    "bool": st.booleans(),
    "str | None": st.sampled_from([None, "", "w"]),
    "str": st.sampled_from(["", "left", "joined", "failed", "halted"]),
    "tuple[int, ...]": st.lists(st.integers(-1, 13), max_size=4).map(tuple),
    "tuple[str, ...]": st.lists(st.sampled_from(["weight", "w"]), max_size=2).map(tuple),
    "tuple[tuple[str, ...], ...]": st.sampled_from([(), (("w",),), (("w", "weight"), ("w", "v"))]),
    "tuple[tuple[str, str], ...]": st.sampled_from([(), (("w", "weight"),)]),
    "tuple[tuple[float, ...], ...]": st.sampled_from([(), ((0.0, math.nan),), ((1.0,), ())]),
    "Mapping": st.sampled_from([{}, {"kind": "non_finite_loss"}, {"step": None}]),
}


def strange_tensors(tensors: Tensors) -> st.SearchStrategy[Tensors]:
    """Return `tensors` with some lost, emptied or replaced, or none at all."""
    names = sorted(tensors) or ["w"]
    changed = st.dictionaries(st.sampled_from(names), st.sampled_from(RECORDS), min_size=1)
    return changed.flatmap(lambda new: st.sampled_from([{**tensors, **new}, new, {}]))


def damaged(data: DataObject, events: list[Event]) -> list[Event]:
    """Return `events` with one of them, or their order, damaged."""
    if not events:
        return events
    at = data.draw(st.integers(0, len(events) - 1))
    how = data.draw(st.sampled_from(["drop", "repeat", "move", "cut", "edit", "edit", "edit"]))
    if how == "drop":
        return events[:at] + events[at + 1 :]
    if how == "repeat":
        return [*events, events[at]]
    if how == "move":
        return [*events[:at], *events[at + 1 :], events[at]]
    if how == "cut":
        return events[:at] + events[-1:]
    return [*events[:at], edited(data, events[at]), *events[at + 1 :]]


def edited(data: DataObject, event: Event) -> Event:
    """Return `event` with a strange value in one of its fields."""
    field = data.draw(st.sampled_from(fields(event)))
    annotation = str(field.type)
    if annotation == "Tensors":
        tensors = data.draw(strange_tensors(getattr(event, field.name)))
        return replace(event, **{field.name: tensors})
    kind = next(start for start in STRANGE if annotation.startswith(start))
    return replace(event, **{field.name: data.draw(STRANGE[kind])})


def families(check: Check) -> Callable[[], list[list[Trace]]]:
    return lambda: [traces.family(check.name, subject) for subject in SUBJECTS]


def assert_sound(finding: Finding) -> None:
    """Assert that a HELD finding has comparisons, and that any other has a reason."""
    assert isinstance(finding, Finding)
    assert (finding.verdict is Verdict.HELD) == (finding.reason == "")
    assert (finding.verdict is Verdict.FALSIFIED) == (finding.counterexample is not None)
    assert finding.compared > 0 or finding.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_traces_crash_no_judge(check: Check, data: DataObject) -> None:
    """Events lost, doubled, moved or edited in any way give a sound finding."""
    family = list(data.draw(st.sampled_from(families(check)())))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(family) - 1))
        events = damaged(data, list(family[at].events))
        family[at] = replace(family[at], events=tuple(events))
    kept = data.draw(st.permutations(family).map(lambda order: order[: len(order)]))
    assert_sound(traces.judge(check.name, kept))


@pytest.mark.parametrize("check", TRAINING, ids=lambda check: check.name)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_mix_of_runs_is_judged_soundly(check: Check, data: DataObject) -> None:
    """Runs of different trainings, in any order and number, raise nothing and falsify nothing."""
    pool = [trace for family in families(check)() for trace in family]
    if check.name == "worker_count":  # the textbook trainer promises no bits
        pool = [trace for trace in pool if trace.scenario.system == "reference"]
    chosen = data.draw(st.lists(st.sampled_from(pool), max_size=6))
    finding = traces.judge(check.name, chosen)
    assert_sound(finding)
    assert finding.verdict is not Verdict.FALSIFIED, finding
