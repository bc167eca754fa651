"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly to `peak` over `warmup_steps`. Then it stays (`constant`), or falls to 0 at
    `num_steps` along a line (`linear`) or half a cosine (`cosine`).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return peak
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    remaining = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * remaining
