"""Hand-written traces of a user's run: two ranks, two micro-batches each, three steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar_py.shared.trace import Event, Start, Trace
from tests import traces
from tests.traces import records, scenario

STEPS, RANKS, MICRO_BATCHES = 3, 2, 2
SHAPES = {"a": 6, "b": 4}
GIVEN = np.random.default_rng(3)
# step -> rank -> micro-batch -> tensor -> gradient
LOCAL = [
    [
        [
            {name: GIVEN.normal(size=size).astype(np.float32) for name, size in SHAPES.items()}
            for _ in range(MICRO_BATCHES)
        ]
        for _ in range(RANKS)
    ]
    for _ in range(STEPS + 1)
]
Vectors = Mapping[str, np.ndarray[Any, Any]]


def summed(step: int, *, ranks: Sequence[int] = (0, 1), which: slice = slice(None)) -> Vectors:
    """Return the mean over the chosen micro-batches of the chosen ranks."""
    chosen = [given for rank in ranks for given in LOCAL[step][rank][which]]
    half = np.float32(0.5)
    return {name: half * np.sum([one[name] for one in chosen], axis=0) for name in SHAPES}


def trace_of(
    applied: Sequence[Vectors],
    *,
    slopes: Sequence[Sequence[float]] = (),
    terms: Sequence[Sequence[tuple[tuple[float, ...], ...]]] = (),
    weight: float = 1.0,
    **changes: Any,
) -> Trace:
    """Return a user's run whose optimizer got `applied`.

    `slopes` and `terms` are those of each rank's micro-batches, which all have `weight`; `changes`
    are fields of the updates from step 1 on.
    """
    subject = scenario(
        system="command",
        workload="own",
        world_size=RANKS,
        num_shards=4,
        accumulation=MICRO_BATCHES,
        optimizer="sgd",
        num_samples=12,
        batch_size=4,
        num_steps=STEPS,
        detail="values",
    )
    events: list[Event] = [
        Start(step=0, rank=rank, weights=records({name: np.ones(n) for name, n in SHAPES.items()}))
        for rank in range(RANKS)
    ]
    for step, gradient in enumerate(applied):
        events += [
            traces.shard(
                step,
                rank,
                shard=rank * MICRO_BATCHES + number,
                ids=(4 * step + 2 * rank + number,),
                loss_sum=weight,
                weight=weight,
                gradient=records(given),
                slope=slopes[rank][number] if slopes else None,
                terms=terms[rank][number] if terms else (),
            )
            for rank, of_rank in enumerate(LOCAL[step])
            for number, given in enumerate(of_rank)
        ]
        events += [
            traces.update(
                step,
                rank,
                loss=None,
                weight=4 * weight,
                weights=records({n: np.full(size, step) for n, size in SHAPES.items()}),
                gradient=records(gradient),
                **changes if step else {},
            )
            for rank in range(RANKS)
        ]
    return traces.was(traces.hand_written(*events, subject=subject), clipping="other")


def plus(*terms: Vectors) -> Vectors:
    return {name: np.sum([term[name] for term in terms], axis=0) for name in SHAPES}


def times(factor: float, vectors: Vectors, *names: str) -> Vectors:
    """Return a gradient with a factor, on all tensors or on those in `names`."""
    return {n: v * np.float32(factor if n in (names or vectors) else 1) for n, v in vectors.items()}
