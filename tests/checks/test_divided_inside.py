"""Gradients that an optimizer divides inside its own step, and those that nothing divides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.checks import CHECKS, evidence
from entrenar_py.checks.needs import ALONE, Runs
from entrenar_py.trace import Shard, Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Verdict
from tests.checks import traces
from tests.checks.traces import scenario


def own(world_size: int, optimizer: str) -> Trace:
    """Return a run of a user's trainer whose optimizer has a rule that is not known here."""
    subject = scenario(world_size=world_size, optimizer=optimizer, detail="values", clip_norm=None)
    run = traces.run(subject)
    run = replace(run, scenario=run.scenario.with_(system="mine", workload="own"), promises=())
    return traces.was(run, rule="other")


def summed(trace: Trace, factor: float = 3.0, *names: str) -> Trace:
    """Return a run whose gradients are not divided when the optimizer gets them."""
    events = [
        replace(event, gradient=_times(event.gradient, factor, names))
        if isinstance(event, Update)
        else event
        for event in trace.events
    ]
    return replace(trace, events=tuple(events))


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
    """Return the finding on a run, with the one on one worker."""
    runs = Runs(trace, {ALONE: (alone,)})
    return CHECKS[check].judge(traces.clause(check), runs)


@pytest.mark.parametrize("check", ["parity", "weighting"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_divides_gradients_by_itself_is_right(check: str, optimizer: str) -> None:
    """Gradients are three times as large, and weights and the optimizer's state those of one."""
    finding = judged(check, summed(own(3, optimizer)), own(1, optimizer))
    assert finding.verdict is not Verdict.FALSIFIED, finding
    assert finding.compared > 0
    assert any("the optimizer's step divides them by itself" in note for note in finding.notes)


@pytest.mark.parametrize(
    ("trace", "tensor"),
    [
        (further(summed(own(3, "sgd"))), None),
        (summed(own(3, "sgd"), 3.0, "hidden1.weight"), "hidden1.weight"),
    ],
)
def test_gradients_that_nothing_divides_are_wrong(trace: Trace, tensor: str | None) -> None:
    """Weights that move further, or one tensor's factor, have no such explanation."""
    broken = traces.broken(judged("parity", trace, own(1, "sgd")))
    assert tensor in (None, broken.tensor)
    assert "3 times as large (world_size" in broken.message


@pytest.mark.parametrize("grown", [1.0, 3.0])
def test_a_learning_rate_that_makes_up_for_sums_is_right(grown: float) -> None:
    """Gradients are added and the rate is divided: plain SGD, or momentum that grows with them."""

    def rated(trace: Trace, divided: float) -> Trace:
        events = [
            replace(
                event,
                learning_rate=event.learning_rate / divided,
                optimizer=_times(event.optimizer, grown, ()) if grown > 1 else {},
            )
            if isinstance(event, Update)
            else event
            for event in trace.events
        ]
        return replace(trace, events=tuple(events))

    alone = own(1, "sgd") if grown == 1 else own(1, "momentum")
    trace = own(3, "sgd") if grown == 1 else own(3, "momentum")
    for check in ("parity", "weighting"):
        finding = judged(check, rated(summed(trace), 3.0), alone)
        assert finding.verdict is not Verdict.FALSIFIED, finding
        assert any("learning rate is divided by that" in note for note in finding.notes)
    broken = traces.broken(judged("parity", rated(trace, 3.0), alone))
    assert "the learning rate is not" in broken.message


def test_adam_s_weights_do_not_tell_what_divides_gradients() -> None:
    """Its weights move alike whatever the gradients are multiplied by, and its state does not."""
    trace = summed(own(3, "adamw"))
    events: list[Any] = [
        replace(e, optimizer=_times(e.optimizer, 3.0, ())) if isinstance(e, Update) else e
        for e in trace.events
    ]
    scaled = replace(trace, events=tuple(events))
    broken = traces.broken(judged("parity", scaled, own(1, "adamw")))
    assert "3 times as large (world_size" in broken.message
    bare = [replace(e, optimizer={}) if isinstance(e, Update) else e for e in trace.events]
    without = replace(trace, events=tuple(bare))
    assert judged("parity", without, own(1, "adamw")).verdict is Verdict.FALSIFIED


def test_one_step_is_too_few() -> None:
    """Weights of a single step may agree by chance."""
    trace, alone = summed(own(3, "sgd")), own(1, "sgd")
    short = [
        replace(run, events=tuple(e for e in run.events if not _is_late(e)))
        for run in (trace, alone)
    ]
    assert judged("parity", *short).verdict is Verdict.FALSIFIED


def _is_late(event: Any) -> bool:
    return isinstance(event, Update | Shard) and event.step > 0
