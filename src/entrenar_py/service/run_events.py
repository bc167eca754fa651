"""Events that a coordinator sends its listeners during a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The worker that delivered last, and its delay after the median of all workers."""

    rank: int
    behind_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMade:
    """`workers` made `step`, with mean loss `loss`.

    `step_ms` is the time since the step before, or since its workers were ready. `exchange_ms` of
    it lie between the last computed shard and all workers holding the average. `reduce_ms` were
    spent adding and averaging in the coordinator (None in a mesh, whose workers do that).
    `steps_per_s` is over the last steps, None after the first. `bytes_in` and `bytes_out` are the
    coordinator's traffic since the step before. `last` is None if fewer than two workers delivered.
    """

    step: int
    num_steps: int
    loss: float
    workers: tuple[int, ...]
    step_ms: float
    exchange_ms: float | None
    reduce_ms: float | None
    steps_per_s: float | None
    bytes_in: int
    bytes_out: int
    last: Last | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Another event, in words. `what` is a name for it, `step` the current step."""

    what: str
    step: int
    text: str


Happening: TypeAlias = StepMade | Noted
Listener = Callable[[Happening], None]
