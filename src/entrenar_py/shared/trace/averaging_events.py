"""Events of a coordinator that averages gradients for workers, which hold the weights."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged(Event):
    """A coordinator without weights averaged the `gradient` of `step`, computed by `ranks`.

    `loss` is the mean over `weight` samples, and `correct` the number of these that were predicted
    right. All three are None if the workers did not report them.
    """

    step: int
    ranks: tuple[int, ...]
    gradient: Tensors
    loss: float | None = None
    correct: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Event):
    """Workers received the average of `part` of the gradient of `step`; `case` is the schedule.

    - `digest`: the digest of the average's bytes; "different" if workers received different bytes,
      None if no worker received an average.
    - `poisoned`: whether a term of the average is not finite.
    - `roundings`: the largest deviation, at `element`, from the exact weighted mean of the known
      terms, in units of the rounding bound (one rounding to float32, and the float64 roundings).
      None if `digest` is.
    """

    case: str
    step: int
    part: str
    digest: str | None
    poisoned: bool
    roundings: float | None
    element: int | None
