"""The parts of a workload: its tensors, and the interface of all workloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute import Array, Batch, DropFunction, LinearFunction, Tensors

__all__ = ["Array", "Batch", "DropFunction", "LinearFunction", "TensorSpec", "Tensors", "Workload"]

Role: TypeAlias = Literal["trainable", "frozen", "buffer"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, float32.

    A `trainable` tensor gets gradients and updates. A `frozen` tensor never changes. A `buffer`
    holds running statistics and has no gradient. `decayed` applies weight decay to a trainable
    tensor.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    decayed: bool


class Workload(ABC):
    """A model and its data set.

    `specs` fixes the order of the tensors everywhere. `data_digest` has 32 hex digits of BLAKE3
    over the data set. `weight_max` is the largest weight of one sample. If `draws` is true, each
    shard gets a stream of random numbers even if the plan has no dropout. If `is_static` is true,
    the shapes of a batch determine the operations of `loss_of`, and a GPU may record them. Sample
    ids run from 0 to `num_samples - 1`. Methods that take `ids` need at least one id.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    num_samples: int
    data_digest: str
    weight_max = 1
    draws = False

    @property
    def is_static(self) -> bool:
        """True if the shapes of a batch determine the operations of `loss_of`."""
        return False

    @property
    def may_wait(self) -> bool:
        """True if `batch` may wait for data that are still being produced."""
        return False

    @property
    def constants(self) -> Tensors:
        """Frozen tensors that the workload itself holds, by name; replicas have no copies."""
        return {}

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return new initial values of all specs, in their order, float32 and C-contiguous."""
        return {spec.name: uniform(rng, spec, bound=0.5) for spec in self.specs}

    def weight(self, ids: Sequence[int]) -> float:
        """Return the weight of `ids` in the mean: samples, or target tokens of a language model."""
        return len(ids)

    def num_tokens(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens in the samples `ids`; None if they are not made of tokens."""
        return None

    def interrupt(self) -> None:  # noqa: B027  (a hook)
        """Interrupt a `batch` that waits in another thread: it raises SystemFailure, now and later.

        This default does nothing, because `batch` doesn't wait.
        """

    @abstractmethod
    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the CPU tensors of the samples `ids`; shapes depend only on the number of ids."""

    @abstractmethod
    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        """Return the SUM of the loss over the samples or tokens: 0-d, of the tensors' dtype.

        `batch` comes from the method `batch`. `linear` computes every dense layer, always on
        two-dimensional inputs. `drop` is called in a fixed order.
        """

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        """Return the loss of `ids`, and `scale` times its gradient for each trainable tensor.

        Computed on the CPU, where `tensors` lie. This default uses torch's autograd.
        """
        loss = self.loss_of(tensors, self.batch(ids), linear=F.linear, drop=drop)
        leaves = [tensors[spec.name] for spec in self.specs if spec.role == "trainable"]
        # Not by grad_outputs: with a tensor there, torch imports sympy, which takes 0.7 s.
        gradients = torch.autograd.grad(loss * torch.tensor(scale), leaves)
        return loss.item(), [gradient.numpy() for gradient in gradients]

    def statistics(self, ids: Sequence[int]) -> dict[str, Array]:
        """Return each buffer's sum, over `ids`, of the values that it averages, in its shape."""
        return {}


def uniform(rng: np.random.Generator, spec: TensorSpec, *, bound: float) -> Array:
    """Return C-contiguous float32 of `spec.shape`, uniform in [-bound, bound), drawn from `rng`."""
    return rng.uniform(-bound, bound, spec.shape).astype(np.float32)
