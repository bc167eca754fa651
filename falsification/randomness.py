"""Bugs in random streams, which are keyed by the wrong values or by none."""

from __future__ import annotations

import numpy as np
import torch

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario, TrainingPlan
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import engine, sharding

from .subjects import TEXTBOOK, TRAINING, reference, textbook

_rng, _build_replica = TrainingPlan.rng, trainer.build_replica
_masks, _drop = trainer.masks, engine.Dropout.__call__
_RNG = "entrenar_py.shared.scenario.TrainingPlan.rng"

# One generator for the whole process, as in a trainer without seeds.
_process = np.random.default_rng(0)


def keyed_by_rank(self: Scenario, *stream: str | int) -> np.random.Generator:
    """Keys dropout by the rank and the shard's place in the rank's own run."""
    if stream[0] != "dropout":
        return _rng(self, *stream)
    _, step, shard = stream
    runs = sharding.runs(range(self.num_shards), range(self.world_size))
    rank, run = next((rank, run) for rank, run in runs.items() if shard in run)
    return _rng(self, "dropout", step, rank, run.index(int(shard)))


def same_for_all_shards(self: Scenario, *stream: str | int) -> np.random.Generator:
    """Keys dropout by the step alone."""
    return _rng(self, *stream[:2]) if stream[0] == "dropout" else _rng(self, *stream)


def same_every_step(self: Scenario, *stream: str | int) -> np.random.Generator:
    """Keys dropout by the shard alone."""
    if stream[0] != "dropout":
        return _rng(self, *stream)
    return _rng(self, "dropout", stream[-1])


def unseeded_order(self: Scenario, *stream: str | int) -> np.random.Generator:
    """Draws the order of the data from a generator that is not reset between runs."""
    return _process if stream[0] == "order" else _rng(self, *stream)


def entropy(self: Scenario, *stream: str | int) -> np.random.Generator:
    """Draws dropout from the operating system's entropy."""
    return np.random.default_rng() if stream[0] == "dropout" else _rng(self, *stream)


def one_stream(setup: Setup, rank: int) -> Replica:
    """Draws the masks of every rank from the stream of rank 0."""
    replica = _build_replica(setup, rank)
    replica.rng = setup.scenario.rng("dropout", 0)
    return replica


def eval_on_rank_1(
    setup: Setup, replica: Replica, step: int, ids: sharding.Ids
) -> engine.Dropout | None:
    """Leaves rank 1 in evaluation mode."""
    return None if replica.rank == 1 else _masks(setup, replica, step, ids)


def unscaled(self: engine.Dropout, tensor: torch.Tensor) -> torch.Tensor:
    """Does not scale the kept elements by 1 / (1 - rate)."""
    return _drop(self, tensor) * 0.8


def ignored(self: engine.Dropout, tensor: torch.Tensor) -> torch.Tensor:
    """Draws the mask and does not apply it."""
    _drop(self, tensor)
    return tensor


_DROPPING = reference(dropout=0.2)

VARIANTS = (
    Variant(
        name="dropout-by-rank",
        summary="masks are keyed by rank, so they depend on the number of workers",
        source="classic",
        plants={_RNG: keyed_by_rank},
        scenario=_DROPPING,
        invariants=("F-TI-005",),
        # Shards 0 and 1 are worker 0's first two on 3 workers as on 1. Shard 2 is worker 1's first.
        place={"step": 0, "rank": 1, "shard": 2},
    ),
    Variant(
        name="dropout-same-shards",
        summary="all shards of a step share one mask",
        source="classic (one seed for all ranks)",
        plants={_RNG: same_for_all_shards},
        scenario=_DROPPING,
        invariants=("F-TI-005",),
        place={"step": 0, "rank": 0, "shard": 1},
    ),
    Variant(
        name="dropout-same-steps",
        summary="the generator is seeded again in every step",
        source="classic (seed inside the loop)",
        plants={_RNG: same_every_step},
        scenario=_DROPPING,
        invariants=("F-TI-005",),
        place={"step": 1, "rank": 0, "shard": 0},
    ),
    Variant(
        name="dropout-same-ranks",
        summary="all ranks draw from one seed and drop the same units",
        source="classic (one seed for all ranks)",
        plants={f"{TEXTBOOK}.build_replica": one_stream},
        scenario=textbook(dropout=0.2),
        invariants=("F-TI-005",),
        place={"step": 0, "rank": 1, "shard": 1},
    ),
    Variant(
        name="eval-mode-rank-1",
        summary="one rank stays in evaluation mode after a validation, so its dropout is off",
        source="classic",
        plants={f"{TEXTBOOK}.masks": eval_on_rank_1},
        scenario=textbook(dropout=0.2),
        invariants=("F-TI-005",),
        place={"step": 0, "rank": 1, "shard": 1},
    ),
    Variant(
        name="dropout-unscaled",
        summary="kept units are not scaled by 1 / (1 - rate)",
        source="classic",
        plants={f"{TRAINING}.engine.Dropout.__call__": unscaled},
        scenario=_DROPPING,
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="dropout-ignored",
        summary="masks are drawn but not applied",
        source="classic",
        plants={f"{TRAINING}.engine.Dropout.__call__": ignored},
        scenario=_DROPPING,
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="unseeded-order",
        summary="the data is shuffled by a process-wide generator that no run seeds",
        source="classic",
        plants={_RNG: unseeded_order},
        scenario=reference(),
        invariants=("F-TI-007",),
        place={"step": 0, "rank": 0, "shard": 0},
    ),
    Variant(
        name="dropout-entropy",
        summary="masks come from the operating system's entropy",
        source="classic",
        plants={_RNG: entropy},
        scenario=_DROPPING,
        invariants=("F-TI-007",),
        place={"step": 0, "rank": 0, "shard": 0},
    ),
)
