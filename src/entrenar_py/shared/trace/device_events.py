"""Events of the device probes: the cost of a step, its results, and refused computations."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """A device computed loss and gradients of `num_samples` samples, in call `step` of the run.

    The costs are counted at the interface of the device library.

    - `given`: identifies weights, samples and masks: equal texts mean equal inputs.
    - `earlier`: the number of earlier steps of this replica with the same number of samples.
    - `declared_bytes`: the size of the `num_inputs` inputs, at 4 bytes per element.
    - `compiled`: the number of shaders and pipelines.
    - `traced`: the number of operations on tensors without data.
    - `on_host`: the operations that ran on the CPU meanwhile, without the look-up of samples and
      the masks.
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
    """A device's tensor was compared with float64. `of` names the training step or the operation.

    - `error`: the largest absolute deviation, which is at `element`. In an operation it is the
      largest one relative to its bound.
    - `bound`: the deviation that rounding explains there.
    - `total_error`: the sum of the absolute deviations, 0 in an operation.
    - `total_bound`: the part of that sum that rounding explains, 0 in an operation.
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
    """The inputs held a NaN, which on the CPU reaches `reached` elements of `tensor`.

    `lost` of these elements were not NaN on the device; `element` is the first lost one.
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
    """A computation was requested for which the device has no kernel.

    - `error`: the exception that it raised, or None.
    - `message`: the exception's message, which should contain `operation` and name a source line.
    - `in_line`: whether the message names the requesting line.
    - `right`: whether the result equals the CPU's, if there was no error.
    - `submissions`: the number of submissions to the device.
    """

    case: str
    operation: str
    error: str | None
    message: str
    in_line: bool
    right: bool
    submissions: int
