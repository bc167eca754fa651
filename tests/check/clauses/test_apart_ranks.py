"""Ranks that don't make each step together: uneven inputs, and workers that step alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.causes.test_presuppositions import SUBJECT, own, replicas
from tests.check.clauses import traces

LAST = SUBJECT.num_steps - 1


def judged(check: str, trace: Trace) -> Finding:
    """Return the finding of a check on one run."""
    return CHECKS[check].judge(traces.clause(check), Runs(trace))


def kept(event: Event, *, passes: bool) -> bool:
    """Return whether rank 1 records an event if it leaves out the last step, or its `passes`."""
    left_out = (Update, Shard) if passes else Update
    return not (isinstance(event, left_out) and (event.step, event.rank) == (LAST, 1))


def test_ranks_with_fewer_batches_are_compared_until_they_have_none() -> None:
    """What a rank without batches lacks is no fault of the others: `Join` makes it up."""
    trace = own(2)
    uneven = replace(trace, events=tuple(e for e in trace.events if kept(e, passes=True)))
    finding = replicas(uneven, None)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert f"from step {LAST} on" in finding.reason
    assert finding.compared  # the steps before
    assert judged("coverage", uneven).verdict is Verdict.INCONCLUSIVE


def test_a_rank_that_leaves_out_a_step_is_found() -> None:
    """A rank that has the batch, and doesn't step, is wrong."""
    trace = own(2)
    skipping = replace(trace, events=tuple(e for e in trace.events if kept(e, passes=False)))
    assert traces.broken(replicas(skipping, None)).rank == 1


def alone(*, nearer: bool) -> Trace:
    """Return a run whose ranks step with gradients of their own, and then get `nearer` or not."""
    trace = own(2)
    name = min(traces.one(trace, Update, rank=0, step=0).gradient)
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Update) and event.step < 2:
            weights = event.weights[name].values()
            assert weights is not None
            mine = weights + event.rank
            event = replace(
                event,
                gradient={**event.gradient, name: traces.values(*(weights * 0.0 + event.rank))},
                weights={**event.weights, name: traces.values(*mine)},
            )
            if nearer and event.step == 1:
                event = replace(event, edited={name: traces.values(*(weights + event.rank / 2))})
        events.append(event)
    return replace(trace, events=tuple(events))


def test_workers_that_step_alone_are_not_compared() -> None:
    """Weights that are brought together between the steps show local SGD that nobody declared."""
    finding = replicas(alone(nearer=True), None)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "obs.synchronised(...)" in finding.reason
    assert finding.compared  # the first weights


def test_ranks_that_nothing_brings_together_are_found() -> None:
    """A trainer that forgets to reduce its gradients drifts apart."""
    assert replicas(alone(nearer=False), None).verdict is Verdict.FALSIFIED


def test_moments_that_begin_anew_are_noted() -> None:
    """A user's optimizer that is emptied between two steps follows its rule from there on."""
    trace = own(1, optimizer="momentum")
    followed = judged("step_rule", trace)
    assert followed.verdict is Verdict.HELD, followed.reason
    anew = replace(trace, events=tuple(_anew(trace)))
    finding = judged("step_rule", anew)
    assert finding.verdict is Verdict.HELD, finding.reason
    assert any("was emptied before step 1" in note for note in finding.notes)


def _anew(trace: Trace) -> list[Event]:
    """Return the events of a run with momentum that is emptied before step 1."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Update) and event.step == 1:
            before = _first(trace)
            weights = {name: traces.values(*_plain(before, event, name)) for name in event.weights}
            event = replace(event, weights=weights)
        elif isinstance(event, Update) and event.step > 1:
            continue
        events.append(event)
    return events


def _first(trace: Trace) -> Update:
    return traces.one(trace, Update, step=0)


def _plain(before: Update, event: Update, name: str) -> NDArray[Any]:
    weights, gradient = before.weights[name].values(), event.gradient[name].values()
    assert weights is not None
    assert gradient is not None
    return weights - np.float32(event.learning_rate) * gradient
