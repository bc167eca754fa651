"""The place of each tensor in the flat vector that is reduced.

The vector holds the gradients of the trainable tensors in the specs' order, then the statistics of
the buffers, so that both travel along the same tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.train.arithmetic.tensors import TensorSpec

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Slices of the flat vector, by tensor name, for `specs` in their order."""

    specs: tuple[TensorSpec, ...]

    @cached_property
    def trainable(self) -> dict[str, slice]:
        """Slices of the trainable tensors."""
        return _slices((s for s in self.specs if s.role == "trainable"), start=0)

    @cached_property
    def buffers(self) -> dict[str, slice]:
        """Slices of the buffers' statistics, behind the gradients."""
        return _slices((s for s in self.specs if s.role == "buffer"), start=self.num_trainable)

    @cached_property
    def num_trainable(self) -> int:
        """The number of elements of all trainable tensors."""
        return sum(prod(s.shape) for s in self.specs if s.role == "trainable")

    @cached_property
    def decayed(self) -> Vector | None:
        """1 where weight decay applies, 0 elsewhere, float32 [num_trainable]; None if nowhere."""
        mask = np.zeros(self.num_trainable, dtype=np.float32)
        for spec in self.specs:
            if spec.role == "trainable" and spec.decayed:
                mask[self.trainable[spec.name]] = 1
        return mask if mask.any() else None

    @cached_property
    def num_elements(self) -> int:
        """The number of elements of the flat vector: gradients and statistics."""
        return sum(prod(s.shape) for s in self.specs if s.role != "frozen")

    @cached_property
    def digest(self) -> str:
        """32 hex digits that identify the manifest: each tensor's name, shape, role and decay."""
        manifest = [[s.name, list(s.shape), s.role, s.decayed] for s in self.specs]
        return str(blake3(json.dumps(manifest).encode()).hexdigest(16))

    def locate(self, position: int) -> tuple[str, int]:
        """Return the tensor at `position` of the flat vector, and the element within the tensor.

        Raises IndexError for a position outside of the vector.
        """
        for name, part in {**self.trainable, **self.buffers}.items():
            if part.start <= position < part.stop:
                return name, position - part.start
        raise IndexError(f"position {position} lies outside the flat vector")


def _slices(specs: Iterable[TensorSpec], start: int) -> dict[str, slice]:
    slices = {}
    for spec in specs:
        slices[spec.name] = slice(start, start + prod(spec.shape))
        start += prod(spec.shape)
    return slices
