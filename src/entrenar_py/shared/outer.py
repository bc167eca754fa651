"""The settings and the schedule of the outer step, which synchronises workers after local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entrenar_py.shared.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Outer:
    """DiLoCo's settings: each worker makes `inner_steps` locally, then all make one Nesterov step.

    The defaults are the paper's. Raises UsageError when a value is out of range.
    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.
    """

    inner_steps: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        steps = self.inner_steps
        if type(steps) is not int or steps < 1:
            raise UsageError(f"inner_steps={steps!r}: use a whole number >= 1")
        for name, most in (("outer_learning_rate", math.inf), ("outer_momentum", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < most:
                raise UsageError(f"{name}={value!r}: use a number >= 0 and below {most:g}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Outer:
        """Return the settings in a scenario's `options`, with defaults for those not given."""
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in options.items() if name in names})

    def round_end(self, step: int, num_steps: int) -> int:
        """Return the first step after the round that `step` is in. The last round may be short."""
        return min((step // self.inner_steps + 1) * self.inner_steps, num_steps)

    def ends_round(self, step: int, num_steps: int) -> bool:
        """Return whether the workers synchronise after `step`."""
        return step + 1 == self.round_end(step, num_steps)
