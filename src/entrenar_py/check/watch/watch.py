"""The watch of a training run in production: weights are identical, finite, and moving.

After every k-th step of the optimizer, each rank sends the digests of its tensors to all ranks, and
`judge` compares them. On a GPU no step waits: rows are sent on a separate stream, and the host
fetches and judges them at the next watched step. With a process group on the CPU (Gloo), the host
waits and fetches them immediately.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from entrenar_py.check.watch.judge import Judge, Piece, Rows, Watched, select_clauses
from entrenar_py.compute import digest
from entrenar_py.compute.digest import ROW_WORDS, DigestTable, places
from entrenar_py.shared import hook_calls
from entrenar_py.shared.errors import UsageError, WatchFinding


class Parameters:
    """The parameters of a module and their `names`, located by their places in the module tree.

    A script may replace the parameters in these places. Raises UsageError for a
    FullyShardedDataParallel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UsageError(
                    f"module {name or 'model'} is a FullyShardedDataParallel: its flat parameters "
                    "have no names, and can't be watched; shard it with fully_shard"
                )
        self._slots: list[tuple[dict[str, torch.nn.Parameter | None], str]] = []
        self.names: list[str] = []
        owners = dict(model.named_modules())
        for name, _ in model.named_parameters():  # lists a tied parameter once
            owner, _, key = name.rpartition(".")
            self._slots.append((owners[owner]._parameters, key))
            self.names.append(name)

    def now(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are now in those places.

        Raises UsageError if one was removed.
        """
        current = [slot.get(key) for slot, key in self._slots]
        for name, parameter in zip(self.names, current, strict=True):
            if parameter is None:
                raise UsageError(
                    f"parameter {name} was removed from the model: call observe() on the model "
                    "that trains"
                )
        return [parameter for parameter in current if parameter is not None]

    def pieces(self) -> list[Piece]:
        """Return this rank's piece of each parameter."""
        return [_piece(name, p) for name, p in zip(self.names, self.now(), strict=True)]


def local(parameter: Tensor) -> Tensor:
    """Return this process's part of `parameter`, which may be a DTensor.

    `to_local` returns the same tensor, but takes longer and is recorded by autograd.
    """
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    assert isinstance(held, Tensor)
    return held


def _piece(name: str, parameter: Tensor) -> Piece:
    shard: tuple[tuple[int, int], ...] = ()
    if isinstance(parameter, DTensor):
        place = parameter.device_mesh.get_coordinate() or ()
        shard = tuple(
            (axis, at)
            for axis, (at, kind) in enumerate(zip(place, parameter.placements, strict=False))
            if not isinstance(kind, Replicate)
        )
    held = local(parameter)
    return Piece(name, shard, tuple(held.shape), str(held.dtype).removeprefix("torch."))


def is_shared() -> bool:
    """Return whether there are several ranks, so that their digests can be compared."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def tell(own: Any) -> list[Any]:
    """Return the objects `own` of all ranks, in the order of ranks.

    All ranks must call this together.
    """
    if not is_shared():
        return [own]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank


class Exchange:
    """The exchange of up to `num_rows` rows per rank, in the process group of all ranks.

    `waits` is true if `send` returns before the rows have arrived. `receive` then waits for them.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._world = dist.get_world_size() if is_shared() else 1
        self._device = _transport(device) if is_shared() else device
        self._own: Tensor | None = None
        if device.type == "cuda" and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.waits = device.type == "cuda" and self._device.type == "cuda"

    def send(self, rows: Tensor) -> None:
        """Start sending `rows`, int64 [rows, words], which must not change before `receive`."""
        if self._own is None:
            shape = (self._num_rows, rows.shape[1])
            self._own = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._all = self._own.new_zeros((self._world, *shape))
            self._here = torch.empty(self._all.shape, dtype=torch.int64, pin_memory=self.waits)
        if not self.waits:
            self._pass(rows)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._pass(rows)
            self._arrived.record(self._stream)

    def _pass(self, rows: Tensor) -> None:
        assert self._own is not None
        self._own[: len(rows)].copy_(rows)
        if self._world > 1:
            dist.all_gather(list(self._all), self._own)
        else:
            self._all[0].copy_(self._own)
        self._here.copy_(self._all, non_blocking=self.waits)

    def has_arrived(self) -> bool:
        """Return whether `receive` would return immediately."""
        return not self.waits or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def receive(self) -> Rows:
        """Return the last rows that every rank sent, int64 [ranks, rows, words].

        If they haven't arrived, the host waits for them.
        """
        if self.waits:
            self._arrived.synchronize()
        return self._here.numpy().copy()


def _transport(device: torch.device) -> torch.device:
    """Return the device from which the process group sends rows that are on `device`.

    Under NCCL that is `device`. Otherwise it is the CPU if the group has a CPU backend, and the
    current GPU if it has none.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if device.type == "cuda" and backends.get("cuda") == "nccl":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


_LOG = logging.getLogger("entrenar_py")
_LIVE = 3  # marks in a row that the tensor should have moved
# A float32 weight w moves if its step is larger than this times |w|. The rates at the end of a
# schedule may be too small for that, and a gradient that has nearly vanished.
_HALF_ULP = 2.0**-24
# Parts of the names of optimizers that divide a gradient by its size. Their steps are smaller than
# the rate where its sign changes.
_NORMALISING, _MARGIN = ("ada", "rmsprop", "lion", "lamb", "muon"), 16


class _Idle(NamedTuple):
    """A tensor that did not move between two watched steps, and its place in the rows."""

    row: int
    gradient: Tensor
    weights: Tensor
    rate: Any  # a number, a tensor, or None for a parameter that is in no group


def _largest(kinds: Sequence[list[Tensor]], device: torch.device) -> Tensor:
    """Return the largest absolute value of each tensor, float32 on `device`, in order."""
    norms = [torch._foreach_norm(some, float("inf")) for some in kinds]
    return torch.cat([torch.stack(norm).float().to(device) for norm in norms])


class Watch:
    """One rank's watch of a `model` without wrappers. All ranks watch the same steps.

    `observe` validates the arguments, and documents them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        contract: str | Path | None,
        on_finding: Callable[[WatchFinding], None] | None,
        patience: int,
        step: int,
    ) -> None:
        self._optimizer = optimizer
        self._every, self._patience, self._step = every, patience, step
        self._clauses = select_clauses(contract)
        self._tell = _stop if on_finding is None else on_finding
        self._parameters = Parameters(model)
        if not self._parameters.names:
            raise UsageError("the model has no parameters to watch; leave every= out")
        self._judge: Judge | None = None
        self._pending: int | None = None  # the step of rows that were sent but not judged yet
        self._table: DigestTable | None = None
        self._places: object = None
        self._asked: tuple[int, ...] | None = None
        hook_calls.leave_steps()
        self._hook = self._optimizer.register_step_post_hook(_AfterStep(self))
        atexit.register(self._leave)

    def watched(self) -> tuple[Watched, ...]:
        """Return for each clause how often it was checked, and what is not checked."""
        if self._judge is None:
            note = "no step was made yet"
            return tuple(Watched(id_, check, 0, 0, note) for check, id_ in self._clauses.items())
        return self._judge.watched()

    def close(self) -> None:
        """Judge the rows that were not judged yet, and stop watching."""
        self._hook.remove()
        atexit.unregister(self._leave)
        self._look()

    def _after_step(self) -> None:
        if self._judge is None:  # so in the first step of every rank, whatever its `every`
            self._open()
        step = self._step
        self._step += 1
        if self._step % self._every:
            return
        self._look()
        parameters = self._parameters.now()
        held = [local(parameter) for parameter in parameters]
        self._follow(held)
        rows = self._rows(held)
        self._mark(rows, parameters)
        self._exchange.send(rows)
        self._pending = step
        if not self._exchange.waits:
            self._look()

    def _look(self) -> None:
        step, self._pending = self._pending, None
        if step is not None:
            assert self._judge is not None
            for finding in self._judge.look(step, self._exchange.receive()):
                self._tell(finding)

    def _follow(self, tensors: Sequence[Tensor]) -> None:
        """Build the digest table again if tensors have moved in memory."""
        now = places(tensors)
        if now == self._places:
            return
        self._places = now
        if self._parameters.pieces() != self._pieces:
            raise UsageError(
                "the shapes, dtypes or shards of the parameters have changed since the first "
                "step: close() this observation and observe() the model again"
            )
        devices = {tensor.device for tensor in tensors}
        on_gpu = len(devices) == 1 and tensors[0].device.type == "cuda"
        self._table = DigestTable(tensors) if on_gpu else None

    def _open(self) -> None:
        """Exchange which pieces each rank has, and log what will not be watched.

        Raises UsageError if the ranks watch with different arguments.
        """
        self._pieces = self._parameters.pieces()
        own = (self._pieces, self._every, self._step, self._patience, dict(self._clauses))
        by_rank = tell(own)
        for rank, other in enumerate(by_rank):
            if other[1:] != own[1:]:
                raise UsageError(
                    "the ranks watch different things (every, step, patience, clauses): rank "
                    f"{rank} {other[1:]}, this rank {own[1:]}; give all ranks the same arguments"
                )
        ranks = [pieces for pieces, *_ in by_rank]
        self._rank = torch.distributed.get_rank() if len(ranks) > 1 else 0
        self._judge = Judge(ranks, self._clauses, self._patience)
        device = local(self._parameters.now()[0]).device
        self._exchange = Exchange(max(map(len, ranks)), device)
        if self._rank == 0:
            for watched in self._judge.watched():
                if watched.note:
                    _LOG.warning("watch: %s (%s): %s", watched.clause, watched.check, watched.note)

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the digest and the flags of each tensor, int64 [tensors, ROW_WORDS]."""
        if self._table is not None:
            return self._table.run()
        roots = [digest.root(digest.header(tensor), digest.memory(tensor)) for tensor in tensors]
        rows = torch.zeros((len(tensors), ROW_WORDS), dtype=torch.int64)
        rows[:, :2] = digest.all_words(roots)
        rows[:, 2] = torch.tensor([not digest.is_finite(tensor) for tensor in tensors])
        return rows

    def _mark(self, rows: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Mark in `rows` the tensors that this step should move and the last watched one didn't."""
        assert self._judge is not None
        idle = self._judge.idle(self._rank)
        if not idle:
            return
        groups = self._optimizer.param_groups
        rates = {p: group.get("lr") for group in groups for p in group["params"]}
        of_kind: dict[object, list[_Idle]] = {}
        for row in idle:
            parameter = parameters[row]
            if not parameter.requires_grad or parameter.grad is None:
                continue
            gradient, weights = local(parameter.grad).detach(), local(parameter).detach()
            if gradient.is_sparse:
                gradient = gradient._values()
            if gradient.numel():
                kind = (gradient.device, gradient.dtype, weights.dtype)
                seen = _Idle(row, gradient, weights, rates.get(parameter))
                of_kind.setdefault(kind, []).append(seen)
        if of_kind:
            tensors = [*chain.from_iterable(of_kind.values())]
            # One launch per dtype, not per tensor, since hundreds of tensors may be idle.
            kinds = of_kind.values()
            gradients = _largest([[seen.gradient for seen in some] for some in kinds], rows.device)
            weights = _largest([[seen.weights for seen in some] for some in kinds], rows.device)
            live = (gradients > 0) & gradients.isfinite()
            live &= self._steps_of(tensors, gradients) > _HALF_ULP * weights
            places = self._places_of(tuple(seen.row for seen in tensors), rows.device)
            rows[:, _LIVE].index_put_((places,), live.to(rows))

    def _steps_of(self, tensors: Sequence[_Idle], gradients: Tensor) -> Tensor:
        """Return how far the optimizer moves a weight of each tensor at least, about.

        A parameter in no group has no rate, and is expected to move.
        """
        rates = [seen.rate for seen in tensors]
        numbers = [1.0 if isinstance(rate, Tensor) else rate for rate in rates]
        steps = torch.tensor([float("inf") if each is None else float(each) for each in numbers])
        if gradients.is_cuda:
            steps = steps.pin_memory().to(gradients.device, non_blocking=True)
        if any(isinstance(rate, Tensor) for rate in rates):
            # A rate on a GPU is not read, since the host would have to wait for it.
            steps = torch.stack(
                [
                    rate.detach().reshape(()).to(step) if isinstance(rate, Tensor) else step
                    for rate, step in zip(rates, steps, strict=True)
                ]
            )
        kinds = " ".join(base.__name__.lower() for base in type(self._optimizer).__mro__)
        if any(name in kinds for name in _NORMALISING):
            return steps / _MARGIN
        return steps * gradients

    def _places_of(self, wanted: tuple[int, ...], device: torch.device) -> Tensor:
        if wanted != self._asked:
            rows = torch.tensor(wanted)
            rows = rows.pin_memory() if device.type == "cuda" else rows
            self._asked, self._index = wanted, rows.to(device, non_blocking=True)
        return self._index

    def _leave(self) -> None:
        # While the process ends, training can't be stopped any more, and nothing may hang.
        if self._pending is not None and self._exchange.has_arrived():
            self._tell = lambda finding: _LOG.error("%s", finding)
            self._look()


def _stop(finding: WatchFinding) -> None:
    raise finding


class _AfterStep:
    """The hook of a watch after an optimizer's step.

    A recorder of the same optimizer recognises it by `watches`, and runs it last.
    """

    watches = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @hook_calls.ours
    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not (torch.compiler.is_compiling() or hook_calls.is_nested(optimizer)):
            self._watch._after_step()
