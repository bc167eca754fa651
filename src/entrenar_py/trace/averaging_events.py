"""The event of a coordinator that averages for workers which hold the weights."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.trace.events import Event
from entrenar_py.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged(Event):
    """A coordinator without weights averaged the `gradient` of `step`, which `ranks` had computed.

    `loss` is the mean over `weight` samples, `correct` of which were predicted right; all three are
    None if the workers did not tell.
    """

    step: int
    ranks: tuple[int, ...]
    gradient: Tensors
    loss: float | None = None
    correct: int | None = None
    weight: int | None = None
