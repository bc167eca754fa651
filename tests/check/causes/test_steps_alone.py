"""Tensors that all ranks move by the gradient of one rank's own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.shared.trace import Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import (
    LOCAL,
    SHAPES,
    STEPS,
    Vectors,
    plus,
    records,
    summed,
    times,
    trace_of,
)

RATE = 0.1
OWNERS = {"a": 0, "b": 1}


def own(step: int, rank: int) -> Vectors:
    """Return the mean of a rank's own micro-batches."""
    return times(0.5, plus(*LOCAL[step][rank]))


def mean(step: int, _: int = 0) -> Vectors:
    return times(0.5, summed(step))


def run(gradients: Mapping[int, str], moves: str) -> Trace:
    """Return a run of plain SGD whose ranks hand over `gradients`, and move weights as `moves`."""
    kinds: dict[str, Callable[[int, int], Vectors]] = {
        "own": own,
        "mean": mean,
        "owner": lambda step, _: of_owners(step),
    }
    trace = trace_of([summed(step) for step in range(STEPS)])
    weights = {name: np.ones(size) for name, size in SHAPES.items()}
    after: dict[int, Vectors] = {}
    for step in range(STEPS):
        gradient = kinds[moves](step, 0)
        weights = {n: (w - RATE * gradient[n]).astype(np.float32) for n, w in weights.items()}
        after[step] = weights
    events = [
        replace(
            event,
            learning_rate=RATE,
            weights=records(after[event.step]),
            gradient=records(kinds[gradients[event.rank]](event.step, event.rank)),
        )
        if isinstance(event, Update)
        else replace(event, trainable=tuple(SHAPES))
        if isinstance(event, Start)
        else event
        for event in trace.events
    ]
    return traces.was(replace(trace, events=tuple(events)), rule="known")


def of_owners(step: int) -> Vectors:
    return {name: own(step, rank)[name] for name, rank in OWNERS.items()}


def judged(trace: Trace) -> Finding:
    return traces.judge("weighting", [trace])


def test_owners_that_step_by_their_own_samples_are_falsified() -> None:
    """Nobody reduces gradients. Ranks agree only because owners send their tensors around."""
    finding = judged(run({0: "own", 1: "own"}, "owner"))
    assert finding.verdict is Verdict.FALSIFIED
    assert "all ranks move a by the gradient of rank 0's own samples" in finding.reason


def test_one_rank_whose_weights_replace_the_others_is_falsified() -> None:
    finding = judged(run({0: "own", 1: "own"}, "own"))
    assert finding.verdict is Verdict.FALSIFIED


@pytest.mark.parametrize(
    ("gradients", "moves"),
    [
        ({0: "own", 1: "own"}, "mean"),  # the optimizer reduces them in its step
        ({0: "mean", 1: "own"}, "mean"),  # they were reduced to the rank that steps
    ],
)
def test_gradients_that_are_reduced_for_the_owner_alone_are_no_alarm(
    gradients: Mapping[int, str], moves: str
) -> None:
    assert judged(run(gradients, moves)).verdict is not Verdict.FALSIFIED
