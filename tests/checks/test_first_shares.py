"""Several workers are compared with one by the rows that both are given in the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.checks import first_shares
from entrenar_py.checks.needs import ALONE, REPEATED, Near, Runs
from entrenar_py.trace import End, Event, Shard, Start, Trace, Traits, Update, record_tensor
from entrenar_py.verdict import Tally
from tests.checks.traces import scenario

SIZE = 24
NUMBERS = np.random.default_rng(0)
OF_ROWS = {row: NUMBERS.normal(size=SIZE) for row in range(8)}  # a gradient for each row
MEAN = ((2.0, 0.5, 2.0),)  # the terms of a mean over two elements


def run(
    shares: Sequence[Sequence[int]],
    *,
    factor: float = 1.0,
    scaled: Sequence[float] = (1.0, 1.0),
    rate: float = 0.1,
    terms: tuple[tuple[float, ...], ...] = MEAN,
    repeat: int = 0,
) -> Trace:
    """Return a step in which each rank has a share of the rows, whose gradients it averages.

    The mean over ranks is applied `factor` times. Each rank's gradient is `scaled`.
    """
    means = [
        times * np.mean([OF_ROWS[row] for row in rows], axis=0)
        for rows, times in zip(shares, scaled, strict=False)
    ]
    applied = factor * np.mean(means, axis=0)
    starts = [Start(step=0, rank=r, weights=record(np.ones(SIZE))) for r in range(len(shares))]
    shards = [
        Shard(
            step=0,
            epoch=0,
            rank=rank,
            shard=rank,
            ids=tuple(rows),
            loss_sum=1.0,
            weight=float(len(rows)),
            finite=True,
            gradient=record(mean),
            terms=terms,
        )
        for rank, (rows, mean) in enumerate(zip(shares, means, strict=True))
    ]
    updates = [
        Update(
            step=0,
            rank=rank,
            loss=None,
            weight=float(sum(map(len, shares))),
            learning_rate=rate,
            finite=True,
            weights=record(np.ones(SIZE) - rate * applied),
            gradient=record(applied),
        )
        for rank in range(len(shares))
    ]
    subject = scenario(
        system="command",
        workload="own",
        world_size=len(shares),
        num_shards=len(shares),
        optimizer="sgd",
        num_samples=8,
        batch_size=sum(map(len, shares)),
        num_steps=1,
        detail="values",
        repeat=repeat,
    )
    events: list[Event] = [*starts, *shards, *updates, End(status="completed")]
    traits = Traits(clipping="other", sample_ids="content", losses="backward")
    return Trace(scenario=subject, environment={}, promises=(), traits=traits, events=tuple(events))


def record(values: Any) -> Mapping[str, Any]:
    """Return two tensors' records with values."""
    halves = np.split(values.astype(np.float32), 2)
    return {n: record_tensor(half, values=True) for n, half in zip("ab", halves, strict=True)}


def compared(several: Trace, alone: Trace) -> tuple[int, Tally]:
    """Return how many micro-batches are compared of a run with batches of a worker's size."""
    again = replace(several, scenario=several.scenario.with_(repeat=1))
    near = Near(alone, {"batch_size": (2, 4)})
    witnesses = {REPEATED: (several, again), ALONE: (alone,)}
    runs = Runs(several, near={ALONE: near}, witnesses=witnesses)
    model = first_shares.model_of(runs)
    assert model is alone
    tally = Tally("F-DP-005", observed=True)
    return first_shares.compare(tally, runs, model), tally


def test_the_rows_of_the_first_rank_count_as_on_one_worker() -> None:
    """One worker has half as many rows, and the first rank has the same."""
    count, tally = compared(run([[0, 1], [2, 3]]), run([[0, 1]]))
    assert (count, tally.compared, tally.broken) == (1, 1, None)


def test_a_sum_over_workers() -> None:
    """It is twice as large for the same rows."""
    count, tally = compared(run([[0, 1], [2, 3]], factor=2.0), run([[0, 1]]))
    assert count == 1
    assert tally.broken is not None
    assert "2 times as large as one worker's, for the same rows" in tally.broken.message


@pytest.mark.parametrize(
    ("several", "alone"),
    [
        (run([[4, 5], [2, 3]]), run([[0, 1]])),  # no rows in common
        (run([[0, 1], [2, 3]], factor=2.0, rate=0.05), run([[0, 1]])),  # the rate makes up for it
        (run([[0, 1], [2, 3]], factor=0.37), run([[0, 1]])),  # clipped, maybe
        (run([[0, 1], [2, 3]], factor=2.0, terms=()), run([[0, 1]], terms=())),  # a sum, maybe
        (run([[0, 1], [2]]), run([[0, 1]])),  # unequal shares
        (run([[0, 1], [0, 1]]), run([[0, 1]])),  # ranks with the same rows
    ],
)
def test_what_is_not_certain_is_left_open(several: Trace, alone: Trace) -> None:
    """Nothing is counted then, and the other comparison tells what it lacks."""
    count, tally = compared(several, alone)
    assert (count, tally.compared, tally.broken, tally.notes) == (0, 0, None, [])


def test_loaders_rows_are_not_looked_for() -> None:
    """They can be fetched alike; and equal batches are compared whole."""
    alone, several = run([[0, 1, 2, 3]]), run([[0, 1], [2, 3]])
    assert first_shares.model_of(Runs(several, {ALONE: (alone,)})) is None
    other = run([[4, 5, 6, 7]])
    assert first_shares.model_of(Runs(several, {ALONE: (other,)})) is other
    drawn = [
        replace(one, traits=replace(one.traits, sample_ids="known")) for one in (several, other)
    ]
    assert first_shares.model_of(Runs(drawn[0], {ALONE: (drawn[1],)})) is None
