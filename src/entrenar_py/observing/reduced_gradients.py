"""What became of a step's gradients: whether they were reduced, and whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from entrenar_py.observing import backward, tensors


class Summed:
    """The gradients as the last backward pass has left them, and the script since then.

    They are kept, and looked at again when they are gone: who reduces them by hand does so in
    place. `was_reduced` is whether those of the last backward pass were to be, and it left some:
    `fully_shard` keeps to itself what it has yet to reduce.
    """

    def __init__(self) -> None:
        self._reduces = True
        self.was_reduced = True
        self._overflowed = False
        self._kept: list[Tensor] = []

    def expect(self) -> None:
        """A forward pass begins: now it is known whether its gradients will be reduced."""
        self._reduces = backward.is_reduced()

    def look(self, gradients: Iterable[Tensor | None]) -> None:
        """A backward pass is over, and has left these."""
        self._kept = [one for one in gradients if one is not None] if self._reduces else []
        self.was_reduced = bool(self._kept)
        self._overflowed = not tensors.is_finite(self._kept)

    def has_overflowed(self) -> bool:
        """Whether those of a whole step are not finite, or were not."""
        return self._overflowed or not tensors.is_finite(self._kept)

    def forget(self) -> None:
        """The step was made."""
        self._kept, self._overflowed = [], False
