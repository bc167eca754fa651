"""The optimizer step that a rank is in, and what is known of its gradient so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import tensors
from entrenar_py.observing.subject import Subject


class StepInWork:
    """Step `number` of the run; `stepped` are the optimizers, by index, that have made theirs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stepped: set[int] = set()
        self._gradient: dict[str, trace.TensorRecord] = {}
        # L2 norms, before clipping and after it, where the script says when it has reduced.
        self._norm: float | None = None
        self._applied_norm: float | None = None

    def reduced(self, subject: Subject) -> None:
        """Note the gradients: those of the whole batch, not clipped yet."""
        gradients = subject.gradients()
        self._gradient = dict(subject.record(gradients))
        self._norm = tensors.norm(gradients.values())

    def excuse(self) -> None:
        """Forget the gradients: they are not finite, since the loss scale was too large."""
        self._gradient, self._norm = {}, None

    def apply(
        self, subject: Subject, gradients: Mapping[str, Tensor | None], names: Iterable[str]
    ) -> None:
        """Note `gradients`, which an optimizer is about to apply to the parameters `names`."""
        if self._norm is None:
            self._gradient |= subject.record({name: gradients[name] for name in names})
        elif not self.stepped:
            self._applied_norm = tensors.norm(gradients.values())

    def end(self, subject: Subject, rank: int, buffers: Mapping[str, Tensor]) -> trace.Update:
        """Return the record of the step; from here on this is the next one."""
        update = subject.update(self.number, rank, self._gradient, buffers)
        update = replace(update, grad_norm=self._norm, applied_norm=self._applied_norm)
        self.number += 1
        self.stepped.clear()
        self._gradient, self._norm, self._applied_norm = {}, None, None
        return update
