"""Weights before the first step: NaN falsifies, odd numbers are reported, zeros are noted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.causes import first_weights
from entrenar_py.check.clauses import step_rule
from entrenar_py.shared.trace import Noticed, Start, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.traces import values


def begun(*, num_steps: int = 1, optimizer: str = "sgd", **noticed: Any) -> Trace:
    """Return a run of one worker that noticed something of its matrices a and b."""
    weights = {"a": values(1.0, 2.0), "b": values(0.0, 0.0)}
    shapes = {"a": (1, 2), "b": (2, 1), "c": (3,)}
    start = Start(step=0, rank=0, weights=weights, trainable=("a", "b"), shapes=shapes)
    seen = Noticed(step=0, rank=0, **noticed)
    updates = [
        Update(
            step=step,
            rank=0,
            loss=1.0,
            weight=1.0,
            learning_rate=0.1,
            finite=True,
            weights=weights,
        )
        for step in range(num_steps)
    ]
    subject = traces.scenario(world_size=1, optimizer=optimizer)
    return traces.hand_written(start, seen, *updates, subject=subject)


@pytest.mark.parametrize("look", ["nan", "inf"])
def test_weights_that_are_not_finite(look: str) -> None:
    """A run that trains from a NaN breaks F-DP-003 before its first step."""
    trace = begun(peculiar={"a": look})
    found = traces.broken(traces.judge("finiteness", [trace]))
    assert (found.step, found.rank, found.tensor) == (-1, 0, "a")
    tally = Tally("F-DP-003")
    first_weights.judge_finite(tally, [begun(num_steps=0, peculiar={"a": look})])
    assert tally.broken is None
    assert "before the first step (a on rank 0)" in tally.missing[0]


@pytest.mark.parametrize(
    ("peculiar", "missing", "note"),
    [
        ({"b": "zero"}, "", "zero before the first step: b"),
        ({"a": "zero", "b": "zero"}, "all matrices are zero before the first step (a, b)", ""),
        ({"a": "uninitialised"}, "a look uninitialised on rank 0", ""),
        ({}, "", ""),
    ],
)
def test_peculiar_weights(peculiar: dict[str, str], missing: str, note: str) -> None:
    """One zero matrix may be right; all of them, or numbers of no initialisation, are reported."""
    tally = Tally("F-TI-005")
    first_weights.tell_peculiar(tally, begun(peculiar=peculiar))
    assert tally.broken is None
    assert [reason[: len(missing)] for reason in tally.missing] == ([missing] if missing else [])
    assert tally.notes == ([note] if note else [])


def test_weights_after_a_resume() -> None:
    """A run that resumes has trained: its weights are not judged as first ones."""
    trace = begun(peculiar={"a": "uninitialised"})
    events = [replace(e, step=3) if isinstance(e, Noticed) else e for e in trace.events]
    tally = Tally("F-TI-005")
    first_weights.tell_peculiar(tally, replace(trace, events=tuple(events)))
    assert tally.missing == []


@pytest.mark.parametrize(
    ("noticed", "optimizer", "words"),
    [
        ({"doubled": ("a",)}, "sgd", "the optimizer's parameters have it twice"),
        ({"doubled": ("a", "b"), "shared": (("a", "b"),)}, "adamw", "of the same memory"),
        ({"doubled": ("a", "b"), "shared": (("a", "b"),)}, "sgd", ""),
    ],
)
def test_stepped_twice(noticed: dict[str, Any], optimizer: str, words: str) -> None:
    """A tensor that is stepped twice is an error, but for two parameters under plain SGD."""
    tally = Tally("F-TI-008")
    twice = step_rule.judge_doubled(tally, begun(optimizer=optimizer, **noticed))
    assert twice == set(noticed["doubled"])
    assert (tally.broken is not None) == bool(words)
    assert words in (tally.broken.message if tally.broken else "")
