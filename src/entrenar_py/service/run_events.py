"""Records of what a coordinator tells of its run while it goes on, for all that listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The last of several workers that delivered, and how long after the median of them all."""

    rank: int
    behind_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMade:
    """`step` was made by `workers`. `loss` is its mean.

    `step_ms` went by since the step before, or since its workers were there. Of them `exchange_ms`
    lie between the last shard computed and everyone holding the average, and `reduce_ms` were spent
    adding and averaging here: None in a mesh, where the workers do. `steps_per_s` is over the last
    steps, None after the first.
    `bytes_in` and `bytes_out` are the coordinator's since the step before. `last` is None where
    fewer than two delivered.
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
    """Something else worth telling, in words; `what` is a name for it, `step` the one in work."""

    what: str
    step: int
    text: str


Happening: TypeAlias = StepMade | Noted
Listener = Callable[[Happening], None]
