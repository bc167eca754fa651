"""A step as a coordinator reports it."""

from __future__ import annotations

from typing import Any

from entrenar_py.train.service.run_events import Last, StepMade


def made(step: int = 0, **changes: Any) -> StepMade:
    """Return the event of step `step` of ten, by two workers."""
    usual: dict[str, Any] = {
        "num_steps": 10,
        "loss": 2.25,
        "workers": (0, 2),
        "step_ms": 12.5,
        "exchange_ms": 7.25,
        "reduce_ms": 0.25,
        "steps_per_s": 80.0,
        "bytes_in": 20_800,
        "bytes_out": 1_234_567,
        "last": Last(rank=2, behind_ms=3.5),
        "waits_ms": {0: 4.5, 2: 0.0},
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 2560.0,
        "backends": {0: "cpu", 2: "wgpu"},
        "memory_bytes": 10**9,
    }
    return StepMade(step=step, **{**usual, **changes})
