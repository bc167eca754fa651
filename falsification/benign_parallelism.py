"""Correct variants of trainers that cut a model: no check may report any of these."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from entrenar_py.shared.mutants import Variant

from .parallelism import CLIP_NORM, TENSOR, parallel, pipeline

_CUT = ("F-PAR-001", "F-PAR-002", "F-PAR-003", "F-PAR-005")


def clip_by_torch(
    trainable: Iterable[nn.Parameter], clip_norm: float | None, group: dist.ProcessGroup
) -> None:
    """Clips by torch's own function, which adds the norms of DTensor pieces itself."""
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(trainable, clip_norm)


VARIANTS = (
    Variant(
        name="clipped-by-torch",
        summary="a model cut over ranks is clipped by torch.nn.utils.clip_grad_norm_",
        plants={f"{TENSOR}.clip": clip_by_torch},
        scenario=parallel(clip_norm=CLIP_NORM),
        tried=(*_CUT, "F-PAR-006"),
    ),
    Variant(
        name="weights-apart",
        summary="a pipeline without bubbles: gradients of weights are computed later, separately",
        plants={},
        scenario=pipeline(
            num_samples=12, num_steps=2, stops=(1,), options={"schedule": "zero_bubble"}
        ),
        tried=("F-PAR-001", "F-PAR-002", "F-PAR-004"),
    ),
)
