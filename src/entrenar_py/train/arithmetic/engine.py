"""One replica of a model on one backend, and the gradient of one logical shard on it.

The gradient is a *sum* over samples, carried at the exact scale 2^-p with 2^p >= the largest weight
of a step. A power of two changes no bit of a sum, and finite gradients can't overflow on their way
to a finite mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from entrenar_py.compute import Stepping
from entrenar_py.train.arithmetic import layout, reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Workload

BUFFER_MOMENTUM = 0.1


def scale_of(weight_max: int) -> float:
    """Return 2^-p for the smallest p with 2^p >= `weight_max`, a step's largest total weight."""
    return 2.0 ** -(weight_max - 1).bit_length()


class Engine:
    """A replica: all tensors of a workload, the trainable ones as one flat vector.

    `parameters` is float32 [num_trainable]. `arrays` are views of all tensors by name, for reading,
    split into `weights` and `buffers`. `tensors` are the same memory as torch tensors; the values
    passed are copied. `scale` (`scale_of`) multiplies gradients and statistics, not losses.
    `stepper` computes them on the backend.
    """

    def __init__(
        self,
        workload: Workload,
        backend: Stepping,
        tensors: Mapping[str, Array],
        *,
        scale: float,
    ) -> None:
        self.workload = workload
        self.layout = layout.Layout(workload.specs)
        flat = torch.empty(self.layout.num_trainable)  # torch aligns to 64 bytes, on every replica
        self.parameters: Array = flat.numpy()
        self.tensors: dict[str, torch.Tensor] = {}
        for spec in workload.specs:
            value = torch.tensor(tensors[spec.name])
            if spec.role == "trainable":
                view = flat[self.layout.trainable[spec.name]].view(spec.shape)
                view.copy_(value)
                value = view.detach().requires_grad_()
            self.tensors[spec.name] = value
        self.arrays = {name: tensor.detach().numpy() for name, tensor in self.tensors.items()}
        self.buffers = {name: self.arrays[name] for name in self.layout.buffers}
        self.weights = {n: array for n, array in self.arrays.items() if n not in self.buffers}
        self._scale = scale
        self.stepper = backend.stepper(workload, self.tensors, scale=scale)

    def shard(
        self, ids: sharding.Ids, *, accumulation: int, drop: DropFunction
    ) -> tuple[Array, float, float]:
        """Return the flat vector (times the scale), the summed loss and the weight of `ids`.

        `ids` are cut into `accumulation` micro-batches, which are added along a fixed tree.
        """
        if accumulation == 1:
            return self._micro_batch(ids, drop)
        leaves = (
            reduction.Node(0, index, *self._micro_batch(part, drop))
            for index, part in enumerate(sharding.cut(ids, accumulation))
        )
        total = reduction.root(leaves, accumulation)
        return total.vector, total.loss, total.weight

    def _micro_batch(self, ids: sharding.Ids, drop: DropFunction) -> tuple[Array, float, float]:
        if len(ids) == 0:
            return np.zeros(self.layout.num_elements, np.float32), 0.0, 0.0
        loss, parts = self.stepper(ids, drop)
        scale = np.float32(self._scale)
        parts += [total * scale for total in self.workload.statistics(ids).values()]
        return as_one(parts), loss, float(self.workload.weight(ids))

    def copy_to(self, vector: Array) -> None:
        """Write the parameters and the buffers to `vector`, in the order of the layout."""
        vector[: self.layout.num_trainable] = self.parameters
        for name, part in self.layout.buffers.items():
            vector[part] = self.buffers[name].reshape(-1)

    def copy_from(self, vector: Array) -> None:
        """Set the parameters and the buffers from `vector`, in the order of the layout."""
        self.parameters[:] = vector[: self.layout.num_trainable]
        for name, part in self.layout.buffers.items():
            self.buffers[name][...] = vector[part].reshape(self.buffers[name].shape)

    def average_buffers(self, average: Array) -> None:
        """Move each running mean towards the batch's mean in `average`, the reduced vector."""
        for name, part in self.layout.buffers.items():
            running = self.buffers[name]
            running += np.float32(BUFFER_MOMENTUM) * (
                average[part].reshape(running.shape) - running
            )


def as_one(parts: Sequence[Array]) -> Array:
    """Return all float32 parts as one vector, without a copy if they follow in memory."""
    base, place = parts[0].base, parts[0].ctypes.data
    for part in parts:
        if base is None or part.base is not base or part.ctypes.data != place:
            return np.concatenate(parts, axis=None)
        place += part.nbytes
    length = sum(part.size for part in parts)
    return np.lib.stride_tricks.as_strided(parts[0].reshape(-1), (length,))


def non_finite(vector: Array) -> int | None:
    """Return the position of the first NaN or Inf in `vector`, or None if all are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = vector.sum()  # has no room to fill, and is finite only if all are
    if np.isfinite(total) or np.isfinite(vector).all():
        return None
    return int(np.flatnonzero(~np.isfinite(vector))[0])
