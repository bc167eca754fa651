"""Faults planted in what this rank holds: in a gradient, in a model's output, or in the process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrenar_py import trace
from entrenar_py.faults import Fault
from entrenar_py.observing import dtensors, unsharded_parameters
from entrenar_py.observing.subject import Subject

Strike = Callable[[Fault], bool]  # return whether to strike now; that is noted then


def spoil_gradient(subject: Subject, fault: Fault, strikes: Strike) -> list[Any]:
    """Plant a value in what this rank adds to a gradient, before that is reduced.

    Returns the hooks that do so.
    """
    name = fault.tensor or subject.first_held()

    def spoil(gradient: Tensor) -> Tensor | None:
        place = _place(subject, name, fault, gradient)
        if not place or not strikes(fault):
            return None
        spoiled = gradient.clone()
        dtensors.local(spoiled)[place] = float(fault.value or "nan")
        return spoiled

    def spoil_whole(parameter: str, whole: Tensor) -> None:
        if parameter == name:
            whole.register_hook(spoil)  # type: ignore[no-untyped-call]

    if subject.is_fully_sharded:
        return unsharded_parameters.when_whole(subject.model, spoil_whole)
    return [subject.trained[name].register_hook(spoil)]  # type: ignore[no-untyped-call]


def _place(subject: Subject, name: str, fault: Fault, gradient: Tensor) -> tuple[int, ...]:
    """Return the index of the element to strike in what this rank holds of a gradient.

    That is the first element if the fault names none. The index is empty if another rank holds it.
    """
    held = dtensors.local(gradient)
    if fault.element is None:
        return (0,) * held.dim() if held.numel() else ()
    piece = subject.pieces.get(name) if isinstance(gradient, DTensor) else None
    whole = held.shape if piece is None else piece.whole
    if fault.element >= math.prod(whole):
        return ()
    place = [int(index) for index in torch.unravel_index(torch.tensor(fault.element), whole)]
    if piece is not None:
        place = [at - begin for at, begin in zip(place, piece.offset, strict=True)]
    inside = all(0 <= at < size for at, size in zip(place, held.shape, strict=True))
    return tuple(place) if inside else ()


def spoil_loss(subject: Subject, fault: Fault, strikes: Strike) -> list[Any]:
    """Plant a value in the model's output, whose gradient stays; return the hooks that do so."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Tensor | None:
        if not (isinstance(output, Tensor) and strikes(fault)):
            return None
        return output + (float(fault.value or "nan") - output.detach())

    return [subject.model.register_forward_hook(spoil)]


def die(fault: Fault, write: Callable[[Sequence[trace.Event]], None]) -> None:
    """Write that `fault`, which names rank and step, kills this process, and kill it."""
    assert fault.rank is not None
    assert fault.step is not None
    left = trace.Membership(
        step=fault.step, rank=fault.rank, change="left", reason="killed (SIGKILL)"
    )
    write([trace.Injected(fault=fault.to_dict(), step=fault.step, rank=fault.rank), left])
    os.kill(os.getpid(), signal.SIGKILL)


# Kind of a fault that plants a value -> the function that hooks it in.
HOOKS: Mapping[str, Callable[[Subject, Fault, Strike], list[Any]]] = {
    "non_finite_gradient": spoil_gradient,
    "huge_gradient": spoil_gradient,
    "non_finite_loss": spoil_loss,
}
