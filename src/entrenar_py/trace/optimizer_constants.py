"""The constants of torch.optim's optimizers that decide what a step makes of a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name -> the value that it has where a script says nothing: torch's defaults, but for momentum.
USUAL: Mapping[str, Any] = {
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
}
