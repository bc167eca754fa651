"""Hand-written traces of a user's run that keeps an average of its weights.

The weights of a step are any numbers: what is judged is how averages and edits follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entrenar_py.shared.trace import Declared, Event, Start, Tensors, Trace, Update
from tests import traces
from tests.check.clauses.micro_batch_traces import Vectors
from tests.traces import records, scenario

SHAPES = {"a": (3, 4), "b": (6,)}
STEPS = 6


def drawn(step: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    return {n: 0.1 * generator.normal(size=s).astype(np.float32) for n, s in sizes.items()}


def shares(count: int) -> float:
    """Return the share of a move of an average that warms up: 0.9, 0.5, 0.33, ..."""
    return min(0.9, 1 / count)


@dataclass
class Averaged:
    """A rank in training; `edit` gets it before each step, and may change its weights.

    The average moves after each step by `share` of its count. `history` has the weights after each
    step, and those of the beginning first.
    """

    rank: int = 0
    share: Callable[[int], float] = shares
    edit: Callable[[Averaged, int], Vectors | None] = lambda *_: None
    label: str = "ema"
    weights: dict[str, Any] = field(default_factory=lambda: drawn(99))
    average: dict[str, Any] = field(default_factory=lambda: drawn(99))
    history: list[dict[str, Any]] = field(default_factory=lambda: [drawn(99)])
    count: int = 0
    made: int = 0  # the optimizer's count of steps

    def start(self, step: int = 0) -> Start:
        """Return the record before `step`."""
        return Start(
            step=step,
            rank=self.rank,
            weights=records(self.weights),
            resumed=step > 0,
            trainable=tuple(SHAPES),
            shapes=SHAPES,
            extra=self.extra(),
        )

    def extra(self) -> Tensors:
        """Return the records of the average."""
        return {f"{self.label}/{name}": one for name, one in records(self.average).items()}

    def step(self, number: int) -> Update:
        """Make a step, and move the average after it."""
        edited = self.edit(self, number)
        if edited is not None:
            self.weights = {**self.weights, **edited}
        self.weights = {n: v - drawn(number)[n] for n, v in self.weights.items()}
        self.made += 1
        update = traces.update(
            number,
            self.rank,
            loss=None,
            weight=4.0,
            learning_rate=1.0,
            weights=records(self.weights),
            gradient=records(drawn(number)),
            optimizer=records({f"{n}/step": np.full(1, self.made) for n in self.weights}),
            edited=records(edited or {}),
            extra=self.extra(),
        )
        self.history.append(dict(self.weights))
        self.count += 1
        part = np.float32(self.share(self.count))
        self.average = {n: v + part * (self.weights[n] - v) for n, v in self.average.items()}
        return update


def trained(*ranks: Averaged) -> Trace:
    events: list[Event] = [rank.start() for rank in ranks]
    events += [rank.step(step) for step in range(STEPS) for rank in ranks]
    return trace_of(events, len(ranks))


def resumed(rank: Averaged, at: int, lose: Callable[[Averaged], None]) -> Trace:
    """Return a run of one rank that stops before step `at`, and goes on without what it loses."""
    events: list[Event] = [rank.start(), *(rank.step(step) for step in range(at))]
    lose(rank)
    events += [rank.start(at), *(rank.step(step) for step in range(at, STEPS))]
    return trace_of(events, 1, stops=(at,))


def declared(trace: Trace, label: str = "ema") -> Trace:
    """Return a run whose script declares its average."""
    said = [Declared(step=0, rank=rank, averages=(label,)) for rank in range(2)]
    return trace_of([*said, *trace.events[:-1]], trace.scenario.world_size)


def trace_of(events: Sequence[Event], world_size: int, **changes: Any) -> Trace:
    """Return the trace of a user's run."""
    subject = scenario(
        system="command",
        workload="own",
        world_size=world_size,
        num_shards=world_size,
        num_samples=24,
        batch_size=4,
        num_steps=STEPS,
        optimizer="adamw",
        detail="values",
        **changes,
    )
    return traces.hand_written(*events, subject=subject)
