"""Gradients that an optimizer divides inside its own step, and those that nothing divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check import evidence
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.check.clauses.micro_batch_traces import (
    LOCAL,
    SHAPES,
    STEPS,
    Vectors,
    plus,
    summed,
    times,
    trace_of,
)
from tests.traces import altered, records, scenario, undecided


def own(world_size: int, optimizer: str) -> Trace:
    """Return a run of a user's trainer whose optimizer has a rule that is not known here."""
    subject = scenario(world_size=world_size, optimizer=optimizer, detail="values", clip_norm=None)
    run = traces.run(subject)
    run = replace(run, scenario=run.scenario.with_(system="mine", workload="own"), promises=())
    return traces.was(run, rule="other")


def undivided(trace: Trace, factor: float = 3.0, *names: str) -> Trace:
    """Return a run whose gradients are not divided when the optimizer gets them."""
    return altered(trace, Update, {}, gradient=lambda event: _times(event.gradient, factor, names))


def _times(tensors: Tensors, factor: float, names: tuple[str, ...]) -> Tensors:
    return {**tensors, **evidence.times({n: tensors[n] for n in names or tensors}, factor)}


def further(trace: Trace, factor: float = 3.0) -> Trace:
    """Return a run whose weights move `factor` times as far in the first step."""
    begin = {start.rank: start.weights for start in trace.of(Start)}
    events = []
    for event in trace.events:
        if isinstance(event, Update):
            event = replace(
                event,
                weights={
                    n: traces.values(*(w + (factor - 1) * (w - begin[event.rank][n].values())))
                    for n, r in event.weights.items()
                    if (w := r.values()) is not None
                },
            )
        events.append(event)
    return replace(trace, events=tuple(events))


def judged(check: str, trace: Trace, alone: Trace) -> Finding:
    runs = Runs(trace, {ALONE: (alone,)})
    return traces.judge(check, runs)


