"""A step's gradients in flat buckets. Their sums start while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from entrenar_py.train.canonical.reducer import Counter, take, views
from entrenar_py.train.elastic.exchange import Exchange, Sum, Wait

# Large enough to hide latency, small enough for sums to begin while the backward pass goes on.
_BUCKET_BYTES = 25 << 20


class ConnectionLostError(Exception):
    """Raised when a sum could not be started."""


class Buckets:
    """The gradients of the last micro-batch, flattened in a fixed order, and their sums.

    A bucket's sum is started when it has all gradients and the bucket before has started.
    """

    def __init__(self, parameters: list[Tensor], exchange: Exchange) -> None:
        self._exchange = exchange
        self._buckets = list(_cut(parameters[::-1]))  # as the backward pass makes them, about
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self.sums: list[Sum] = []

    def missing(self) -> set[Tensor]:
        """Return the parameters without a gradient."""
        return set().union(*self._missing)

    def add(self, parameter: Tensor, counter: Counter) -> None:
        """Note that `parameter` has its gradient. Raises ConnectionLostError."""
        for missing in self._missing:
            missing.discard(parameter)
        while len(self.sums) < len(self._buckets) and not self._missing[len(self.sums)]:
            rows = self._rows(self._buckets[len(self.sums)], counter)
            try:
                self.sums.append(self._exchange.start(rows))
            except RuntimeError as error:
                raise ConnectionLostError(f"an exchange could not start: {error}") from error

    def finish(self, wait: Wait) -> None:
        """Wait for all sums, and make each `.grad` the mean."""
        for started in self.sums:
            started.gather(wait)
        for started, bucket in zip(self.sums, self._buckets, strict=True):
            started.wait(wait)
            for parameter, view in zip(bucket, views(started.mean, bucket), strict=True):
                parameter.grad = view

    def _rows(self, bucket: list[Tensor], counter: Counter) -> Tensor:
        """Take the gradients of `bucket`, completed by `counter`, as a row for each node."""
        length = self._exchange.padded(sum(one.numel() for one in bucket))
        rows = bucket[0].new_zeros(self._exchange.num_rows, length)
        last = list(take(bucket).values())
        for row, gradients in zip(rows, [*counter.complete(bucket, last), last], strict=True):
            torch._foreach_copy_(views(row, bucket), gradients)
        return rows


def _cut(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of parameters of one dtype, of up to `_BUCKET_BYTES` unless it has only one."""
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if bucket and sum(map(_num_bytes, [*bucket, parameter])) > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
