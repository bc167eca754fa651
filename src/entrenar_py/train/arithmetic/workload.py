"""The workloads that a plan can name: `linear`, `mlp`, `decoder`, ...

A workload defines its tensors, their initial values, its data and the loss. It keeps no weights.
The same arguments give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, from_numpy

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import decoder
from entrenar_py.train.arithmetic.datasets import NUM_DIGITS, NUM_PIXELS, digest, digits
from entrenar_py.train.arithmetic.tensors import (
    Array,
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    TensorSpec,
    Workload,
    uniform,
)

# The workload `vectors`: the gradient of every sample is a vector known in advance.
#
# The loss is linear in the only tensor, so the average gradient does not depend on the weights.
# This tests a reduction by itself, at any length.

WEIGHTS = 3  # samples weigh 1, 2 or 3 in turn
DRAWN = "drawn"  # value of `terms`: vectors are drawn, and every sample weighs 1
TERMS_MAX = 1024


class GivenVectors(Workload):
    """The loss of sample i is the inner product of the tensor `vector` and a known vector v_i.

    If `terms` are vectors, they are the v_i, repeated cyclically. With DRAWN or None, v_i is
    normally distributed and not stored: its own seed draws it again when needed, whole or in
    pieces. Samples weigh 1 each; with None they weigh 1, 2 or 3 in turn.
    """

    name = "vectors"
    weight_max = WEIGHTS

    def __init__(
        self, num_samples: int, *, length: int, data: np.random.Generator, terms: Any = None
    ) -> None:
        """Raise UsageError if `terms` is neither None, nor DRAWN, nor vectors of `length`."""
        self.num_samples = num_samples
        self._equal = terms is not None
        self._given = None if terms in (None, DRAWN) else _vectors(terms, length)
        self.specs = (TensorSpec("vector", (length,), "trainable", decayed=True),)
        self._length = length
        self._seeds = data.integers(2**63, size=num_samples)
        arrays = [self._seeds, np.array([length])]
        if terms is not None:
            arrays.append(np.array([1.0]) if self._given is None else self._given)
        self.data_digest = digest(*arrays)

    def weight(self, ids: Sequence[int]) -> int:
        return len(ids) if self._equal else sum(1 + sample % WEIGHTS for sample in ids)

    def pieces(self, sample: int) -> Callable[[int], Array]:
        """Return a function that returns the next `count` elements of v_`sample`, float32."""
        if self._given is not None:
            return _pieces(self._given[sample % len(self._given)])
        stream = np.random.Generator(np.random.PCG64(int(self._seeds[sample])))
        return lambda count: stream.standard_normal(count, dtype=np.float32)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor]:
        """Return the sum of the v_i, added in the order of `ids`, float32 [length]."""
        return (from_numpy(self._total(ids)),)

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        vector = tensors["vector"]
        return (vector * batch[0].to(vector)).sum()

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        total = self._total(ids)
        loss = (tensors["vector"].detach() * from_numpy(total)).sum().item()
        total *= np.float32(scale)
        return loss, [total]

    def _total(self, ids: Sequence[int]) -> Array:
        """Return the sum of the v_i, added in the order of `ids`."""
        drawn = (self.pieces(i)(self._length) for i in ids)
        total = next(drawn)
        for vector in drawn:
            total += vector
        return total


def _pieces(vector: Array) -> Callable[[int], Array]:
    place = 0

    def piece(count: int) -> Array:
        nonlocal place
        start, place = place, place + count
        return vector[start:place].copy()

    return piece


def _vectors(terms: Any, length: int) -> Array:
    """Return `terms` as float32 [count, length]. Raises UsageError if that is impossible."""
    rows = terms if isinstance(terms, list) else []
    if not 0 < len(rows) <= TERMS_MAX or not all(_is_vector(row, length) for row in rows):
        shown = repr(terms)
        raise UsageError(
            f"options terms={shown[:80]}: use {DRAWN}, or a list of 1 to {TERMS_MAX} lists of "
            f"width={length} finite numbers each"
        )
    with np.errstate(over="ignore"):
        vectors = np.array(rows, dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise UsageError("options terms: a number is too large for float32; use smaller ones")
    return vectors


def _is_vector(row: Any, length: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == length
        and all(type(x) in (int, float) and math.isfinite(x) for x in row)
    )


def build(
    name: str, *, num_samples: int, width: int, data: np.random.Generator, terms: Any = None
) -> Workload:
    """Return the workload `name` with `num_samples` samples.

    `width` is the hidden width of `mlp` or the length of `vectors`. `data` draws the samples of
    `linear` and `vectors`. `terms` are for `vectors` (`GivenVectors`). Raises UsageError if the
    name is unknown, the data set has fewer samples, or `terms` are given to a different workload.
    """
    if terms is not None and name != "vectors":
        raise UsageError(f"options terms with workload={name!r}: leave it out, or use vectors")
    if name == "linear":
        return LinearRegression(num_samples, data=data)
    if name == "mlp":
        return DigitClassifier(num_samples, width=width)
    if name in ("decoder", "decoder_full"):
        return decoder.ByteDecoder(num_samples, full=name == "decoder_full")
    if name == "vectors":
        return GivenVectors(num_samples, length=width, data=data, terms=terms)
    raise UsageError(f"workload={name!r}: allowed are linear, mlp, decoder, decoder_full, vectors")


class LinearRegression(Workload):
    """Squared error on y = 2x + 1 with x uniform in [-1, 1): small enough to check by hand."""

    name = "linear"
    specs = (
        TensorSpec("weight", (1, 1), "trainable", decayed=True),
        TensorSpec("bias", (1,), "trainable", decayed=False),
    )

    def __init__(self, num_samples: int, *, data: np.random.Generator) -> None:
        x = data.uniform(-1, 1, (num_samples, 1)).astype(np.float32)
        xy = np.stack([x, 2 * x + 1])
        self.num_samples = num_samples
        self.data_digest = digest(xy)
        self._xy = torch.from_numpy(xy)  # [2, num_samples, 1]
        self._columns = xy[:, :, 0]  # [2, num_samples]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return x and y, float32 [n, 1] each."""
        x, y = self._xy.index_select(1, torch.tensor(ids)).unbind(0)
        return x, y

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        weight = tensors["weight"]
        x, y = (tensor.to(weight) for tensor in batch)  # [n, 1] each
        return F.mse_loss(linear(x, weight, tensors["bias"]), y, reduction="sum")

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        # By hand, 2 sum(e x) and 2 sum(e). The harness explores with this workload, and autograd
        # would take four times as long as the rest of a step. Overflow is silent, as in torch.
        x, y = self._columns[:, ids]  # [n] each
        with torch.no_grad(), np.errstate(over="ignore", invalid="ignore"):
            prediction = F.linear(torch.from_numpy(x[:, None]), tensors["weight"], tensors["bias"])
            error = prediction.numpy()[:, 0] - y
            slope = np.float32(2 * scale) * error
            gradients = [(slope * x).sum(keepdims=True)[None], slope.sum(keepdims=True)]
            return float((error * error).sum()), gradients  # [1, 1] and [1]


