"""Events of the device probes: the cost of a step, its results, and refused computations."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """A device computed loss and gradients of `num_samples` samples, in call `step` of the run.

    The costs are counted at the device library's interface. `given` identifies weights, samples and
    masks: equal texts mean equal inputs. `earlier` counts earlier steps of this replica with as
    many samples. `declared_bytes` is the size of the `num_inputs` inputs, 4 bytes an element.
    `compiled` counts shaders and pipelines, `traced` operations on tensors without data. `on_host`
    names operations that ran on the CPU meanwhile, except the look-up of samples and the masks.
    `results` are the loss and the gradients.
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

    `error` is the absolute deviation at `element`, the largest one (in an operation, relative to
    its bound). `bound` is what rounding explains there. `total_error` is the sum of the absolute
    deviations, `total_bound` what rounding explains of that (both 0 in an operation).
    `num_bounded` of `num_elements` have a bound. `finite` is false if a NaN or infinity stands
    where float64 has none.
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
    """Inputs held a NaN, which reaches `reached` elements of `tensor` on the CPU.

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
    """A computation was requested that the device has no kernel for. It raised `error`, if any.

    The message should contain `operation` and name a source line. `in_line` tells whether it names
    the requesting line. `right` tells whether the result, if there was no error, equals the CPU's.
    `submissions` counts what was submitted to the device.
    """

    case: str
    operation: str
    error: str | None
    message: str
    in_line: bool
    right: bool
    submissions: int
