"""Bugs in gradient clipping, invisible unless clipping is active."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import optimizer
from entrenar_py.train.arithmetic.tensors import Array

from .subjects import TEXTBOOK, TRAINING, reference, textbook

_all_reduce, _clip = trainer.all_reduce, trainer.clip
_clip_flat = optimizer.clip

CLIP_NORM = 0.05  # far below the norms of these gradients, which lie around 1

# rank -> norm before the reduction, for `by_local_norm`
_local_norms: dict[int, float] = {}


def clip_then_reduce(setup: Setup, replicas: list[Replica]) -> None:
    """Clips every rank's own gradient before the sum."""
    for replica in replicas:
        _clip(setup, replica)
    _all_reduce(setup, replicas)


def not_on_rank_1(setup: Setup, replica: Replica) -> None:
    """Computes the norm on rank 1, but clips no tensor there."""
    if replica.rank != 1:
        _clip(setup, replica)


def remembering_norms(setup: Setup, replicas: list[Replica]) -> None:
    """Reduces, and keeps the norm of every rank's own gradient for `by_local_norm`."""
    _local_norms.update({r.rank: trainer.grad_norm(setup, r) for r in replicas})
    _all_reduce(setup, replicas)


def by_local_norm(setup: Setup, replica: Replica) -> None:
    """Clips the reduced gradient by the norm of the rank's own gradient."""
    factor = min(1.0, CLIP_NORM / _local_norms[replica.rank])
    for name in setup.trainable:
        trainer.gradient_of(replica, name).mul_(factor)


def each_tensor(setup: Setup, replica: Replica) -> None:
    """Clips every tensor by its own norm."""
    for name in setup.trainable:
        clip_grad_norm_([replica.tensors[name]], CLIP_NORM)


def each_element(setup: Setup, replica: Replica) -> None:
    """Clips every element by value."""
    torch.nn.utils.clip_grad_value_([replica.tensors[n] for n in setup.trainable], CLIP_NORM)


def never(setup: Setup, replica: Replica) -> None:
    """Accepts the setting and clips nothing."""


def by_scaled_norm(gradient: Array, norm: float, clip_norm: float | None) -> Array:
    """Compares the limit with the norm of gradients still multiplied by the loss scale."""
    return _clip_flat(gradient, norm * 1024, clip_norm)


VARIANTS = (
    Variant(
        name="clip-before",
        summary="local gradients are clipped before the reduction",
        source="Horovod torch optimizer: synchronize() must come first",
        plants={f"{TEXTBOOK}.all_reduce": clip_then_reduce},
        scenario=textbook(batch_size=13, clip_norm=CLIP_NORM),
        invariants=("F-DP-005",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="clip-local",
        summary="every rank clips the reduced gradient by the norm of its local gradient",
        source="DeepSpeed #1801 (BLOOM-176B)",
        plants={f"{TEXTBOOK}.all_reduce": remembering_norms, f"{TEXTBOOK}.clip": by_local_norm},
        scenario=textbook(clip_norm=CLIP_NORM),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="clip-not-everywhere",
        summary="rank 1 leaves its copy of the gradient unclipped",
        source="DeepSpeed #1801 (BLOOM-176B)",
        plants={f"{TEXTBOOK}.clip": not_on_rank_1},
        scenario=textbook(world_size=3, clip_norm=CLIP_NORM),
        invariants=("F-DP-001", "F-TI-008"),
        place={"step": 0, "rank": 1},
    ),
    Variant(
        name="clip-per-tensor",
        summary="every tensor is clipped by its own norm",
        source="Megatron-LM abf10f8590 (two optimizers, two norms)",
        plants={f"{TEXTBOOK}.clip": each_tensor},
        scenario=textbook(clip_norm=CLIP_NORM),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="clip-by-value",
        summary="elements are clipped instead of the norm",
        source="classic",
        plants={f"{TEXTBOOK}.clip": each_element},
        scenario=textbook(clip_norm=CLIP_NORM),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="clip-ignored",
        summary="the clipping norm is accepted and ignored",
        source="albor ALB-079 (settings parsed, never used)",
        plants={f"{TEXTBOOK}.clip": never},
        scenario=textbook(clip_norm=CLIP_NORM),
        invariants=("F-TI-008", "F-DP-005"),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="clip-scaled",
        summary="the norm is taken before the loss scale is divided out",
        source="pytorch amp, unscale_ before clipping as documented",
        plants={f"{TRAINING}.optimizer.clip": by_scaled_norm},
        scenario=reference(clip_norm=10.0),
        invariants=("F-TI-008", "F-DP-005"),
        place={"step": 0, "rank": 0},
    ),
)
