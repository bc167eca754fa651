"""Bugs that let a NaN or an infinity through, or halt without naming its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import blocks, engine, reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator import replicas

from .subjects import REPLICAS, TEXTBOOK, TRAINING, reference, textbook

_all_reduce, _apply = trainer.all_reduce, trainer.apply
_inject, _guard = replicas.Replicas.inject, replicas.Replicas.guard
_apply_all = replicas.Replicas.apply


def nobody(shards: Sequence[trace.Shard]) -> trace.Shard | None:
    """Reports every shard as finite."""
    return None


def filtered_loss(shards: Sequence[trace.Shard], weight: float) -> float:
    """Logs the mean of the finite losses."""
    losses = (shard.loss_sum or 0.0 for shard in shards)
    return sum(loss for loss in losses if math.isfinite(loss)) / weight


def reduce_the_finite(setup: Setup, replicas: list[Replica]) -> None:
    """Leaves ranks with a non-finite gradient out of the reduction."""
    _all_reduce(setup, [r for r in replicas if trainer.gradients_finite(setup, r)])


def skip_if_mine(setup: Setup, replica: Replica, step: int, loss: float, weight: float) -> None:
    """Skips the step on each rank whose own gradient is not finite."""
    if trainer.gradients_finite(setup, replica):
        _apply(setup, replica, step, loss, weight)


def nan_to_num(
    self: replicas.Replicas,
    vector: Array,
    loss: float,
    worker: replicas.Worker,
    step: int,
    shard: int,
    count: int,
) -> float:
    """Replaces non-finite values of the gradient before they are checked."""
    loss = _inject(self, vector, loss, worker, step, shard, count)
    np.nan_to_num(vector, copy=False)
    return loss


def nan_alone(vector: Array) -> int | None:
    """Returns the position of the first NaN, and ignores infinities."""
    places = np.flatnonzero(np.isnan(vector))
    return int(places[0]) if places.size else None


def blamed_on_rank_0(
    self: replicas.Replicas,
    leaf: reduction.Node,
    worker: replicas.Worker,
    step: int,
    shard: int,
    ids: sharding.Ids,
) -> trace.Halt | None:
    """Halts as if after the reduction: every rank has the NaN, and rank 0 is blamed."""
    halt = _guard(self, leaf, worker, step, shard, ids)
    return halt and trace.Halt(step=step, rank=0, reason="non-finite gradient on worker 0")


def first_tensor(self: blocks.Layout, position: int) -> tuple[str, int]:
    """Names the first tensor, whatever the position in the flat gradient."""
    return next(iter(self.trainable)), position


def unguarded(
    self: replicas.Replicas,
    leaf: reduction.Node,
    worker: replicas.Worker,
    step: int,
    shard: int,
    ids: sharding.Ids,
) -> trace.Halt | None:
    """Checks nothing."""
    return None


def skip_in_silence(self: replicas.Replicas, step: int, total: reduction.Node) -> None:
    """Skips a step whose gradient is not finite, and continues."""
    if engine.non_finite(total.vector) is None:
        _apply_all(self, step, total)


def clamped(gradient: torch.Tensor, value: float) -> torch.Tensor:
    """Return `gradient` with NaN and infinities replaced."""
    return torch.nan_to_num(gradient, nan=0.0, posinf=value, neginf=-value)


def clean_then_reduce(setup: Setup, replicas: list[Replica]) -> None:
    """Replaces non-finite elements before the reduction."""
    for replica in replicas:
        for name in setup.trainable:
            gradient = trainer.gradient_of(replica, name)
            replica.tensors[name].grad = clamped(gradient, 1.0)
    _all_reduce(setup, replicas)


_NAN = Fault(kind="non_finite_gradient", step=2, rank=1, shard=2, element=3, value="nan")
_INF = Fault(kind="non_finite_gradient", step=2, rank=1, shard=2, element=3, value="inf")
_NAN_LATER = Fault(
    kind="non_finite_gradient", step=2, rank=1, shard=2, tensor="hidden2.bias", value="nan"
)
_TEXTBOOK_INF = Fault(kind="non_finite_gradient", step=1, rank=1, value="inf")
_CULPRIT = {"step": 2, "rank": 1, "shard": 2}

VARIANTS = (
    Variant(
        name="nan-logfilter",
        summary="a NaN loss is filtered out of the log, and the step is taken",
        source="transformers #13619, trl #6702",
        plants={
            f"{TEXTBOOK}.non_finite_shard": nobody,
            f"{TEXTBOOK}.reported_loss": filtered_loss,
        },
        scenario=textbook(
            faults=(Fault(kind="non_finite_loss", step=2, rank=1, value="nan"),), num_steps=4
        ),
        invariants=("F-DP-003",),
        place={"step": 2, "rank": 1, "shard": 1},
    ),
    Variant(
        name="inf-one-rank",
        summary="the rank that overflowed skips the step, the others take it",
        source="pytorch #115710",
        plants={
            f"{TEXTBOOK}.non_finite_shard": nobody,
            f"{TEXTBOOK}.all_reduce": reduce_the_finite,
            f"{TEXTBOOK}.apply": skip_if_mine,
        },
        scenario=textbook(faults=(_TEXTBOOK_INF,), world_size=3),
        invariants=("F-DP-003", "F-DP-001"),
        place={"step": 1, "rank": 1},
    ),
    Variant(
        name="inf-cleaned",
        summary="infinities are replaced by large numbers on their way into the sum",
        source="classic (nan_to_num)",
        plants={
            f"{TEXTBOOK}.non_finite_shard": nobody,
            f"{TEXTBOOK}.all_reduce": clean_then_reduce,
        },
        scenario=textbook(faults=(_TEXTBOOK_INF,)),
        invariants=("F-DP-003",),
        place={"step": 1, "rank": 1, "shard": 1},
    ),
    Variant(
        name="nan-to-num",
        summary="nan_to_num runs before the guard, so every shard looks finite",
        source="classic (nan_to_num)",
        plants={f"{REPLICAS}.Replicas.inject": nan_to_num},
        scenario=reference(faults=(_NAN,)),
        invariants=("F-DP-003",),
        place=_CULPRIT,
    ),
    Variant(
        name="isnan-for-isfinite",
        summary="the guard tests for NaN and lets infinities pass",
        source="classic",
        plants={f"{TRAINING}.engine.non_finite": nan_alone},
        scenario=reference(faults=(_INF,)),
        invariants=("F-DP-003",),
        place=_CULPRIT,
    ),
    Variant(
        name="nan-after-reduce",
        summary="the guard tests after the reduction, where all ranks have NaN, and blames rank 0",
        source="Megatron-LM d66807759c",
        plants={f"{REPLICAS}.Replicas.guard": blamed_on_rank_0},
        scenario=reference(faults=(_NAN,)),
        invariants=("F-DP-003",),
        place=_CULPRIT,
    ),
    Variant(
        name="halt-names-first-tensor",
        summary="the halt uses the flat position as one in the first tensor, and blames it",
        source="classic (flattened gradients)",
        plants={f"{TRAINING}.blocks.Layout.locate": first_tensor},
        scenario=reference(faults=(_NAN_LATER,)),
        invariants=("F-DP-003",),
        place={**_CULPRIT, "tensor": "hidden2.bias"},
    ),
    Variant(
        name="guard-missing",
        summary="gradients are not checked, and the NaN reaches every weight",
        source="classic",
        plants={f"{REPLICAS}.Replicas.guard": unguarded},
        scenario=reference(faults=(_NAN,)),
        invariants=("F-DP-003",),
        place=_CULPRIT,
    ),
    Variant(
        name="non-finite-skipped",
        summary="a step with non-finite gradients is skipped silently, and training continues",
        source="classic (loss scaler)",
        plants={
            f"{REPLICAS}.Replicas.guard": unguarded,
            f"{REPLICAS}.Replicas.apply": skip_in_silence,
        },
        scenario=reference(faults=(_NAN,)),
        invariants=("F-DP-003",),
        place=_CULPRIT,
    ),
)
