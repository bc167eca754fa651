"""What probes of a device record: what a step cost, what came out, what was refused."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.trace.events import Event
from entrenar_py.trace.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """A device computed loss and gradients of `num_samples` samples: call `step` of the run.

    What it cost was counted where the device's library is called, not by the backend.
    `given` names weights, samples and masks: what is equal was given the same. `earlier` is how
    many steps of as many samples that replica had made before. `declared_bytes` is what weights,
    samples and masks take, 4 bytes an element, in `num_inputs` tensors. `compiled` counts shaders
    and pipelines, `traced` operations on tensors without data. `on_host` are those that computed on
    the CPU in the meantime, samples' look-up and masks aside. `results` are the loss and gradients.
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
    """A tensor that a device computed, beside float64; `of` is a step of training or an operation.

    `error` is how far it is off at `element`, where rounding explains it least, and `bound` what
    rounding explains there. `total_error` and `total_bound` are those of all elements together
    (0 where each was held against a bound of its own). `num_bounded` of `num_elements` have a
    bound. `finite`: no NaN and no infinity where float64 has none.
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

    `lost` of them were numbers on the device, the first at `element`.
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
    """A computation was asked for that the device has no kernel for: the `error` it gave, if any.

    The message is to name `operation` (a part of its name) and a line. `in_line`: it names the line
    that asks for it. `right`: what came out in place of an error is what the CPU computes.
    `submissions` is what was given to the device.
    """

    case: str
    operation: str
    error: str | None
    message: str
    in_line: bool
    right: bool
    submissions: int
