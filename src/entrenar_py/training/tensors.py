"""What a workload says about its tensors, and the two functions it borrows from its caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Role: TypeAlias = Literal["trainable", "frozen", "buffer"]
Array: TypeAlias = NDArray[np.float32]

# (x [rows, in], weight [out, in], bias [out] or None) -> [rows, out]: the backend's `F.linear`.
LinearFunction: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"
# x of any shape -> the same shape: dropout where a model has it, or the identity.
DropFunction: TypeAlias = "Callable[[Tensor], Tensor]"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, float32.

    A `trainable` tensor gets gradients and steps, a `frozen` one never changes, a `buffer` changes
    by running statistics and never has a gradient. `decayed` puts it in the optimizer's parameter
    group with weight decay.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    decayed: bool


def uniform(rng: np.random.Generator, spec: TensorSpec, *, bound: float) -> Array:
    """Float32 of `spec.shape`, C-contiguous, uniform in [-bound, bound), drawn from `rng`."""
    return rng.uniform(-bound, bound, spec.shape).astype(np.float32)
