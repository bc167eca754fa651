"""A run of stages of one linear layer each: its plan, its arithmetic, and one process that does it.

Sums of these values differ with the order of additions, so equal bits mean the same additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.terms import Run
from tests.train.wire_io.fakes import TERMS

Array = NDArray[np.float32]

WIDTH, ROWS = 3, 2
STAGE = WIDTH * WIDTH  # numbers in the weights of a stage
CUTS = (slice(0, 5), slice(5, STAGE))  # the parts of them that travel as blocks
MOMENTUM = np.float32(0.9)


@dataclass(frozen=True)
class Plan:
    """A run: the ranks of each stage, and its size."""

    ranks: tuple[tuple[int, ...], ...]
    num_shards: int = 4
    num_steps: int = 3

    @property
    def places(self) -> Places:
        """The places, with as many blocks a stage as `CUTS` has parts."""
        of_stage = (range(len(CUTS) * k, len(CUTS) * (k + 1)) for k in range(len(self.ranks)))
        return Places(self.ranks, tuple(of_stage))

    def run(self, **changes: Any) -> Run:
        """Return the run, which saves before each step."""
        usual: dict[str, Any] = {
            "world_size": self.places.num_ranks,
            "num_awaited": self.places.num_ranks,
            "num_shards": self.num_shards,
            "num_steps": self.num_steps,
            "num_blocks": len(CUTS) * len(self.ranks),
            "server_updates": True,
            "places": self.places,
            "saves": range(self.num_steps + 1),
        }
        return Run(terms=TERMS, **{**usual, **changes})


# --- arithmetic -------------------------------------------------------------------------------


def initial(num_stages: int) -> list[Array]:
    """Return the weights of each stage before the first step, float32 [STAGE]."""
    drawn = np.random.default_rng(7).normal(0.0, 0.5, (num_stages, STAGE)).astype(np.float32)
    return list(drawn)


@lru_cache(maxsize=1000)
def samples(step: int, shard: int) -> Array:
    """Return the input of the first stage, float32 [ROWS, WIDTH]."""
    return np.random.default_rng([step, shard]).normal(size=(ROWS, WIDTH)).astype(np.float32)


def product(x: Array, y: Array) -> Array:
    """Return x @ y, added in the order of the inner dim on every machine."""
    total: Array = x[:, 0, None] * y[None, 0]
    for at in range(1, len(y)):
        total = total + x[:, at, None] * y[None, at]
    return total


def factor(draws: int) -> np.float32:
    """Return what stands for a mask: it depends on the number of the draw in the whole model."""
    return np.float32(1 + draws / 16)


def forward(weights: Array, x: Array, draws: int) -> Array:
    """Return the hidden states after a stage, float32 [ROWS, WIDTH]."""
    return product(x, weights.reshape(WIDTH, WIDTH)) * factor(draws)


def backward(weights: Array, x: Array, draws: int, gradient: Array) -> tuple[Array, Array]:
    """Return the gradients of the weights, float32 [STAGE], and of `x`."""
    scaled = gradient * factor(draws)
    return product(x.T, scaled).reshape(-1), product(scaled, weights.reshape(WIDTH, WIDTH).T)


def loss_of(hidden: Array) -> float:
    """Return the loss of a shard; its gradient is `hidden`."""
    return float(np.square(hidden).sum() / 2)


def moved(
    weights: list[Array], velocity: list[Array], sums: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Return weights and velocity after a step with the sums of all gradients.

    Their norm over all stages becomes 1, about that of weights, so that no bit is rounded away.
    """
    norm = np.float32(np.sqrt(sum(np.square(one.astype(np.float64)).sum() for one in sums)))
    speed: list[Array] = [
        MOMENTUM * v + total / norm for v, total in zip(velocity, sums, strict=True)
    ]
    return [w - v for w, v in zip(weights, speed, strict=True)], speed


@lru_cache(maxsize=1000)
def alone(plan: Plan) -> tuple[tuple[bytes, ...], ...]:
    """Return the bytes of each stage's weights after each step, as one process trains them."""
    num_stages = len(plan.ranks)
    weights = initial(num_stages)
    velocity: list[Array] = [np.zeros(STAGE, np.float32) for _ in weights]
    after = []
    for step in range(plan.num_steps):
        leaves: list[list[reduction.Node]] = [[] for _ in weights]
        for shard in range(plan.num_shards):
            inputs = [samples(step, shard)]
            for stage in range(num_stages):
                inputs.append(forward(weights[stage], inputs[stage], stage))
            gradient = inputs[-1]
            for stage in reversed(range(num_stages)):
                own, gradient = backward(weights[stage], inputs[stage], stage, gradient)
                leaves[stage].append(reduction.Node(0, shard, own, 0.0, 1.0))
        sums = [reduction.root(each, plan.num_shards).vector for each in leaves]
        weights, velocity = moved(weights, velocity, sums)
        after.append(tuple(one.tobytes() for one in weights))
    return tuple(after)