@pytest.mark.parametrize("check", ["parity", "weighting"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_divides_gradients_by_itself_is_right(check: str, optimizer: str) -> None:
    """Gradients are three times as large, and weights and the optimizer's state those of one."""
    finding = judged(check, undivided(own(3, optimizer)), own(1, optimizer))
    assert finding.verdict is not Verdict.FALSIFIED, finding
    assert finding.compared > 0
    assert any(
        "the optimizer's step divides the gradients itself" in note for note in finding.notes
    )


@pytest.mark.parametrize("tensor", [None, "hidden1.weight"])
def test_gradients_that_nothing_divides_are_wrong(tensor: str | None) -> None:
    """Weights that move further, or one tensor's factor, have no such explanation."""
    run = own(3, "sgd")
    trace = further(undivided(run)) if tensor is None else undivided(run, 3.0, tensor)
    broken = traces.broken(judged("parity", trace, own(1, "sgd")))
    assert tensor in (None, broken.tensor)
    assert "3 times as large (world_size" in broken.message


@pytest.mark.parametrize("grown", [1.0, 3.0])
def test_a_learning_rate_that_makes_up_for_sums_is_right(grown: float) -> None:
    """Gradients are added and the rate is divided: plain SGD, or momentum that grows with them."""

    def rated(trace: Trace, divided: float) -> Trace:
        return altered(
            trace,
            Update,
            {},
            learning_rate=lambda event: event.learning_rate / divided,
            optimizer=lambda event: _times(event.optimizer, grown, ()) if grown > 1 else {},
        )

    alone = own(1, "sgd") if grown == 1 else own(1, "momentum")
    trace = own(3, "sgd") if grown == 1 else own(3, "momentum")
    for check in ("parity", "weighting"):
        finding = judged(check, rated(undivided(trace), 3.0), alone)
        assert finding.verdict is not Verdict.FALSIFIED, finding
        assert any("learning rate is divided by that" in note for note in finding.notes)
    broken = traces.broken(judged("parity", rated(trace, 3.0), alone))
    assert "the learning rate is not" in broken.message


def test_adam_s_weights_do_not_tell_what_divides_gradients() -> None:
    """Its weights move alike whatever the gradients are multiplied by, and its state does not."""
    trace = undivided(own(3, "adamw"))
    scaled = altered(trace, Update, {}, optimizer=lambda e: _times(e.optimizer, 3.0, ()))
    broken = traces.broken(judged("parity", scaled, own(1, "adamw")))
    assert "3 times as large (world_size" in broken.message
    without = altered(trace, Update, {}, optimizer={})
    assert judged("parity", without, own(1, "adamw")).verdict is Verdict.FALSIFIED


def test_one_step_is_too_few() -> None:
    """Weights of a single step may agree by chance."""
    trace, alone = undivided(own(3, "sgd")), own(1, "sgd")
    short = [
        replace(run, events=tuple(e for e in run.events if not _is_late(e)))
        for run in (trace, alone)
    ]
    assert judged("parity", *short).verdict is Verdict.FALSIFIED


def _is_late(event: Any) -> bool:
    return isinstance(event, Update | Shard) and event.step > 0


# --- gradients that an optimizer reduces by itself ------------------------------------------------


def unreduced(trace: Trace, by: float = 0.5) -> Trace:
    """Return a run whose two ranks give the optimizer gradients of their own, of the same mean."""
    signs = {0: 1.0, 1: -1.0}
    return altered(
        trace,
        Update,
        {},
        gradient=lambda event: {
            name: traces.values(*(v * (1 + by * signs[event.rank])))
            for name, record in event.gradient.items()
            if (v := record.values()) is not None
        },
    )


@pytest.mark.parametrize("check", ["parity", "weighting"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_reduces_gradients_by_itself_is_held(check: str, optimizer: str) -> None:
    """Their mean is that of one worker, and weights move as its own do."""
    finding = judged(check, unreduced(own(2, optimizer)), own(1, optimizer))
    assert finding.verdict is Verdict.HELD, finding.reason
    assert any("the optimizer reduces gradients in its step" in note for note in finding.notes)


@pytest.mark.parametrize("wrong", [further, lambda trace: undivided(trace, 2.0)])
def test_a_mean_that_moves_no_weights_is_not_held(wrong: Callable[[Trace], Trace]) -> None:
    """Weights that move further are wrong, and a multiple of one worker's gradient is unknown."""
    trace = wrong(unreduced(own(2, "sgd")))
    finding = judged("parity", trace, own(1, "sgd"))
    assert finding.verdict is not Verdict.HELD
    assert not any("reduces gradients in its step" in note for note in finding.notes)


# --- copies that an optimizer steps ---------------------------------------------------------------


def coarse(trace: Trace, by: float = 1.0, bits: int = 8) -> Trace:
    """Return a run that steps copies, with weights of fewer bits and `by` times the rate's move."""
    begin = {start.rank: start.weights for start in trace.of(Start)}
    events = []
    for event in trace.events:
        if isinstance(event, Update):
            event = replace(
                event,
                optimizer={},
                weights={
                    name: traces.values(*rounded(old + by * (w - old), bits))
                    for name, record in event.weights.items()
                    if (w := record.values()) is not None
                    and (old := begin[event.rank][name].values()) is not None
                },
            )
        events.append(event)
    return traces.was(replace(trace, events=tuple(events)), rule="known", steps="copies")


def rounded(values: Any, bits: int) -> Any:
    """Return values with so many significant bits."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(fraction * 2**bits) / 2**bits, exponent)


@pytest.mark.parametrize("check", ["step_rule", "optimizer_state"])
@pytest.mark.parametrize("bits", [8, 24])
def test_copies_are_followed_from_the_first_step(check: str, bits: int) -> None:
    """Weights are what the rule makes of such copies, rounded to the weights' format."""
    alone = coarse(own(1, "adamw"), bits=bits)
    finding = judged(check, coarse(own(2, "adamw"), bits=bits), alone)
    assert finding.verdict is Verdict.HELD, finding.reason
    assert any("steps copies of the weights: from the first" in note for note in finding.notes)


@pytest.mark.parametrize("bits", [8, 24])
def test_copies_that_follow_no_rule_stay_open(bits: int) -> None:
    """A rate that is a third larger is seen through the rounding of the weights."""
    assert "the optimizer steps copies of the model's weights" in undecided(
        judged("step_rule", coarse(own(2, "adamw"), 4 / 3, bits), own(1, "adamw"))
    )


# --- steps alone ----------------------------------------------------------------------------------
# Tensors that all ranks move by the gradient of one rank's own samples.


RATE = 0.1
OWNERS = {"a": 0, "b": 1}


def of_one_rank(step: int, rank: int) -> Vectors:
    """Return the mean of a rank's own micro-batches."""
    return times(0.5, plus(*LOCAL[step][rank]))


def mean(step: int, _: int = 0) -> Vectors:
    return times(0.5, summed(step))


def run(gradients: Mapping[int, str], moves: str) -> Trace:
    """Return a run of plain SGD whose ranks hand over `gradients`, and move weights as `moves`."""
    kinds: dict[str, Callable[[int, int], Vectors]] = {
        "own": of_one_rank,
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
    return {name: of_one_rank(step, rank)[name] for name, rank in OWNERS.items()}


def weighed(trace: Trace) -> Finding:
    return traces.judge("weighting", [trace])


def test_owners_that_step_by_their_own_samples_are_falsified() -> None:
    """Nobody reduces gradients. Ranks agree only because owners send their tensors around."""
    finding = weighed(run({0: "own", 1: "own"}, "owner"))
    assert finding.verdict is Verdict.FALSIFIED
    assert "all ranks move a by the gradient of rank 0's own samples" in finding.reason


def test_one_rank_whose_weights_replace_the_others_is_falsified() -> None:
    finding = weighed(run({0: "own", 1: "own"}, "own"))
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
    assert weighed(run(gradients, moves)).verdict is not Verdict.FALSIFIED
