"""Follow which backward passes each gradient holds when an optimizer applies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from entrenar_py.check.observing import dtensors
from entrenar_py.shared import trace


@dataclass
class _Source:
    """The sources of a parameter's gradient since it was found cleared.

    `passes` are the backward passes (step, micro-batch) that added to it. `first` is the step
    of the first one if the gradient was applied with `digest` and not touched since; else -1.
    """

    passes: list[tuple[int, int]] = field(default_factory=list)
    first: int = -1
    digest: str = ""
    is_applied: bool = False


class GradientSources:
    """Follows the gradients by looking at them as each backward pass begins.

    A gradient that is missing or all zeros then was cleared. One that was applied and has the same
    bits then was not.
    """

    def __init__(self, digest: Callable[[str, Tensor], str]) -> None:
        self._digest = digest  # of a gradient by name, as its record has it
        self._sources: dict[str, _Source] = {}
        self._given: dict[str, list[int]] = {}  # name -> the step's micro-batches that gave it
        self._held: dict[str, list[int]] = {}  # name -> those that it held when it was applied
        self._kept: dict[str, int] = {}

    def before_backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Note which gradients are cleared now."""
        for name, gradient in gradients.items():
            source = self._sources.get(name)
            if source is None:
                continue
            if gradient is None or not dtensors.local(gradient).any():
                del self._sources[name]
            elif source.is_applied and source.digest != self._digest(name, gradient):
                source.first, source.is_applied = -1, False

    def after_backward(self, step: int, micro_batch: int, names: Iterable[str]) -> None:
        """Note that a backward pass has added to the gradients of the parameters `names`."""
        for name in names:
            source = self._sources.setdefault(name, _Source())
            source.passes.append((step, micro_batch))
            source.is_applied = False
            given = self._given.setdefault(name, [])
            if micro_batch not in given:
                given.append(micro_batch)

    def apply(
        self, step: int, gradients: Mapping[str, Tensor | None], known: trace.Tensors
    ) -> None:
        """Note that an optimizer is about to apply `gradients` in `step`.

        `known` are records of gradients that were made anyway.
        """
        for name, gradient in gradients.items():
            source = self._sources.get(name)
            if gradient is None or source is None:
                continue
            digest = known[name].digest if name in known else self._digest(name, gradient)
            if source.is_applied and source.digest != digest:
                source.first = -1
            if source.first >= 0:
                self._kept[name] = source.first
            else:
                source.first = step
            self._held[name] = sorted({number for at, number in source.passes if at == step})
            source.passes.clear()
            source.digest, source.is_applied = digest, True

    def forget_passes(self) -> None:
        """Forget the step's backward passes: the coming one repeats their samples."""
        self._given.clear()

    def end_step(self) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Return `kept` and `summed` of the Update, and begin the next step."""
        summed = {
            name: tuple(held)
            for name, held in self._held.items()
            if held != sorted(self._given.get(name, ()))
        }
        kept = self._kept
        self._given, self._held, self._kept = {}, {}, {}
        return kept, summed
