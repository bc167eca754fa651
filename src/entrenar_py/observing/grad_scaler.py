"""What a `GradScaler` tells an optimizer that unscales gradients itself, as fused ones do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def has_overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that begins is to move nothing, since the scale was too large."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscaled(
    gradients: Mapping[str, Tensor | None], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor | None]:
    """`gradients` as they are applied; not copied where nothing is left to divide by."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return dict(gradients)
    return {name: None if one is None else one / scale for name, one in gradients.items()}
