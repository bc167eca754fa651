"""A step's gradients in flat buckets. Their sums start while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from entrenar_py.train.canonical.reducer import Counter, take, views
from entrenar_py.train.elastic.exchange import Exchange, Sum, Wait

# Large enough to hide what a sum costs the host, small enough for sums to begin while the backward
# pass goes on. With GPUs the host's launches are the limit.
_BUCKET_BYTES = {"cpu": 25 << 20, "cuda": 128 << 20}


class _Bucket:
    """Gradients of one dtype, flat: a row for each node of the tree that this rank holds."""

    def __init__(self, parameters: list[Tensor], exchange: Exchange) -> None:
        self.parameters = parameters
        self._shape = (exchange.num_rows, exchange.padded(sum(one.numel() for one in parameters)))
        self.clear()

    @cached_property  # when it is needed: the last generation's buckets are gone by then
    def rows(self) -> Tensor:
        """The gradients, [num_rows, padded length]."""
        return self.parameters[0].new_zeros(self._shape)

    @cached_property
    def _views(self) -> list[list[Tensor]]:
        return [views(row, self.parameters) for row in self.rows]

    def clear(self) -> None:
        """Begin a step."""
        self.missing = set(self.parameters)

    def fill(self, counter: Counter) -> None:
        """Take the gradients of the last micro-batch, and complete them by `counter`."""
        last = list(take(self.parameters).values())
        nodes = [*counter.complete(self.parameters, last), last]
        for row, gradients in zip(self._views, nodes, strict=True):
            torch._foreach_copy_(row, gradients)

    def use_mean(self) -> None:
        """Make each `.grad` a view of the first row, in which a sum leaves the mean."""
        for parameter, view in zip(self.parameters, self._views[0], strict=True):
            parameter.grad = view


class Buckets:
    """The gradients of the last micro-batch, flattened in a fixed order, and their sums.

    A bucket's sum is started when it has all gradients and the bucket before has started.
    """

    def __init__(self, parameters: list[Tensor], exchange: Exchange) -> None:
        self._exchange = exchange
        # As the backward pass makes them, about.
        self._buckets = [_Bucket(one, exchange) for one in _cut(parameters[::-1])]
        self._bucket_of = {one: bucket for bucket in self._buckets for one in bucket.parameters}
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.sums: list[Sum] = []
        for bucket in self._buckets:
            bucket.clear()

    def missing(self) -> set[Tensor]:
        """Return the parameters without a gradient."""
        return set().union(*(bucket.missing for bucket in self._buckets))

    def add(self, parameter: Tensor, counter: Counter) -> None:
        """Note that `parameter` has its gradient. Raises ConnectionLostError."""
        self._bucket_of[parameter].missing.discard(parameter)
        while len(self.sums) < len(self._buckets):
            bucket = self._buckets[len(self.sums)]
            if bucket.missing:
                break
            bucket.fill(counter)
            self.sums.append(self._exchange.start(bucket.rows))

    def finish(self, wait: Wait) -> None:
        """Make each `.grad` the mean, and wait for all sums."""
        for started in self.sums:
            started.gather(wait)
        for bucket in self._buckets:  # before the wait: a GPU idles after it
            bucket.use_mean()
        for started in self.sums:
            started.wait(wait)


def _cut(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of parameters of one dtype, of a limited size unless it has only one."""
    most = _BUCKET_BYTES[parameters[0].device.type]
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if bucket and sum(map(_num_bytes, [*bucket, parameter])) > most:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
