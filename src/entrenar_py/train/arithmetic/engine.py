"""One replica of a model on one backend, and the gradient of one logical shard on it.

The gradient is a *sum* over samples, carried at the exact scale 2^-p with 2^p >= the largest weight
of a step. A power of two changes no bit of a sum, and finite gradients can't overflow on their way
to a finite mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.compute import Stepping
from entrenar_py.compute.on_torch import ResidentStep
from entrenar_py.train.arithmetic import blocks, reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Workload

# digested to identify a stream; with 24 random bits each, they tell any two streams apart
NAMING_NUMBERS = 8


class ShardStreams:
    """Draws the random numbers of a whole batch, each logical shard's from the shard's own stream.

    `streams` holds a (stream, number of samples) pair for each shard, in the order of the samples.
    It replaces the `numpy.random.Generator` of Dropout.
    """

    def __init__(self, streams: Sequence[tuple[np.random.Generator, int]]) -> None:
        self._streams = [(rng, size) for rng, size in streams if size]
        self._num_samples = sum(size for _, size in self._streams)

    def random(self, shape: tuple[int, ...], dtype: type[np.float32]) -> NDArray[Any]:
        """Return numbers in [0, 1) of `shape`; each sample has equally many rows (first axis)."""
        rows = shape[0] // self._num_samples
        parts = [rng.random((size * rows, *shape[1:]), dtype) for rng, size in self._streams]
        return np.concatenate(parts)


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks are drawn from `rng` in call order. `digest()` identifies the stream.
    """

    def __init__(self, rate: float, rng: np.random.Generator | ShardStreams) -> None:
        self._rate = rate
        self._rng = rng
        self._first: blake3 | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with a fresh mask applied: same shape, differentiable."""
        numbers = self._rng.random(tuple(tensor.shape), dtype=np.float32)
        self._first = self._first or blake3(numbers.reshape(-1)[:NAMING_NUMBERS].data.cast("B"))
        kept = numbers >= self._rate
        return tensor * torch.from_numpy(kept / np.float32(1 - self._rate)).to(tensor.device)

    def seed(self) -> int:
        """Return a seed drawn from the stream, 0 to 2^63 - 1, for a different generator."""
        numbers = self._rng.random((3,), dtype=np.float32)  # of 24 random bits each
        self._first = self._first or blake3(numbers.data.cast("B"))
        return int.from_bytes(blake3(numbers.data.cast("B")).digest(8), "little") >> 1

    def key(self) -> torch.Tensor:
        """Return a key drawn from the stream, for `compute.draws`: int32 [2]."""
        seed = self.seed()
        return torch.from_numpy(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32))

    def digest(self) -> str | None:
        """Return 32 hex digits of the first numbers drawn, or None if nothing was drawn.

        Only the first numbers count, so that shards of different sizes have the same digest if they
        share a stream by mistake. Numbers are digested instead of masks, because short masks are
        often equal by chance.
        """
        return None if self._first is None else str(self._first.hexdigest(16))


def no_dropout(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself, without dropout."""
    return tensor


BUFFER_MOMENTUM = 0.1


def scale_of(weight_max: int) -> float:
    """Return 2^-p for the smallest p with 2^p >= `weight_max`, a step's largest total weight."""
    return 2.0 ** -(weight_max - 1).bit_length()


@dataclass(frozen=True)
class BegunShard:
    """A shard that a device has started to compute; `wait` returns what `Engine.shard` returns.

    `gradients` is the shard's gradient on the device, float32 [num_trainable].
    """

    gradients: torch.Tensor
    weight: float
    wait: Callable[[], tuple[Array, float, float]]


class Engine:
    """A replica: all tensors of a workload, the trainable ones as one flat vector.

    `parameters` is float32 [num_trainable]. `arrays` has read-only views of all tensors by name,
    divided into `weights` and `buffers`. `tensors` shares their memory as torch tensors; the
    initial values are copied. `stepper` computes losses, gradients and statistics on the backend;
    `scale` (`scale_of`) multiplies all of them except losses. `resident` is the same stepper if its
    device keeps copies of the tensors, else None: after changing tensors, call `changed`.
    """

    def __init__(
        self, workload: Workload, backend: Stepping, tensors: Mapping[str, Array], *, scale: float
    ) -> None:
        self.workload = workload
        self.layout = blocks.Layout(workload.specs)
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
        self.resident = self.stepper if isinstance(self.stepper, ResidentStep) else None

    def shard(
        self, ids: sharding.Ids, *, accumulation: int, drop: DropFunction
    ) -> tuple[Array, float, float]:
        """Return the flat vector (times the scale), the summed loss and the weight of `ids`.

        `ids` are divided into `accumulation` micro-batches, which are added along a fixed tree.
        """
        if accumulation == 1:
            return self._micro_batch(ids, drop)
        leaves = (
            reduction.Node(0, index, *self._micro_batch(part, drop))
            for index, part in enumerate(sharding.cut(ids, accumulation))
        )
        total = reduction.root(leaves, accumulation)
        return total.vector, total.loss, total.weight

    def begin(self, ids: sharding.Ids) -> BegunShard | None:
        """Start `shard` of `ids`, if the device can do that at once (`ResidentStep.begin`)."""
        if self.resident is None or len(ids) == 0:
            return None
        begun = self.resident.begin(ids)
        if begun is None:
            return None
        weight = float(self.workload.weight(ids))
        return BegunShard(begun.gradients, weight, lambda: self._joined(ids, *begun.wait()))

    def changed(self) -> None:
        """Note that tensors have changed, since a device may have copies of them."""
        if self.resident is not None:
            self.resident.changed()

    def _micro_batch(self, ids: sharding.Ids, drop: DropFunction) -> tuple[Array, float, float]:
        if len(ids) == 0:
            return np.zeros(self.layout.num_elements, np.float32), 0.0, 0.0
        return self._joined(ids, *self.stepper(ids, drop))

    def _joined(
        self, ids: sharding.Ids, loss: float, parts: list[Array]
    ) -> tuple[Array, float, float]:
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
        self.changed()

    def average_buffers(self, average: Array) -> None:
        """Move each running mean towards the batch's mean in `average`, the reduced vector."""
        for name, part in self.layout.buffers.items():
            running = self.buffers[name]
            running += np.float32(BUFFER_MOMENTUM) * (
                average[part].reshape(running.shape) - running
            )
        if self.resident is not None:
            self.resident.changed_buffers()


def as_one(parts: Sequence[Array]) -> Array:
    """Return all float32 parts as one vector, without a copy if they are adjacent in memory."""
    base, place = parts[0].base, parts[0].ctypes.data
    for part in parts:
        if base is None or part.base is not base or part.ctypes.data != place:
            return np.concatenate(parts, axis=None)
        place += part.nbytes
    length = sum(part.size for part in parts)
    return np.lib.stride_tricks.as_strided(parts[0].reshape(-1), (length,))


def non_finite(vector: Array) -> int | None:
    """Return the position of the first NaN or Inf in `vector`, or None if all are finite."""
    totals: list[np.float32] = []

    def of(parts: Sequence[slice]) -> None:
        # set here, because numpy keeps it for each thread
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum allocates nothing, and is finite only if all elements are.
            totals.extend(vector[part].sum() for part in parts)

    reduction.share_out(reduction.cut(len(vector)), of)
    if np.isfinite(totals).all() or np.isfinite(vector).all():
        return None
    return int(np.flatnonzero(~np.isfinite(vector))[0])
