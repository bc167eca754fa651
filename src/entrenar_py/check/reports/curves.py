"""The curves that a report keeps of judged runs: the loss at each step, and the distance from the
run with one worker. Whole traces are not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.shared.page.html_page import Points
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Tensors, Trace

# Fields in which runs of one training may differ; all others must be equal.
_FREE = (
    *("system", "world_size", "num_shards", "backends", "faults", "stops", "repeat", "mutant"),
    *("detail", "accumulation"),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run: its losses, and its distances from the run with one worker.

    Curves with the same `training` may be drawn together. A step's distance is the largest absolute
    difference of any weight on any rank (`of_weights`), or that of the loss if the traces kept no
    values. Distances exist only if the run was compared with a run on one worker. `strange` is the
    first step with a loss that is not finite; such losses are not among the points.
    """

    scenario: Scenario
    training: str
    losses: Points
    distances: Points = ()
    of_weights: bool = False
    strange: int | None = None


class Curves:
    """Collects a curve of each training run that is judged."""

    def __init__(self) -> None:
        self._found: dict[Scenario, Curve] = {}

    @property
    def found(self) -> tuple[Curve, ...]:
        """One curve for each run, in the order in which they were judged."""
        return tuple(self._found.values())

    def see(self, traces: Sequence[Trace]) -> None:
        """Keep the curves of the judged run, `traces[0]`, and of the runs it was compared with."""
        for trace in traces:
            key = trace.scenario
            curve = self._found.get(key) or _curve(trace)
            if curve is None:
                continue
            self._found[key] = curve
            if trace is traces[0] and not curve.distances:
                alone = _alone(curve, traces[1:])
                if alone is not None:
                    distances, of_weights = _distances(alone, trace)
                    self._found[key] = replace(curve, distances=distances, of_weights=of_weights)


def training(scenario: Scenario) -> str:
    """Return a text that is equal for runs that should end with the same weights."""
    fields = scenario.to_dict()
    return json.dumps({name: fields[name] for name in fields if name not in _FREE}, sort_keys=True)


def _curve(trace: Trace) -> Curve | None:
    losses = _losses(trace)
    if not losses:
        return None
    strange = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
    return Curve(
        scenario=trace.scenario,
        training=training(trace.scenario),
        losses=_finite(losses),
        strange=strange,
    )


def _alone(curve: Curve, others: Sequence[Trace]) -> Trace | None:
    """Return the run of the same training on one worker, without faults or stops, or None."""
    if curve.scenario.world_size == 1:
        return None
    for other in others:
        calm = not (other.scenario.faults or other.scenario.stops)
        if other.scenario.world_size == 1 and calm and training(other.scenario) == curve.training:
            return other
    return None


def _losses(trace: Trace) -> dict[int, float]:
    """Return step -> the loss reported by the lowest rank."""
    steps = evidence.updates(evidence.with_losses(trace.standing))
    reported = {step: evidence.any_rank(by_rank).loss for step, by_rank in sorted(steps.items())}
    return {step: loss for step, loss in reported.items() if loss is not None}


def _distances(alone: Trace, trace: Trace) -> tuple[Points, bool]:
    expected = evidence.updates(alone)
    distances: dict[int, float] = {}
    for step, by_rank in sorted(evidence.updates(trace).items()):
        if step in expected:
            alone_update = evidence.any_rank(expected[step])
            apart = [_largest(alone_update.weights, update.weights) for update in by_rank.values()]
            if None in apart:
                return _loss_distances(alone, trace), False
            distances[step] = max(value for value in apart if value is not None)
    return _finite(distances), True


def _loss_distances(alone: Trace, trace: Trace) -> Points:
    expected, got = _losses(alone), _losses(trace)
    return _finite({step: abs(got[step] - expected[step]) for step in got if step in expected})


def _largest(expected: Tensors, got: Tensors) -> float | None:
    """Return the largest absolute difference of an element; None if values can't be compared."""
    largest = 0.0
    for name in expected.keys() | got.keys():
        left, right = expected.get(name), got.get(name)
        if left is None or right is None:
            return None
        if left.digest == right.digest:
            continue
        a, b = left.values(), right.values()
        if a is None or b is None or a.size != b.size:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            largest = max(largest, float(np.abs(a.astype(np.float64) - b).max()))
    return largest


def _finite(values: dict[int, float]) -> Points:
    return tuple((step, value) for step, value in values.items() if math.isfinite(value))
