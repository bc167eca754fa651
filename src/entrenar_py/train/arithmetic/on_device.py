"""AdamW in a GPU's memory, with the bits of `optimizer`.

If the host took the step, the GPU would wait for it and for the upload of the new weights.

All operations are elementwise, or additions in a fixed order. Their results are IEEE's, as on the
host, because three things are avoided: a product and a sum in one kernel (it rounds only once), a
division by a number of the host (torch multiplies by the reciprocal), and torch's own sums (their
order depends on the device).

A worker's host gets copies of weights and moments after each step, for the record. They arrive
while the GPU computes the next shard. Ranks of torchrun record less, and copy nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.train.arithmetic.optimizer import (
    BETA1,
    BETA2,
    EPSILON,
    SQUARES,
    Rule,
    State,
    Vector,
    power_of_two,
)
from entrenar_py.train.arithmetic.reduction import Node

BYTES_MAX = 2**28  # of weights: more of them, with their moments, would crowd out activations
MOMENTS = ("exp_avg", "exp_avg_sq")


def fits(rule: Rule, num_trainable: int) -> bool:
    """Return whether a replica of this size takes its steps on its device."""
    return rule.kind == "adamw" and 0 < 4 * num_trainable <= BYTES_MAX


class AdamW:
    """AdamW on `weights`, float32 [num_trainable], where they are.

    `moments` has the state by name, float32 [num_trainable], and `count` the steps so far.
    """

    def __init__(self, rule: Rule, weights: Tensor) -> None:
        self.weights, self.count = weights, 0
        self.moments = {name: torch.zeros_like(weights) for name in MOMENTS}
        self._weight_decay = rule.weight_decay if rule.decayed is not None else 0.0
        self._decayed: Tensor | None = None
        if self._weight_decay and rule.decayed is not None:
            self._decayed = torch.from_numpy(rule.decayed).to(weights.device)

    def squares(self, gradient: Tensor) -> Tensor:
        """Return the square of `optimizer.norm_l2` of `gradient`, 0-d float64 on the device."""
        squares = gradient.double().square_()
        sums = _added_by_halves(F.pad(squares, (0, -len(squares) % SQUARES)).view(-1, SQUARES))
        filled = F.pad(sums, (0, power_of_two(len(sums)) - len(sums)))
        return _added_by_halves(filled[None])[0]

    def clip(self, gradient: Tensor, norm: float, clip_norm: float | None) -> Tensor:
        """Return `optimizer.clip` of `gradient`."""
        if clip_norm is None or clip_norm / (norm + 1e-6) >= 1:
            return gradient
        return gradient * _single(clip_norm / (norm + 1e-6))

    def step(self, gradient: Tensor, rate: float) -> None:
        """Take the step of `optimizer.step`."""
        self.count += 1
        if self._decayed is not None:
            shrunk = self._decayed * _single(rate * self._weight_decay)
            self.weights.mul_(shrunk.neg_().add_(1))
        first, second = self.moments.values()
        first.add_((gradient - first).mul_(_single(1 - BETA1)))
        second.mul_(_single(BETA2))
        second.add_((gradient * gradient).mul_(_single(1 - BETA2)))
        # torch's root of a float32 is not IEEE's on every device; a float64's, rounded, is.
        root = second.double().sqrt_().float()
        unbiased = torch.full_like(first[:1], math.sqrt(1 - BETA2**self.count))
        divisor = root.div_(unbiased).add_(_single(EPSILON))
        self.weights.sub_((first / divisor).mul_(_single(rate / (1 - BETA1**self.count))))


def mean(total: Tensor, weight: float) -> Tensor:
    """Return `optimizer.mean` of `total`."""
    return total / torch.full_like(total[:1], weight)


class DeviceOptimizer(AdamW):
    """The optimizer of one replica; `weights` are on the device, float32 [num_trainable].

    `state` has the moments on the host. The device gets a copy, and `copy_back` updates the host's.
    `failures` returns a context manager that selects the device and converts its errors
    (`CudaBackend.failures`).
    """

    def __init__(
        self,
        rule: Rule,
        weights: Tensor,
        state: State,
        failures: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(rule, weights)
        self._state, self._failures = state, failures
        self.count = int(state["count"][0])
        for name, moment in self.moments.items():
            moment.copy_(torch.from_numpy(state[name]))
        is_cuda = weights.device.type == "cuda"
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            for tensor in self._tensors
        ]
        self._stream = None
        if is_cuda:
            self._stream = torch.cuda.Stream(weights.device)  # type: ignore[no-untyped-call]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.weights, *self.moments.values())

    def new_vector(self, num_elements: int) -> Vector:
        """Return memory for a vector on the host that `upload` copies fast, float32."""
        is_cuda = self.weights.device.type == "cuda"
        with self._failures():
            memory = torch.empty(num_elements, dtype=torch.float32, pin_memory=is_cuda)
        vector: Vector = memory.numpy()
        return vector

    def upload(self, vector: Vector) -> Tensor:
        """Return `vector`, float32 [num_trainable], on the device."""
        with self._failures():
            return torch.from_numpy(vector).to(self.weights.device)

    def download(self, gradient: Tensor) -> Callable[[], Vector]:
        """Start to copy `gradient` to the host; return a function that waits for the copy."""
        is_cuda = self._stream is not None
        with self._failures():
            host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=is_cuda)
            self._copy_aside([(host, gradient)])
            gradient_is_there = self._stream.record_event() if self._stream is not None else None

        def wait() -> Vector:
            if gradient_is_there is not None:
                with self._failures():
                    gradient_is_there.synchronize()
            vector: Vector = host.numpy()
            return vector

        return wait

    def add(self, node: Node, sibling: Node) -> Node:
        """Return `reduction.add` of nodes on the device; its vector is new."""
        left, right = (node, sibling) if node.index < sibling.index else (sibling, node)
        loss, weight = left.loss + right.loss, left.weight + right.weight
        with self._failures():
            total = left.vector + right.vector
        return Node(left.level + 1, left.index // 2, total, loss, weight)

    def mean(self, total: Node, scale: float) -> Tensor:
        """Return `optimizer.mean` of `total`, which is on the device, float32 [num_trainable].

        `scale` multiplies its weight.
        """
        with self._failures():
            return mean(cast("Tensor", total.vector), total.weight * scale)

    def norm_l2(self, gradient: Tensor) -> float:
        """Return `optimizer.norm_l2` of `gradient`."""
        with self._failures():
            return math.sqrt(self.squares(gradient).item())

    def clip(self, gradient: Tensor, norm: float, clip_norm: float | None) -> Tensor:
        """Return `optimizer.clip` of `gradient`."""
        with self._failures():
            return super().clip(gradient, norm, clip_norm)

    def step(self, gradient: Tensor, rate: float) -> None:
        """Take the step of `optimizer.step`, and start to copy the results to the host."""
        with self._failures(), torch.no_grad():
            super().step(gradient, rate)
            self._copy_aside(zip(self._copies, self._tensors, strict=True))
        self._state["count"] += 1

    def copy_back(self, weights: Vector) -> None:
        """Wait for the copies of the last step; write them to `weights` and to the state."""
        if self._stream is not None:
            with self._failures():
                self._stream.synchronize()
        targets = [weights, *(self._state[name] for name in MOMENTS)]
        for target, copy in zip(targets, self._copies, strict=True):
            np.copyto(target, copy.numpy())

    def _copy_aside(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start to copy the second of each pair to the first, after all work so far."""
        if self._stream is None:
            for copy, tensor in pairs:
                copy.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.weights.device))
        with torch.cuda.stream(self._stream):
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)


def leaf(shard: int, gradient: Tensor, weight: float) -> Node:
    """Return the leaf of `shard` for `DeviceOptimizer.add`; its loss is not known yet."""
    return Node(0, shard, cast("Vector", gradient), math.nan, weight)


def _added_by_halves(rows: Tensor) -> Tensor:
    """Return the sum of each row of `rows`, [n, a power of two], as `optimizer` adds it."""
    while rows.shape[1] > 1:
        left, right = rows.chunk(2, dim=1)
        rows = left + right
    return rows[:, 0]


def _single(number: float) -> float:
    """Return `number` rounded to float32, or infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
