"""The event of a coordinator that averages for workers which hold the weights."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged(Event):
    """A coordinator without weights averaged the `gradient` of `step`, which `ranks` had computed.

    `loss` is the mean over `weight` samples, of them `correct` were predicted right; all three are
    None if the workers did not tell.
    """

    step: int
    ranks: tuple[int, ...]
    gradient: Tensors
    loss: float | None = None
    correct: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Event):
    """Workers heard the average of `part` of the gradient of `step`, under the schedule `case`.

    `digest` is that of its bytes, "different" if they heard different ones, None if none of them
    heard any. `poisoned`: a term is not finite. `roundings` is the largest deviation from the exact
    weighted mean of the known terms, in units of what one rounding to float32 and those of float64
    may make, at `element`; None without a digest.
    """

    case: str
    step: int
    part: str
    digest: str | None
    poisoned: bool
    roundings: float | None
    element: int | None
