"""Events of elastic training, in which ranks die and join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Event):
    """Worker `rank` begins to train in generation `generation`, from this state on.

    All events of one process follow one another in a trace.

    - `step`: the next step.
    - `process`: which process of the rank it is; the first is 1.
    - `members`: the ranks of the generation, as this worker knows them.
    - `received`: whether it got the state from another worker.
    - `waited_s`: seconds since the worker last computed or committed something; None if it has
      just started.
    - `extra`: state besides the model, as in Start.
    - `progress`: the position of the schedule.
    """

    step: int
    rank: int
    process: int
    generation: int
    members: tuple[int, ...]
    received: bool
    waited_s: float | None
    weights: Tensors
    optimizer: Tensors
    extra: Tensors = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
