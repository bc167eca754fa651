"""The gradient norms of a run's last steps: one far above their median is a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError

KEY = "grad_norms"  # in the progress of a checkpoint; earlier builds did not write it
FACTOR = 10.0
STEPS_KEPT = 200
STEPS_LEAST = 20  # with fewer norms the median says nothing: the first gradients vary much


class GradientNorms:
    """The L2 norms of the last STEPS_KEPT steps, before clipping."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._norms = deque(norms, maxlen=STEPS_KEPT)

    def add(self, norm: float) -> None:
        """Take the norm of a step that was made."""
        self._norms.append(norm)

    def exceeded(self, norm: float) -> float | None:
        """Return the median if `norm` is more than FACTOR times as large, else None.

        None, too, while fewer than STEPS_LEAST steps are known, and if the median is 0.
        """
        if len(self._norms) < STEPS_LEAST:
            return None
        median = statistics.median(self._norms)
        return median if 0 < FACTOR * median < norm else None

    def spike(self, step: int, norm: float) -> trace.Spike | None:
        """Return the spike that `step` is if its gradient has this norm; None if it is none."""
        median = self.exceeded(norm)
        if median is None:
            return None
        return trace.Spike(step=step, grad_norm=norm, median=median, num_steps=len(self._norms))

    def to_record(self) -> list[float]:
        """Return what a checkpoint notes, as JSON can hold it."""
        return list(self._norms)


def of_checkpoint(progress: Mapping[str, Any], path: Path) -> GradientNorms:
    """Return the norms that the checkpoint at `path` notes in `progress`; none if it notes none.

    Raises CheckpointError if its entry is malformed.
    """
    noted = progress.get(KEY, [])
    if not (isinstance(noted, list) and len(noted) <= STEPS_KEPT and all(map(_is_norm, noted))):
        raise CheckpointError(
            f"checkpoint {path}: {KEY} is not a list of up to {STEPS_KEPT} norms; use an earlier "
            "checkpoint"
        )
    return GradientNorms(noted)


def _is_norm(value: object) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def say(spike: trace.Spike) -> str:
    """Return in words how far a spike is above the median of the steps before it."""
    norm, median = spike.grad_norm, spike.median
    return (
        f"step {spike.step}: gradient norm {norm:.4g} is {norm / median:.0f} times {median:.4g}, "
        f"the median of the last {spike.num_steps} steps"
    )


def say_made(spike: trace.Spike, clip_norm: float | None) -> str:
    """Return in words that the step of a spike was made, clipped to `clip_norm` if there is one."""
    return f"{say(spike)}; {'not clipped' if clip_norm is None else f'clipped to {clip_norm:g}'}"


def say_halted(spike: trace.Spike) -> str:
    """Return in words that a run halts before the step of a spike."""
    return f"{say(spike)}: training halted before any update (--halt-on-spike)"
