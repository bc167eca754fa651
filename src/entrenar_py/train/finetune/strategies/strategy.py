"""Common parts of all strategies: shards and their losses, how ranks hold a model, how they agree.

A rank holds whole trainable tensors, or a piece of each as a DTensor, or all of some tensors.
Batches, shards and random numbers are the same as in the reference trainer: they follow from the
plan alone. A model runs on a few tokens before and after it is cut, and must give the same logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from entrenar_py.shared.errors import CheckpointError, ContractError, EntrenarError, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.finetune.strategies.optimizers import (
    Optimizer,
    TensorAdamW,
    gradient_of,
    local,
)
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.settings import BY_SHARDS
from entrenar_py.train.model.workload import Finetuning

Result = TypeVar("Result")
_KINDS = (CheckpointError, UsageError)  # raised again with their type; others as EntrenarError


def together(action: Callable[[], Result]) -> Result:
    """Return the result of `action` on this rank, once all ranks have theirs.

    If `action` raises an error of this package or an OSError on some ranks, every rank raises the
    error of the lowest of them. A collective inside `action` must come before anything that can
    fail on some ranks alone, or after an agreement on it: a rank that failed waits here, and never
    reaches that collective.
    """
    problem: tuple[str, object] | None = None
    try:
        result = action()
    except ContractError as error:
        problem = ContractError.__name__, error.problems
    except (EntrenarError, OSError) as error:
        kinds = [kind.__name__ for kind in _KINDS if isinstance(error, kind)]
        problem = (kinds or [EntrenarError.__name__])[0], str(error)
    everyone: list[tuple[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            raise _as_error(*theirs, rank)
    return result


def _as_error(kind: str, message: object, rank: int) -> EntrenarError:
    if isinstance(message, list):
        return ContractError(message)
    text = str(message) if rank == 0 else f"rank {rank}: {message}"
    kinds = {one.__name__: one for one in _KINDS}
    return kinds.get(kind, EntrenarError)(text)


Objective = Callable[..., Tensor]  # from the tensors of a batch to the summed loss, 0-d


@dataclass(frozen=True, kw_only=True)
class Step:
    """Step `number`: the ids of each logical shard, which may be empty, and the `weight` of all."""

    number: int
    epoch: int
    shards: tuple[sharding.Ids, ...]
    weight: float

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(map(len, self.shards))


class Shards:
    """Cuts a run's batches into logical shards, and computes losses of shards on `device`."""

    def __init__(self, workload: Finetuning, plan: TrainingPlan, device: torch.device) -> None:
        self.workload, self.plan, self.device = workload, plan, device
        self._visit: tuple[int, sharding.Ids] | None = None
        self._prepared: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def step(self, number: int, position: sharding.Position) -> Step:
        """Return the step at `position`. Waits for data that doesn't exist yet."""
        plan = self.plan
        if self._visit is None or self._visit[0] != position.epoch:
            rng = plan.rng("order", position.epoch)
            self._visit = position.epoch, sharding.order(plan.num_samples, rng)
        ids = sharding.batch(self._visit[1], position, plan.batch_size)
        self.workload.require(ids)  # all ranks wait here, and not in a collective
        return Step(
            number=number,
            epoch=position.epoch,
            shards=tuple(sharding.cut(ids, plan.num_shards)),
            weight=self.workload.weight(ids),
        )

    def share(self, rank: int, world_size: int) -> range:
        """Return the consecutive shards of `rank`. Each rank gets S // W of them, or one more."""
        shards = sharding.cut(range(self.plan.num_shards), world_size)[rank]
        return range(shards[0], shards[-1] + 1)

    def loss(self, objective: Objective, step: Step, shard: int) -> Tensor:
        """Return the summed loss of `shard`, computed by `objective`.

        A shard without samples has a loss of zero: the loss of another sample, times zero.
        """
        ids = step.shards[shard]
        self.workload.seed(self.drop(step, shard))
        batch = self.batch(step, shard)
        loss = self.workload.loss(lambda given: objective(*given), batch, self.device)
        return loss if ids else loss * 0

    def batch(self, step: Step, shard: int) -> tuple[Tensor, ...]:
        """Return the tensors of `shard` on the CPU; if it is empty, those of another sample."""
        prepared = self._prepared.pop((step.number, shard), None)
        return prepared or self.workload.batch(step.shards[shard] or step.shards[0][:1])

    def prepare(self, step: Step, shard: int) -> None:
        """Make the tensors of `shard` now, while a device computes."""
        self._prepared = {(step.number, shard): self.batch(step, shard)}

    def drop(self, step: Step, shard: int, *place: int) -> Dropout:
        """Return the source of the random numbers in `shard`, the reference trainer's.

        A `place` in the model, such as a stage, gets its own stream.
        """
        return Dropout(0.0, self.plan.rng("dropout", step.number, shard, *place))

    def zeros(self) -> Tensor:
        """Return a loss of zero for each shard, float64 [num_shards], on the device."""
        return torch.zeros(self.plan.num_shards, dtype=torch.float64, device=self.device)

    def padded(self, rank: int, world_size: int) -> Iterator[int | None]:
        """Yield the shards of `rank`, then None for each shard that other ranks have in addition.

        So all ranks call the forward pass the same number of times, which a collective requires.
        """
        share = self.share(rank, world_size)
        yield from share
        longest = -(-self.plan.num_shards // world_size)
        yield from [None] * (longest - len(share))


Arrays = dict[str, NDArray[np.float32]]
ValueOf = Callable[[nn.Parameter], Tensor]  # a parameter itself, or its moment or gradient


class Regrouped(Exception):
    """Raised when a step can't be made, since other ranks train together from now on."""


class Strategy(ABC):
    """A model that all ranks train together.

    `trainable` has this rank's trainable parameters, by their names in the workload. If
    `shares_rows`, each rank computes different rows; otherwise all ranks compute the same rows
    together.
    """

    trainable: dict[str, nn.Parameter]
    device: torch.device
    shares_rows = False

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device, self.plan = shards, shards.device, shards.plan

    @property
    def is_ahead(self) -> bool:
        """True if `compute` only starts its work, on a device that does it in order.

        Then the loop starts the next step before it records the last one.
        """
        return False

    def prepare(self, step: Step) -> None:  # noqa: B027  (a hook)
        """Prepare a step that comes next, while the device computes; by default do nothing."""

    @abstractmethod
    def compute(self, step: Step) -> Tensor:
        """Leave the gradient of the step's loss, a sum divided by `step.weight`, in every `.grad`.

        Returns float64 [num_shards]: the summed losses of the shards with a loss on this rank, and
        zeros for all others. The sum over ranks is each shard's loss.
        """

    def ranks(self) -> list[int]:
        """Return the rank that computes each shard; 0 if all compute it together."""
        if not self.shares_rows:
            return [0] * self.plan.num_shards
        size = dist.get_world_size()
        return [rank for rank in range(size) for _ in self._shards.share(rank, size)]

    @abstractmethod
    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Return the logits of rows on this rank; None if another rank has them.

        Both arguments are int64 [n, t] on the device; logits are [n, t, vocabulary] or [n,
        classes]. All ranks must call it the same number of times, in evaluation mode and without
        gradients.
        """

    def join(self, loop: Any, step: int) -> None:  # noqa: B027  (a hook)
        """Join the others with the state of `loop` after `step` steps, before the first one."""

    def total(self, computed: Tensor, own: Tensor) -> Tensor:
        """Return the sums over ranks of the result of `compute`, and of other numbers."""
        totals = torch.cat([computed, own])
        dist.all_reduce(totals)
        return totals

    def skip(self) -> None:  # noqa: B027  (a hook)
        """Give up the step of the last `compute`."""

    def optimizer(self) -> Optimizer:
        """Return a new optimizer of the trainable tensors."""
        return TensorAdamW(self.plan, self.trainable)

    def squares(self) -> Tensor:
        """Return the sum of squares of the whole gradient, 0-d float64, the same on all ranks.

        The squares of pieces are added over ranks. The squares of copies count once.
        """
        gradients = [local(gradient_of(parameter)) for parameter in self.trainable.values()]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        squares = torch.stack([*norms]).square()
        pieces = (squares * self._are_cut).sum()
        dist.all_reduce(pieces)
        return pieces + (squares * (1 - self._are_cut)).sum()

    @cached_property
    def _are_cut(self) -> Tensor:
        """1 for each trainable tensor that is cut, 0 for others, float64 on the device."""
        are_cut = [float(self._is_cut(name)) for name in self.trainable]
        return torch.tensor(are_cut, dtype=torch.float64, device=self.device)

    def first_bad(self) -> str | None:
        """Return the name of a tensor with a non-finite gradient, or None. Equal on all ranks."""
        own = [
            name
            for name, parameter in self.trainable.items()
            if not local(gradient_of(parameter)).isfinite().all()
        ]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        return next((name for names in everyone for name in names), None)

    def whole(self, value_of: ValueOf) -> Arrays:
        """Return the whole `value_of` each parameter, by name, on rank 0; nothing on other ranks.

        All ranks must call it.
        """
        arrays: Arrays = {}
        for name, parameter in self.trainable.items():
            whole = self._gathered(name, value_of(parameter).detach())
            if dist.get_rank() == 0:
                arrays[name] = whole.float().cpu().numpy().copy()
        return arrays

    def spread(
        self, arrays: Mapping[str, NDArray[np.float32]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return this rank's part of each of `arrays`, in the layout of its own parameters.

        Only rank 0 needs `arrays`. `shapes` has the names of all of them. All ranks must call it.
        """
        parts: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            whole = torch.empty(shape, device=self.device)
            if dist.get_rank() == 0:
                whole.copy_(torch.from_numpy(arrays[name]))
            dist.broadcast(whole, 0)
            if (parameter := self.trainable.get(name)) is not None:
                parts[name] = self._part(name, whole, parameter)
        return parts

    # How a trainable tensor is cut. Here pieces are DTensors, or there are none.

    def _is_cut(self, name: str) -> bool:
        """Return whether ranks have pieces of a tensor, rather than copies."""
        tensor = self.trainable[name]
        return isinstance(tensor, DTensor) and tensor.placements[0].is_shard()

    def _gathered(self, name: str, value: Tensor) -> Tensor:
        """Return a whole tensor; `value` is this rank's part of it."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _part(self, name: str, whole: Tensor, like: nn.Parameter) -> Tensor:
        """Return this rank's part of the tensor `whole`."""
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def trainable_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of `module`, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


_NUM_TOKENS = 4  # for each rank, in each of two rows
_VOCABULARY = 9  # tokens that every model has
# Allowed differences, relative to the norm of all logits: a lower limit, a multiple of the model's
# own rounding error, and an upper limit. A multiple is needed because partial sums of a cut product
# are rounded separately, and a GPU has different kernels than the CPU. Unrelated logits differ by
# 1.4, so the upper limit must be lower.
_LEAST, _TIMES, _MOST = 1e-3, 4, 0.5
_FILL = 0.01


@contextmanager
def filled(module: nn.Module) -> Iterator[None]:
    """Fill trainable tensors of zeros while a model is probed: B = 0 would hide an adapter's A."""
    empty = [name for name, p in module.named_parameters() if p.requires_grad and not p.any()]
    try:
        _fill(module, empty, _FILL)
        yield
    finally:
        _fill(module, empty, 0.0)


def _fill(module: nn.Module, names: list[str], value: float) -> None:
    """Set the parameters `names` to `value`; a cut replaces parameters, and removes some names."""
    parameters = dict(module.named_parameters())
    for name in names:
        if name in parameters:
            local(parameters[name].detach()).fill_(value)


def probe_tokens() -> Tensor:
    """Return two rows of tokens, int64 [2, t], where t is a multiple of the number of ranks."""
    return (1 + torch.arange(2 * _NUM_TOKENS * dist.get_world_size()) % _VOCABULARY).view(2, -1)


@dataclass(frozen=True)
class Reference:
    """A whole model's logits for a few tokens, which must stay the same once the model is cut.

    `logits` are float32, on the CPU. `rounding` is how much they change, relative to their norm, if
    the result of every matrix product changes by the rounding error of its dtype.
    """

    logits: Tensor
    rounding: float


def reference_of(workload: Finetuning, device: torch.device) -> Reference:
    """Return the logits of the whole model of `workload`, on `device`, for a few tokens."""
    exact = probe_logits(workload, device)
    draw = torch.Generator(device).manual_seed(0)
    with _rounded(workload.module, draw):
        other = probe_logits(workload, device)
    return Reference(exact, _difference(exact, other))


@contextmanager
def _rounded(module: nn.Module, draw: torch.Generator) -> Iterator[None]:
    def off(output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output  # not numbers, such as the experts that a router chose
        noise = torch.rand(output.shape, generator=draw, device=output.device) * 2 - 1
        return output + (output * noise * torch.finfo(output.dtype).eps).to(output.dtype)

    hooks = [
        layer.register_forward_hook(lambda _, __, output: tree_map(off, output))
        for layer in module.modules()
        if any(tensor.dim() > 1 for tensor in layer.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def probe_logits(workload: Finetuning, device: torch.device) -> Tensor:
    """Return a model's logits for a few tokens, in evaluation mode: float32, on the CPU."""
    module: Any = workload.module
    with in_evaluation(module), workload.formats(device):
        found: Tensor = module(input_ids=probe_tokens().to(device), use_cache=False).logits
    return found.float().cpu()


def require_same_logits(before: Reference, after: Tensor, strategy: str, kind: str) -> None:
    """Raise UsageError unless the logits `after` a cut equal those `before`, up to rounding.

    `kind` is the name of the model's class.
    """
    difference = _difference(before.logits, after)
    allowed = min(max(_LEAST, _TIMES * before.rounding), _MOST)
    if not difference <= allowed:
        raise UsageError(
            f"strategy={strategy}: {kind} computes different logits once it is cut (logits "
            f"differ by {difference:.2g} of their norm, and rounding makes at most "
            f"{allowed:.2g}); use {' or '.join(BY_SHARDS)}"
        )


def _difference(before: Tensor, after: Tensor) -> float:
    return float((before - after).norm() / before.norm())
