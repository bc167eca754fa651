"""Events that occur only in the ledger of a training service."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Event):
    """This ledger starts from a checkpoint before `step`, and lacks earlier events.

    `lines` and `digest` are the length of the earlier ledger and the digest of its last line, as
    the checkpoint names them; None if it names none. `reason` says why the earlier ledger is not
    continued.
    """

    step: int
    lines: int | None = None
    digest: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(Event):
    """The gradient of `step` is far larger than those of the previous steps.

    `grad_norm` is its L2 norm before clipping. `median` is the median of the norms of the previous
    `num_steps` steps.
    """

    step: int
    grad_norm: float
    median: float
    num_steps: int
