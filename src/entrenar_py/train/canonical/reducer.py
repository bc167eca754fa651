"""The canonical all-reduce of one model: its loop over micro-batches and its DDP hook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.canonical import exchange, requirements

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

# `Counter` adds the gradients of one rank's micro-batches along the tree, one after another.
#
# It is a binary counter: a node waits until its right sibling, of as many micro-batches, is there.
# If the rank's first micro-batch is the left edge of a subtree that the last one completes (always,
# for powers of two), one node is left in the end. Otherwise there are several.

Gradients = dict[Hashable, Tensor]  # parameter, or name of a module -> gradient


class Counter:
    """The tree nodes that wait for their right sibling, from left to right."""

    def __init__(self, first: int = 0) -> None:
        """Start with micro-batch `first`."""
        self._first = first
        self.clear()

    def push(self, node: Gradients) -> None:
        """Add the next micro-batch's gradients. The counter owns `node` and changes it in place."""
        if self._nodes and not self._nodes[-1][1]:  # all were completed: another step begins
            self.clear()
        span = range(self._next, self._next + 1)
        self._next += 1
        while self._nodes and are_siblings(self._nodes[-1][0], span):
            left, older = self._nodes.pop()
            add(older.values(), node.values())
            node, span = older, range(left.start, span.stop)
        self._nodes.append((span, node))

    def complete(
        self, parameters: Iterable[Hashable], gradients: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Add the pending nodes of `parameters` to the last micro-batch's `gradients`, in place.

        Returns the gradients of the nodes that have another sibling, from left to right. There are
        none if the rank's micro-batches are a subtree.
        """
        parameters = list(parameters)
        span = range(self._next, self._next + 1)
        others: list[list[Tensor]] = []
        for left, waiting in reversed(self._nodes):
            taken = [waiting.pop(one) for one in parameters]
            if not others and are_siblings(left, span):
                add(gradients, taken)
                span = range(left.start, span.stop)
            else:
                others.append(taken)
        return others[::-1]

    def clear(self) -> None:
        """Drop all pending nodes."""
        self._next = self._first
        self._nodes: list[tuple[range, Gradients]] = []


def are_siblings(left: range, right: range) -> bool:
    """Return whether two neighbouring nodes of the tree, given by their leaves, have one parent."""
    return len(left) == len(right) and left.start % (2 * len(left)) == 0


def take(parameters: Iterable[Tensor]) -> Gradients:
    """Return the gradients of `parameters` and reset each `.grad` to None.

    Parameters without a gradient are left out of the result.
    """
    taken: Gradients = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter], parameter.grad = parameter.grad, None
    return taken


def add(into: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Add `others` to `into` in place, pair by pair, with one fused call for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(into, others, strict=True):
        ours, theirs = by_dtype.setdefault(one.dtype, ([], []))
        ours.append(one)
        theirs.append(other)
    for ours, theirs in by_dtype.values():
        torch._foreach_add_(ours, theirs)


Batch = TypeVar("Batch")
Exchange = Callable[[Tensor], Future[Tensor]]

# Large enough to hide launch overhead, small enough for pieces to overlap. Measured on four H200s
# (docs/benchmarks.md), where 32 MiB takes a quarter longer.
PIECE_BYTES = 128 << 20


class Fold(ABC):
    """The loop over one rank's micro-batches of a step.

    `shards` are the global indices of this rank's micro-batches, in order. Seed all randomness of
    a micro-batch from (seed, step, `shard`). Otherwise the randomness depends on the world size.

    Where all ranks must make as many passes, one with fewer micro-batches has its last one twice:
    `is_repeat` is True for the second, and its gradient isn't used.
    """

    def __init__(
        self, shards: Sequence[int], parameters: requirements.Parameters, micro_batches: int
    ) -> None:
        self.shards, self._micro_batches = shards, micro_batches
        self._pass = 0
        self._parameters = parameters
        self._switches = requirements.switches()
        self._shard: int | None = None  # the current micro-batch

    @property
    def shard(self) -> int:
        """The global index of the current micro-batch.

        Raises UsageError outside of a loop over `fold`.
        """
        if self._shard is None:
            raise UsageError("reducer.shard outside of the loop over fold(): read it inside of it")
        return self._shard

    @property
    def is_repeat(self) -> bool:
        """True if the current micro-batch is the last one again. Don't count its loss then."""
        return self._pass > 0 and self.shards[self._pass] == self.shards[self._pass - 1]

    def fold(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the next `len(self.shards)` of `batches`. Run forward and backward on each.

        Drops all gradients first. After the loop, each `.grad` is the mean over all micro-batches
        of all ranks. Raises UsageError if there are too few batches, if `batches` surely has those
        of other ranks or steps, if a micro-batch had no backward pass, if a setting in
        `requirements.switches` changed since the reducer was created, or if
        `requirements.Parameters.require_unchanged` does.
        """
        requirements.require_unchanged(self._switches)
        self._parameters.require_unchanged()
        self._require_share(batches)
        take(self._parameters)
        self._clear()
        coming = iter(batches)
        try:
            for number, shard in enumerate(self.shards):
                batch = _next(coming, shard, self.shards)
                self._pass, self._shard = number, shard
                with self._accumulation():
                    yield batch
                self._keep()
        finally:
            if not self._is_reduced():
                take(self._parameters)  # of a part of the step
            self._shard, self._pass = None, 0
            self._clear()

    def _is_reduced(self) -> bool:
        """Return whether each `.grad` is the mean, also if nobody asks `fold` for another batch."""
        return self._is_last() and all(one.grad is not None for one in self._parameters)

    def _require_share(self, batches: Iterable[object]) -> None:
        """Raise UsageError if `batches` surely has the micro-batches of other ranks or steps."""
        own, every = len(self.shards), self._micro_batches
        if isinstance(batches, list | tuple | Tensor) and own < len(batches) == every:
            raise UsageError(
                f"fold() got the micro-batches of all ranks, {every}, and would take the first "
                f"{own} on each rank: give it those of this rank, [batches[shard] for shard in "
                "reducer.shards]"
            )
        if isinstance(batches, DataLoader) and _begins_anew(batches) and own < len(batches):
            raise UsageError(
                f"fold() got a DataLoader of {len(batches)} micro-batches, which begins anew in "
                f"each step, and would take the first {own} each time: give it an iterator over "
                "this rank's micro-batches of all steps, iter(loader), made once before the steps"
            )

    def _is_last(self) -> bool:
        return self._shard is not None and self._pass == len(self.shards) - 1

    def _require_gradients(self, having: Iterable[Hashable]) -> None:
        """Raise UsageError unless all parameters are among `having`."""
        missing = self._parameters.keys() - having
        if missing:
            names = sorted(self._parameters[one] for one in missing)
            raise UsageError(
                f"micro-batch {self._shard}, of {_named(self.shards)}, made no gradient for "
                f"{names[0]} ({len(names)} of {len(self._parameters)} parameters): run its forward "
                "pass through the wrapped model and its backward pass inside the loop over fold(), "
                "and let it use every parameter"
            )

    def _accumulation(self) -> AbstractContextManager[None]:
        """Return the context in which the current micro-batch is computed."""
        return nullcontext()

    @abstractmethod
    def _keep(self) -> None:
        """Check that the current micro-batch made every gradient, and keep them for the sum."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget all gradients of the step."""


class Reducer(Fold):
    """The result of `canonical_all_reduce`; its docstring shows how to use it."""

    def __init__(
        self, model: DistributedDataParallel, *, micro_batches: int, symmetric_memory: bool | None
    ) -> None:
        requirements.require_wrapped(model)
        group = model.process_group
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        requirements.require_numbers(micro_batches=micro_batches, world_size=world_size)
        requirements.require_even(
            world_size, otherwise="use entrenar_py.elastic, which takes any number"
        )
        share = micro_batches // world_size
        shards = range(rank * share, (rank + 1) * share)
        super().__init__(shards, requirements.require_model(model), micro_batches)
        device = next(iter(self._parameters)).device
        self._model, self._counter = model, Counter()
        self._reduced: set[Hashable] = set()  # parameters that the hook received in this step
        self._exchange = exchange_of(
            group,
            device,
            scale=1 / micro_batches,
            symmetric_memory=symmetric_memory,
            facts={"micro_batches": micro_batches},
        )
        # torch reads a hook's annotations and rejects postponed ones. A lambda has none.
        try:
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        except RuntimeError as error:
            raise UsageError(
                f"the model has a communication hook ({error}): it can have only one, and the "
                "canonical all-reduce needs it; remove the other hook, and call "
                "canonical_all_reduce once for each model"
            ) from error

    def _accumulation(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_last() else self._model.no_sync()

    def _keep(self) -> None:
        if self._is_last():
            self._require_gradients(self._reduced)
            return
        node = take(self._parameters)
        self._require_gradients(node)
        self._counter.push(node)

    def _clear(self) -> None:
        self._counter.clear()
        self._reduced.clear()

    def _reduce(self, bucket: Any) -> Future[Tensor]:
        """Reduce a bucket of the last micro-batch's gradients: DistributedDataParallel's hook."""
        if not self._is_last():
            raise UsageError(
                "a backward pass outside of the loop over fold(): with the canonical all-reduce "
                "every micro-batch has to come from fold()"
            )
        parameters = bucket.parameters()
        if not self._reduced.isdisjoint(parameters):
            raise UsageError(
                f"a second backward pass in micro-batch {self._shard}: with the canonical "
                "all-reduce each micro-batch has one; add its losses, and call backward() on the "
                "sum"
            )
        self._reduced.update(parameters)
        self._counter.complete(parameters, views(bucket.buffer(), parameters))
        return self._exchange(bucket.buffer())


def exchange_of(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    scale: float,
    symmetric_memory: bool | None = None,
    facts: Mapping[str, object] | None = None,
) -> Exchange:
    """Return a function that starts to sum a buffer over all ranks along the tree, times `scale`.

    `symmetric_memory` is as in `canonical_all_reduce`, which raises the same errors. All ranks must
    have the same `facts`.
    """
    requirements.require_deterministic()
    asked = {**(facts or {}), "symmetric_memory": symmetric_memory}
    around = {**requirements.switches(), **requirements.surroundings(device)}
    requirements.require_same({**asked, **around}, group)
    symmetric = symmetric_memory
    if symmetric is None:
        symmetric = requirements.share_memory(device, group)
    if symmetric and device.type != "cuda":
        raise UsageError(
            f"symmetric_memory=True with a model on {device.type}: only GPUs of one host have it; "
            "leave the argument out"
        )
    if device.type == "cuda" and dist.get_world_size(group) > 1:
        if symmetric:
            from entrenar_py.train.canonical.on_gpus import Symmetric

            return Symmetric(group, scale=scale, device=device, piece_bytes=PIECE_BYTES)
        from entrenar_py.train.canonical.on_gpus import Pipeline

        return Pipeline(group, scale=scale, device=device, piece_bytes=PIECE_BYTES)

    def blocking(buffer: Tensor) -> Future[Tensor]:
        piece_max = PIECE_BYTES // buffer.element_size()
        exchange.all_reduce(buffer, scale=scale, piece_max=piece_max, group=group)
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        future.set_result(buffer)
        return future

    return blocking


def views(buffer: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return each parameter's gradient as a view of a bucket's `buffer`.

    `bucket.gradients()` ignores strides: it would reorder the elements of channels-last weights.
    """
    views, start = [], buffer.storage_offset()
    for parameter in parameters:
        views.append(buffer.as_strided(parameter.size(), parameter.stride(), start))
        start += parameter.numel()
    return views


def _next(coming: Iterator[Batch], shard: int, shards: Sequence[int]) -> Batch:
    for batch in coming:
        return batch
    raise UsageError(
        f"batches ended before micro-batch {shard}, of {_named(shards)}: every rank "
        f"needs {len(shards)} micro-batches for a step; leave out an incomplete "
        "global batch"
    )


def _begins_anew(loader: DataLoader[Any]) -> bool:
    """Return whether `loader` has no place of its own in its data, from which it would go on."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and type(loader.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    )


def _named(shards: Sequence[int]) -> str:
    step = shards[1] - shards[0] if len(shards) > 1 else 1
    steps = f" in steps of {step}" if step > 1 else ""
    return f"this rank's {shards[0]} to {shards[-1]}{steps}"
