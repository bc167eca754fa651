"""The marks of a `GradScaler` on an optimizer that unscales gradients itself, as fused ones do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def has_overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step that begins is to move nothing, since the scale was too large."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def unscaled(
    gradients: Mapping[str, Tensor | None], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor | None]:
    """Return `gradients` as they are applied; they are not copied if they are unscaled already."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return dict(gradients)
    return {name: None if grad is None else grad / scale for name, grad in gradients.items()}
