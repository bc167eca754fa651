"""Curves of runs: what is kept of a trace, and its distance from the run on one worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrenar_py.check.reports.html import Curves
from entrenar_py.shared.trace import Trace, Update, record_tensor
from tests.traces import altered, run, scenario


def pair(detail: str, apart: float) -> list[Trace]:
    """Return a run on three workers and one on a single worker.

    A weight and the loss of the former differ by `apart` at step 2.
    """
    own, alone = (run(scenario(world_size=size, detail=detail)) for size in (3, 1))

    def moved(update: Update) -> Update:
        name, record = next(iter(update.weights.items()))
        values = record.values()
        found = record_tensor(np.zeros(1, np.float32))
        if values is not None:
            first = np.array([apart, *[0] * (values.size - 1)], values.dtype)
            found = record_tensor(values + first, values=True)
        assert update.loss is not None
        return replace(update, loss=update.loss + apart, weights={**update.weights, name: found})

    events = tuple(
        moved(one) if isinstance(one, Update) and (one.step, one.rank) == (2, 1) and apart else one
        for one in own.events
    )
    return [replace(own, events=events), alone]


def test_the_same_bits_are_at_no_distance() -> None:
    """Equal digests give a distance of 0 at each step, without stored values."""
    seen = Curves()
    traces = pair("digests", 0.0)
    seen.see(traces)
    own, alone = seen.found
    assert [step for step, _ in own.losses] == list(range(6))
    assert own.distances == tuple((step, 0.0) for step in range(6))
    assert own.of_weights
    assert own.losses == alone.losses
    assert (alone.distances, own.training) == ((), alone.training)


def test_distance_of_weights() -> None:
    """It is the largest difference of any element on any rank, if traces keep values."""
    seen = Curves()
    seen.see(pair("values", 0.5))
    distances = dict(seen.found[0].distances)
    assert seen.found[0].of_weights
    assert [step for step, value in distances.items() if value] == [2]
    assert abs(distances[2] - 0.5) < 1e-6


def test_distance_of_losses() -> None:
    """If weights differ without stored values, the losses of the lowest rank are compared."""
    seen = Curves()
    own, alone = pair("digests", 0.5)
    seen.see([altered(own, Update, {}, loss=lambda one: (one.loss or 0.0) + 0.25), alone])
    assert not seen.found[0].of_weights
    assert {round(value, 6) for _, value in seen.found[0].distances} == {0.25}


def test_a_loss_that_is_no_number() -> None:
    """The loss is not a point of the curve, and the first such step is recorded."""
    own, _ = pair("digests", 0.0)
    seen = Curves()
    seen.see([altered(own, Update, {"step": lambda step: step > 3}, loss=float("nan"))])
    assert seen.found[0].strange == 4
    assert [step for step, _ in seen.found[0].losses] == [0, 1, 2, 3]


def test_the_first_with_a_distance_counts() -> None:
    """A run judged alone and later with another run is one curve, with its distance."""
    seen = Curves()
    own, alone = pair("digests", 0.0)
    seen.see([own])
    assert seen.found[0].distances == ()
    seen.see([own, alone])
    assert len(seen.found) == 2
    assert seen.found[0].distances