class DigitClassifier(Workload):
    """Handwritten digits through two hidden tanh layers with dropout, cross entropy.

    The input is centred by a running mean of the pixels, a buffer.
    """

    name = "mlp"

    def __init__(self, num_samples: int, *, width: int) -> None:
        pixels, labels = digits(num_samples)
        self.num_samples = num_samples
        self.data_digest = digest(pixels, labels)
        self.specs = (
            *_layer("hidden1", NUM_PIXELS, width),
            *_layer("hidden2", width, width),
            *_layer("output", width, NUM_DIGITS),
            TensorSpec("running_mean", (NUM_PIXELS,), "buffer", decayed=False),
        )
        self._pixels = pixels
        self._inputs = torch.from_numpy(pixels)  # [num_samples, 64]
        self._labels = torch.from_numpy(labels)  # [num_samples]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return pixels, float32 [n, 64], and labels, int64 [n]."""
        rows = torch.tensor(ids)
        return self._inputs.index_select(0, rows), self._labels.index_select(0, rows)

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        values = {}
        for spec in self.specs:
            if spec.role == "buffer":
                values[spec.name] = np.zeros(spec.shape, np.float32)
            else:
                values[spec.name] = uniform(rng, spec, bound=spec.shape[-1] ** -0.5)
        return values

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        mean = tensors["running_mean"]
        pixels, labels = batch
        x = pixels.to(mean) - mean  # [n, 64]
        for layer in ("hidden1", "hidden2"):
            x = linear(x, tensors[f"{layer}.weight"], tensors[f"{layer}.bias"])  # [n, width]
            x = drop(torch.tanh(x))
        logits = linear(x, tensors["output.weight"], tensors["output.bias"])  # [n, 10]
        return F.cross_entropy(logits, labels.to(mean.device), reduction="sum")

    def statistics(self, ids: Sequence[int]) -> dict[str, Array]:
        # Pixels are multiples of 1/16, so these sums are exact in any order.
        return {"running_mean": self._pixels[list(ids)].sum(axis=0, dtype=np.float32)}


def _layer(name: str, fan_in: int, fan_out: int) -> tuple[TensorSpec, TensorSpec]:
    return (
        TensorSpec(f"{name}.weight", (fan_out, fan_in), "trainable", decayed=True),
        TensorSpec(f"{name}.bias", (fan_out,), "trainable", decayed=False),
    )
