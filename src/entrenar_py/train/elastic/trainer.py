"""The loop of elastic training: a step is committed by all ranks or by none."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.canonical import requirements
from entrenar_py.train.canonical.reducer import Counter, take
from entrenar_py.train.elastic.exchange import Exchange, Sum, Wait
from entrenar_py.train.elastic.launcher import seat_of_launcher
from entrenar_py.train.elastic.membership import (
    EndedError,
    Generation,
    InterruptedGenerationError,
    Membership,
)
from entrenar_py.train.elastic.transfer import broadcast

Batch = TypeVar("Batch")

# Large enough to hide latency, small enough for the backward pass to go on beside it.
_BUCKET_BYTES = 25 << 20


class ElasticTrainer:
    """The result of `entrenar_py.elastic`; its docstring shows how to use it.

    `step` counts committed steps. `rank`, `world_size` and `shards`, the global indices of this
    rank's micro-batches, change when ranks die or join.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int,
        schedulers: Sequence[Any],
        state: Sequence[Any],
        first_step: int,
        seed: int,
        deadline_s: float,
    ) -> None:
        requirements.require_deterministic()
        self._parameters = requirements.require_parameters(model)
        device = next(iter(self._parameters)).device
        if device.type != "cpu":
            raise UsageError(
                f"the model is on {device}: elastic training works on the CPU; on GPUs use "
                "canonical_all_reduce, and restart from a checkpoint"
            )
        seat = seat_of_launcher()
        requirements.require_micro_batches(micro_batches)
        if seat.num_seats > micro_batches:
            raise UsageError(
                f"micro_batches={micro_batches} with {seat.num_seats} ranks: every rank needs a "
                "micro-batch; start fewer ranks, or cut the global batch into more micro-batches"
            )
        self._model, self._optimizer = model, optimizer
        self._schedulers, self._state = list(schedulers), list(state)
        self._micro_batches, self._seed, self._deadline_s = micro_batches, seed, deadline_s
        self._switches = requirements.switches()
        facts = {
            "micro_batches": micro_batches,
            "seed": seed,
            "the shapes of the model's parameters": _fingerprint(model),
            **self._switches,
            **requirements.surroundings(device),
        }
        self._members = Membership(
            seat.store, seat=seat.seat, num_seats=seat.num_seats, facts=facts
        )
        self.step = first_step
        self._shard: int | None = None  # the current micro-batch
        self._reduced = False  # whether `.grad` is the mean over all micro-batches
        self._open = False  # between `steps` and `commit`
        self._trained = False  # whether this process has the state of the run
        self._abandoned: list[tuple[object, list[Sum]]] = []
        self._buckets: _Buckets | None = None
        self._counter = Counter()
        self._hook()
        self._regroup()

    @property
    def shard(self) -> int:
        """The global index of the current micro-batch.

        Raises UsageError outside of a loop over `fold`.
        """
        if self._shard is None:
            raise UsageError("trainer.shard outside of the loop over fold(): read it inside of it")
        return self._shard

    def steps(self, total: int) -> Iterator[int]:
        """Yield the index of the next step until `total` steps are committed by all ranks.

        A step that nobody committed is yielded again. Raises LeftBehindError if the others have
        gone on without this process.
        """
        while True:
            if self.step >= total:
                if self._members.finish():
                    return
                self._regroup()
            elif self._members.pauses(self.step):
                self._members.interrupt("newcomers join")
                self._regroup()
            else:
                self._open = True
                yield self.step
                if self._open:
                    raise UsageError(
                        f"step {self.step} was not committed: call trainer.commit() at the end of "
                        "the loop over steps()"
                    )

    def fold(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches of `batches`. Run forward and backward on each.

        Drops all gradients first. After the loop, each `.grad` is the mean over all micro-batches
        of all ranks, or None if the step can't be committed. Raises UsageError if `batches` doesn't
        have an item for each micro-batch of the global batch, if a micro-batch made no gradient for
        a parameter, or if a setting in `requirements.switches` changed.
        """
        requirements.require_unchanged(self._switches)
        if len(batches) != self._micro_batches:
            raise UsageError(
                f"fold() got {len(batches)} micro-batches: it needs all {self._micro_batches} of "
                "the step, and reads only those of this rank"
            )
        if not self._open:
            raise UsageError("fold() outside of the loop over steps()")
        take(self._parameters)
        self._reduced = False
        self._counter = Counter(self.shards.start)
        self._buckets.clear()
        try:
            for shard in self.shards:
                if self._members.interrupted:
                    return
                self._shard = shard
                torch.manual_seed(_seed_of(self._seed, self.step, shard))
                yield batches[shard]
                self._keep(shard)
            self._shard = None
            self._buckets.finish(self._wait)
            self._reduced = True
        except InterruptedGenerationError:
            take(self._parameters)
        finally:
            self._shard = None
            self._counter.clear()

    def commit(self) -> bool:
        """Step the optimizer and the schedulers, and return True, if `.grad` is the mean.

        Otherwise form a new group with the ranks that are left, and return False: `steps` yields
        the step again.
        """
        if not self._open:
            raise UsageError("commit() outside of the loop over steps()")
        self._open = False
        if not self._reduced:
            if not self._members.interrupted:
                raise UsageError(
                    f"step {self.step} has no gradients: run the loop over fold() to its end "
                    "before commit()"
                )
            self._regroup()
            return False
        self._reduced = False
        self._optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self.step += 1
        return True

    # --- the gradients of a step ------------------------------------------------------------------

    def _hook(self) -> None:
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._made)

    def _made(self, parameter: Tensor) -> None:
        """Note that the backward pass has made the gradient of `parameter`."""
        if self._shard is None or self._shard != self.shards[-1] or self._members.interrupted:
            return
        try:
            self._buckets.add(parameter, self._counter)
        except _ConnectionLostError as error:
            self._members.interrupt(str(error))

    def _keep(self, shard: int) -> None:
        """Check that `shard` has every gradient, and keep them unless it is the last shard."""
        if self._members.interrupted:
            raise InterruptedGenerationError
        last = shard == self.shards[-1]
        node = {} if last else take(self._parameters)
        missing = self._buckets.missing() if last else self._parameters.keys() - node.keys()
        if missing:
            names = sorted(self._parameters[one] for one in missing)
            raise UsageError(
                f"micro-batch {shard}, of this rank's {self.shards.start} to "
                f"{self.shards.stop - 1}, made no gradient for {names[0]} ({len(names)} of "
                f"{len(self._parameters)} parameters): run its backward pass inside the loop over "
                "fold(), and let it use every parameter"
            )
        if not last:
            self._counter.push(node)

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raises InterruptedGenerationError if it can't end."""
        self._members.wait(
            work.is_completed, deadline_s=self._deadline_s, what="an exchange between ranks"
        )
        try:
            work.wait()
        except RuntimeError as error:
            self._members.interrupt(f"an exchange between ranks failed: {error}")
            raise InterruptedGenerationError from error

    # --- another set of ranks ---------------------------------------------------------------------

    def _regroup(self) -> None:
        """Form a group with all who are there, which have the state of the most advanced one."""
        self._abandon()
        while True:
            try:
                generation = self._members.agree(
                    self.step, trained=self._trained, deadline_s=self._deadline_s
                )
                group = self._connect(generation)
                if generation.behind:
                    self._bring_up(generation, group)
            except InterruptedGenerationError:
                continue
            except EndedError:
                print("entrenar_py.elastic: the run ended before this rank joined", file=sys.stderr)
                raise SystemExit(0) from None
            break
        self._trained = True
        self.rank, self.world_size = self._rank_in(generation), len(generation.members)
        self._group = group
        self._exchange = Exchange(
            group,
            rank=self.rank,
            world_size=self.world_size,
            micro_batches=self._micro_batches,
        )
        self.shards = self._exchange.shards
        self._buckets = _Buckets(list(self._parameters), self._exchange)

    def _rank_in(self, generation: Generation) -> int:
        return generation.members.index((self._members.seat, self._members.incarnation))

    def _connect(self, generation: Generation) -> dist.ProcessGroup | None:
        """Return a new process group of the generation's members, or None for a single one.

        It is made in a thread, since a member that ends meanwhile would make it wait in vain.
        """
        world_size = len(generation.members)
        if world_size == 1:
            return None
        store = dist.PrefixStore(f"group/{generation.number}", self._members.roll.store.clone())
        rank, timeout = self._rank_in(generation), timedelta(seconds=2 * self._deadline_s)
        made: list[dist.ProcessGroup | Exception] = []

        def connect() -> None:
            try:
                made.append(dist.ProcessGroupGloo(store, rank, world_size, timeout))
            except RuntimeError as error:
                made.append(error)

        threading.Thread(target=connect, name="entrenar-elastic-connect", daemon=True).start()
        self._members.wait(lambda: bool(made), deadline_s=self._deadline_s, what="connecting")
        if isinstance(made[0], Exception):
            self._members.interrupt(f"a rank could not connect: {made[0]}")
            raise InterruptedGenerationError from made[0]
        return made[0]

    def _abandon(self) -> None:
        """Keep the memory of exchanges that can't end until they time out: they may still write."""
        self._abandoned = [one for one in self._abandoned if not all(s.over for s in one[1])]
        if self._buckets is not None:
            self._abandoned.append((self._group, self._buckets.sums))
            take(self._parameters)

    def _bring_up(self, generation: Generation, group: dist.ProcessGroup | None) -> None:
        """Copy the state of rank `source` to the ranks that are behind."""
        assert group is not None
        rank = self._rank_in(generation)
        states = [self._optimizer, *self._schedulers, *self._state]
        held = None
        if rank == generation.source:
            held = (self.step, self._tensors(), [one.state_dict() for one in states])
        sent = broadcast(held, group, source=generation.source, wait=self._wait)
        if rank not in generation.behind:
            return
        # All of it is here: nothing can interrupt the rest, and no rank has half of a state.
        self.step, tensors, dicts = sent
        for ours, theirs in zip(self._tensors(), tensors, strict=True):
            ours.copy_(theirs)
        for one, state in zip(states, dicts, strict=True):
            one.load_state_dict(state)

    def _tensors(self) -> list[Tensor]:
        return [one.detach() for one in (*self._model.parameters(), *self._model.buffers())]


class _ConnectionLostError(Exception):
    """Raised when a sum could not be started."""


class _Buckets:
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
        """Note that `parameter` has its gradient. Raises _ConnectionLostError."""
        for missing in self._missing:
            missing.discard(parameter)
        while len(self.sums) < len(self._buckets) and not self._missing[len(self.sums)]:
            rows = self._rows(self._buckets[len(self.sums)], counter)
            try:
                self.sums.append(self._exchange.start(rows))
            except RuntimeError as error:
                raise _ConnectionLostError(f"ranks could not exchange gradients: {error}") from error

    def finish(self, wait: Wait) -> None:
        """Wait for all sums, and make each `.grad` the mean."""
        for one in self.sums:
            one.gather(wait)
        for one, bucket in zip(self.sums, self._buckets, strict=True):
            one.wait(wait)
            for parameter, view in zip(bucket, _views(one.mean, bucket), strict=True):
                parameter.grad = view

    def _rows(self, bucket: list[Tensor], counter: Counter) -> Tensor:
        """Take the gradients of `bucket`, completed by `counter`, as a row for each node."""
        length = self._exchange.padded(sum(one.numel() for one in bucket))
        rows = bucket[0].new_zeros(self._exchange.num_rows, length)
        last = list(take(bucket).values())
        for row, gradients in zip(rows, [*counter.complete(bucket, last), last], strict=True):
            for view, gradient in zip(_views(row, bucket), gradients, strict=True):
                view.copy_(gradient)
        return rows


def _cut(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of parameters of one dtype, of up to `_BUCKET_BYTES` unless it has only one."""
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        bucket: list[Tensor] = []
        for one in parameters:
            if one.dtype != dtype:
                continue
            if bucket and sum(map(_num_bytes, [*bucket, one])) > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(one)
        yield bucket


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _views(row: Tensor, bucket: list[Tensor]) -> list[Tensor]:
    """Return each parameter's part of `row`, with the parameter's shape and strides."""
    views, start = [], row.storage_offset()
    for one in bucket:
        views.append(row.as_strided(one.size(), one.stride(), start))
        start += one.numel()
    return views


def _fingerprint(model: nn.Module) -> str:
    shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _seed_of(seed: int, step: int, shard: int) -> int:
    """Return the seed of a micro-batch's randomness: any two have unrelated ones."""
    digest = hashlib.sha256(f"{seed},{step},{shard}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
