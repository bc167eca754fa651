"""Hooks on a model's parameters, whole ones or pieces, that hear of each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from entrenar_py.observing import dtensors, tensors, unsharded_parameters
from entrenar_py.observing.gradients_ready import GradientHooks, call_last
from entrenar_py.observing.planned_faults import PlannedFaults
from entrenar_py.observing.subject import Subject

# Is given what a pass adds to each parameter, by name, and whether all of that is finite.
Gave = Callable[[Mapping[str, Tensor | None], bool], None]


class BackwardHooks:
    """Calls `begun` before a backward pass adds anything, and `ended` with what it has added.

    `added` is called with what a pass within it adds, and `summed` when the gradients are there
    that the pass leaves. Of a model in pieces it is known only whether what was added is finite.
    """

    def __init__(
        self,
        subject: Subject,
        faults: PlannedFaults,
        *,
        begun: Callable[[], None],
        ended: Gave,
        added: Gave,
        summed: Callable[[], None],
    ) -> None:
        self._subject, self._faults = subject, faults
        self._begun, self._ended, self._added, self._summed = begun, ended, added, summed
        self._pieces = unsharded_parameters.BackwardPasses(begun, self._end_pieces)
        self._whole: GradientHooks | None = None
        self._handles: list[Any] = []
        self.set()

    def set(self) -> None:
        """Hook the parameters as they are now, in place of those before."""
        self.remove()
        # Before the hook that records them: gradients are recorded as they were made wrong.
        self._handles = self._faults.hooks()
        if self._subject.is_fully_sharded:
            self._handles += self._pieces.watch(self._subject.model)
            self._whole = None
            return
        trained = list(self._subject.trained.values())
        self._whole = GradientHooks(trained, self._begun, self._end_whole, self._add)
        self._handles.append(self._whole)

    def expect(self, output: Any) -> None:
        """Note that a forward pass gave `output`: a backward pass begins there."""
        if self._whole is None or dtensors.is_fully_sharded(self._subject.model):
            self._pieces.expect(output)
        else:
            self._whole.expect(output)

    def remove(self) -> None:
        """Hear of nothing any more."""
        for handle in self._handles:
            handle.remove()

    def _end_pieces(self, finite: bool) -> None:
        self._ended({}, finite)
        self._summed()

    def _end_whole(self, gradients: Sequence[Tensor | None]) -> None:
        self._ended(self._named(gradients), tensors.is_finite(gradients))
        call_last(self._summed)

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        self._added(self._named(gradients), tensors.is_finite(gradients))
        call_last(self._summed)

    def _named(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        return dict(zip(self._subject.trained, gradients, strict=True))
