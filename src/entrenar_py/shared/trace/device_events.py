"""Events of the device probes: the cost of a step, its results, and refused computations."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """A device computed loss and gradients of `num_samples` samples, in call `step` of the run.

    Costs (such as `submissions` and `upload_bytes`) are counted as calls of the device library.

    - `given`: a text that identifies weights, samples and masks. Equal texts mean equal inputs.
    - `earlier`: the number of earlier steps of this replica with the same number of samples.
    - `declared_bytes`: the size of the `num_inputs` inputs, at 4 bytes per element.
    - `compiled`: the number of shaders and pipelines that were compiled.
    - `traced`: the number of operations on tensors without data.
    - `on_host`: the operations that ran on the CPU during the step, except the look-up of samples
      and the drawing of masks.
    - `results`: the loss and the gradients.
    """

    step: int
    backend: str
    device: str
    software: bool
    num_samples: int
    given: str
    earlier: int
    submissions: int
    read_backs: int
    uploads: int
    upload_bytes: int
    declared_bytes: int
    num_inputs: int
    dispatches: int
    compiled: int
    traced: int
    on_host: tuple[str, ...]
    results: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Event):
    """A device's tensor was compared with float64. `of` is the training step or the operation.

    - `error`: the absolute deviation at `element`, where it is largest. For an operation, `element`
      is where the deviation is largest relative to its bound.
    - `bound`: the deviation that rounding explains at `element`.
    - `total_error`: the sum of the absolute deviations, 0 for an operation.
    - `total_bound`: the sum of absolute deviations that rounding explains, 0 for an operation.
    - `num_bounded`: the number of elements, out of `num_elements`, that have a bound.
    - `finite`: false if the device has a NaN or infinity where float64 has none.
    """

    of: str
    tensor: str
    device: str
    software: bool
    finite: bool
    num_elements: int
    num_bounded: int
    element: int
    error: float
    bound: float
    total_error: float = 0.0
    total_bound: float = 0.0
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned(Event):
    """The inputs contained a NaN, which on the CPU reaches `reached` elements of `tensor`.

    On the device, `lost` of these elements were not NaN; `element` is the first of them.
    """

    of: str
    tensor: str
    device: str
    software: bool
    reached: int
    lost: int
    element: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(Event):
    """A computation was requested that the device has no kernel for.

    - `error`: the type of the exception that the request raised, or None.
    - `message`: the exception's message, which should contain `operation` and name a source line.
    - `in_line`: whether the message names the source line of the request.
    - `right`: if there was no error, whether the result equals the CPU's.
    - `submissions`: the number of submissions to the device.
    """

    case: str
    operation: str
    error: str | None
    message: str
    in_line: bool
    right: bool
    submissions: int
