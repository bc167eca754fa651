"""The types in which a workload describes its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from entrenar_py.backends.steps import Array, DropFunction, LinearFunction

__all__ = ["Array", "DropFunction", "LinearFunction", "Role", "TensorSpec", "uniform"]

Role: TypeAlias = Literal["trainable", "frozen", "buffer"]


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
