"""What is to go wrong, planted in what this rank holds: in a gradient, or in a model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from entrenar_py.faults import Fault
from entrenar_py.observing import pieces
from entrenar_py.observing.subject import Subject

Strike = Callable[[Fault], bool]  # whether it is time: then it is noted, and must be done


def spoil_gradient(subject: Subject, fault: Fault, strikes: Strike) -> Any:
    """In what this rank adds to a gradient; where only the sum of all is seen, in its piece of
    that.
    """
    parameter = subject.trained[fault.tensor or subject.first_held()]
    element = fault.element or 0

    def spoil(gradient: Tensor) -> None:
        held = pieces.local(gradient)
        held[torch.unravel_index(torch.tensor(element), held.shape)] = float(fault.value or "nan")

    def spoil_sum(holder: Tensor) -> None:
        if element < pieces.local(holder).numel() and holder.grad is not None and strikes(fault):
            spoil(holder.grad)

    def spoil_term(gradient: Tensor) -> Tensor | None:
        if element >= pieces.local(gradient).numel() or not strikes(fault):
            return None
        spoiled = gradient.clone()
        spoil(spoiled)
        return spoiled

    if subject.is_fully_sharded:
        after = parameter.register_post_accumulate_grad_hook
        return after(spoil_sum)  # type: ignore[no-untyped-call]
    return parameter.register_hook(spoil_term)  # type: ignore[no-untyped-call]


def spoil_loss(subject: Subject, fault: Fault, strikes: Strike) -> Any:
    """In the value of the model's output alone: its gradient stays."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Tensor | None:
        if not (isinstance(output, Tensor) and strikes(fault)):
            return None
        return output + (float(fault.value or "nan") - output.detach())

    return subject.model.register_forward_hook(spoil)


# What a planted value does, by its kind.
HOOKS: Mapping[str, Callable[[Subject, Fault, Strike], Any]] = {
    "non_finite_gradient": spoil_gradient,
    "huge_gradient": spoil_gradient,
    "non_finite_loss": spoil_loss,
}
