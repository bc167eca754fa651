"""Curves of runs: what is kept of a trace, and how far it is from the run with one worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrenar_py.reports.curves import Curves
from entrenar_py.trace import Trace, Update, record_tensor
from tests.checks.traces import run, scenario


def pair(detail: str, apart: float) -> list[Trace]:
    """A run with three workers and the one with one; of the former a weight is `apart` at step 2,
    and its loss, too.
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
    """Losses of every step, and a distance of 0 in each: digests that agree need no values."""
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
    """The largest difference of any element on any rank, where a trace keeps values."""
    seen = Curves()
    seen.see(pair("values", 0.5))
    distances = dict(seen.found[0].distances)
    assert seen.found[0].of_weights
    assert [step for step, value in distances.items() if value] == [2]
    assert abs(distances[2] - 0.5) < 1e-6


def test_distance_of_losses() -> None:
    """Where weights differ and no values were kept, the losses of the lowest rank."""
    seen = Curves()
    own, alone = pair("digests", 0.5)
    events = tuple(
        replace(one, loss=(one.loss or 0.0) + 0.25) if isinstance(one, Update) else one
        for one in own.events
    )
    seen.see([replace(own, events=events), alone])
    assert not seen.found[0].of_weights
    assert {round(value, 6) for _, value in seen.found[0].distances} == {0.25}


def test_a_loss_that_is_no_number() -> None:
    """It is no point, and the first such step is known."""
    own, _ = pair("digests", 0.0)
    events = tuple(
        replace(one, loss=float("nan")) if isinstance(one, Update) and one.step > 3 else one
        for one in own.events
    )
    seen = Curves()
    seen.see([replace(own, events=events)])
    assert seen.found[0].strange == 4
    assert [step for step, _ in seen.found[0].losses] == [0, 1, 2, 3]


def test_the_first_with_a_distance_counts() -> None:
    """A run judged by itself and then beside another is one curve, with its distance."""
    seen = Curves()
    own, alone = pair("digests", 0.0)
    seen.see([own])
    assert seen.found[0].distances == ()
    seen.see([own, alone])
    assert len(seen.found) == 2
    assert seen.found[0].distances
