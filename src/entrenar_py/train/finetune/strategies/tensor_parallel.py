"""Strategies `tensor_parallel` and `sequence_parallel`: ranks share each layer, and all shards.

With `sequence_parallel`, hidden states between attentions and MLPs are cut, too: there, each rank
has a part of every sequence. All ranks compute the loss of all shards.

Layers are cut by the model's own plan (`train.model.blocks`), and peft's adapters with them: in a
layer cut by columns, A is whole and B is cut; in a layer cut by rows, A is cut and B is whole. A
rank's pieces are plain tensors, and what moves between ranks are operations of the model's forward
pass. So torch can compile blocks, and a step can be recorded. (DTensors would do neither: torch
can't compile them for all lengths, and they add work on the host to each operation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.autograd import backward

from entrenar_py.train.finetune.strategies import strategy, vector
from entrenar_py.train.finetune.strategies.optimizers import Optimizer, gradient_of
from entrenar_py.train.finetune.strategies.strategy import (
    Shards,
    Step,
    Strategy,
    trainable_of,
)
from entrenar_py.train.finetune.strategies.vector import Vector
from entrenar_py.train.model import blocks
from entrenar_py.train.model.blocks import COLUMNS, Plan, base_of

# --- what moves between ranks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The ranks that share the layers: their group's name, their number, and this rank."""

    name: str
    size: int
    rank: int


_TIME = 1  # the dim of hidden states [n, t, d] that is cut between the regions


def _same(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """Return the sum of all ranks' tensors."""
    op = torch.ops._c10d_functional
    result: Tensor = op.wait_tensor(op.all_reduce(x.contiguous(), "sum", name))
    return result


def _join(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """Return all ranks' parts of a sequence, in order."""
    op = torch.ops._c10d_functional
    first = x.transpose(0, _TIME).contiguous()
    joined = op.wait_tensor(op.all_gather_into_tensor(first, size, name))
    result: Tensor = joined.transpose(0, _TIME)
    return result


def _sum_part(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """Return this rank's part of the sequence in the sum of all ranks' tensors."""
    op = torch.ops._c10d_functional
    first = x.transpose(0, _TIME).contiguous()
    part = op.wait_tensor(op.reduce_scatter_tensor(first, "sum", size, name))
    result: Tensor = part.transpose(0, _TIME)
    return result


def _part(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """Return this rank's part of the sequence."""
    return x.chunk(size, _TIME)[rank].contiguous()


_MOVES = {"same": _same, "sum": _sum, "join": _join, "sum_part": _sum_part, "part": _part}


class _Moved(torch.autograd.Function):
    """Moves a tensor by one of _MOVES in the forward pass, and its gradient by another.

    The arguments are what torch's compiler can keep in a context: texts and numbers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: str, back: str, name: str, size: int, rank: int
    ) -> Tensor:
        ctx.back, ctx.name, ctx.size, ctx.rank = back, name, size, rank
        return _MOVES[forth](x, name, size, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        moved = _MOVES[ctx.back](gradient, ctx.name, ctx.size, ctx.rank)
        return moved, None, None, None, None, None


def _moved(x: Tensor, forth: str, back: str, group: Group) -> Tensor:
    result: Tensor = _Moved.apply(  # type: ignore[no-untyped-call]
        x, forth, back, group.name, group.size, group.rank
    )
    return result


# --- the parts of a layer -------------------------------------------------------------------------


class _Entrance:
    """A hook of a region: makes its first tensor whole on all ranks."""

    def __init__(self, group: Group, *, is_sequence_cut: bool) -> None:
        self._group, self._is_cut = group, is_sequence_cut

    def __call__(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (self._whole(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": self._whole(named["hidden_states"])}

    def _whole(self, hidden: Tensor) -> Tensor:
        if self._is_cut:
            return _moved(hidden, "join", "sum_part", self._group)
        return _moved(hidden, "same", "sum", self._group)


class _Rows(nn.Linear):
    """A layer with a part of the inputs on each rank: products are added over ranks."""

    group: Group
    is_sequence_cut: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' products, [n, t, d], whole or a part of each sequence."""
        product = F.linear(x, self.weight)
        if self.is_sequence_cut:
            total = _moved(product, "sum_part", "join", self.group)
        else:
            total = _moved(product, "sum", "same", self.group)
        return total if self.bias is None else total + self.bias.to(total.dtype)


class _Drop(nn.Module):
    """Dropout of the part of an adapter's input that is on this rank.

    The mask is drawn for the whole input, the same on all ranks.
    """

    def __init__(self, rate: float, group: Group) -> None:
        super().__init__()
        self._rate, self._group = rate, group

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements dropped, a part of its last dimension."""
        if not self.training:
            return x
        size, rank = self._group.size, self._group.rank
        whole = F.dropout(torch.ones_like(x).repeat(*[1] * (x.dim() - 1), size), self._rate)
        return x * whole.chunk(size, dim=-1)[rank]


def cut(plan: Plan, group: Group, *, is_sequence_cut: bool) -> dict[nn.Parameter, int]:
    """Cut the layers of `plan`, in place; return the new parameters that are cut, with their dims.

    Hidden states [n, t, d] between the regions are whole, or cut by t.
    """
    cuts: dict[nn.Parameter, int] = {}
    for name in plan.regions:
        entrance = _Entrance(group, is_sequence_cut=is_sequence_cut)
        region = plan.decoder.get_submodule(name)
        region.register_forward_pre_hook(entrance, with_kwargs=True)
    for name, style in plan.styles.items():
        layer = cast("Any", plan.decoder.get_submodule(name))
        base = cast("nn.Linear", base_of(layer))
        adapters = list(layer.lora_A) if hasattr(layer, "lora_A") else []
        if style == COLUMNS:
            for linear in (base, *(layer.lora_B[adapter] for adapter in adapters)):
                _cut(linear, "weight", 0, group, cuts)
                if linear.bias is not None:
                    _cut(linear, "bias", 0, group, cuts)
            continue
        for linear in (base, *(layer.lora_A[adapter] for adapter in adapters)):
            _cut(linear, "weight", 1, group, cuts)
            linear.__class__ = _Rows
            linear.group, linear.is_sequence_cut = group, is_sequence_cut
        for adapter in adapters:
            drop = layer.lora_dropout[adapter]
            if isinstance(drop, nn.Dropout) and drop.p:
                layer.lora_dropout[adapter] = _Drop(drop.p, group)
    return cuts


def _cut(
    layer: nn.Module, name: str, dim: int, group: Group, cuts: dict[nn.Parameter, int]
) -> None:
    whole = cast("nn.Parameter", getattr(layer, name))
    piece = whole.detach().chunk(group.size, dim)[group.rank].clone()
    parameter = nn.Parameter(piece, requires_grad=whole.requires_grad)
    setattr(layer, name, parameter)
    cuts[parameter] = dim


def terms(
    plan: Plan,
    cuts: Mapping[nn.Parameter, int],
    *,
    in_blocks: nn.ModuleList | None,
) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters for which each rank computes only a term of the gradient.

    They are whole, but they compute with parts: inside regions, or with `in_blocks` everywhere in
    these blocks. Whole parts of a layer that is cut by rows follow the sum over ranks: without
    `in_blocks` they compute with whole hidden states.
    """
    regions: list[nn.Module] = [plan.decoder.get_submodule(name) for name in plan.regions]
    scopes = regions if in_blocks is None else [in_blocks]
    after = {
        parameter
        for name, style in plan.styles.items()
        if style != COLUMNS and in_blocks is None
        for parameter in plan.decoder.get_submodule(name).parameters()
    }
    inside = {parameter for scope in scopes for parameter in scope.parameters()}
    for parameter in inside - cuts.keys() - after:
        if parameter.requires_grad:
            yield parameter


# --- the strategies -------------------------------------------------------------------------------


class TensorParallel(Strategy):
    """Splits each layer over the ranks. Between layers every rank has the whole hidden states.

    If a rank's pieces are small, they are one vector (`vector`).
    """

    name = "tensor_parallel"
    records = True  # as a vector

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        world = dist.group.WORLD
        assert world is not None, "ranks have joined it"
        self._group = Group(world.group_name, dist.get_world_size(), dist.get_rank())
        workload, module = shards.workload, shards.workload.module
        names = {name for name, _ in module.named_parameters()}
        with strategy.filled(module):
            before = strategy.reference_of(workload, next(module.parameters()).device)
            cuts, completed = self._cut(module)
            workload.objective.to(self.device)
            after = strategy.probe_logits(workload, self.device)
        strategy.require_same_logits(before, after, self.name, type(module).__name__)
        self._objective = cast("Any", workload.objective)
        self.trainable = trainable_of(module)
        cut_names = {name for name, _ in module.named_parameters()}
        assert names == cut_names, "only values are cut"
        self._dims = {n: cuts[p] for n, p in self.trainable.items() if p in cuts}
        self._completed = [n for n, p in self.trainable.items() if p in completed]
        is_small = self.records and vector.is_small(shards, self.trainable)
        self._vector = Vector(shards, self.trainable) if is_small else None

    def _cut(self, module: nn.Module) -> tuple[dict[nn.Parameter, int], set[nn.Parameter]]:
        """Cut the model in place; return the results of `cut` and `terms`."""
        plan = blocks.plan_of(module)
        cuts = cut(plan, self._group, is_sequence_cut=False)
        return cuts, set(terms(plan, cuts, in_blocks=None))

    @property
    def is_ahead(self) -> bool:
        """See `Strategy`."""
        return self._vector is not None and self._vector.is_ahead

    def prepare(self, step: Step) -> None:
        """See `Strategy`."""
        self._shards.prepare(step, 0)

    def optimizer(self) -> Optimizer:
        """See `Strategy`."""
        return super().optimizer() if self._vector is None else self._vector.optimizer

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        losses = self._shards.zeros()
        if self._vector is not None:
            self._compute_vector(self._vector, step, losses)
        else:
            self._objective.zero_grad()
            for shard in range(len(step.shards)):
                loss = self._shards.loss(self._objective, step, shard)
                losses[shard] = loss.detach()
                backward(loss / step.weight)
            for name in self._completed:
                dist.all_reduce(gradient_of(self.trainable[name]))
        # All ranks have the same losses.
        return losses if dist.get_rank() == 0 else losses * 0

    @torch.no_grad()
    def _compute_vector(self, whole: Vector, step: Step, losses: Tensor) -> None:
        whole.gradient.zero_()
        for gradient in whole.gradients(step, range(len(step.shards)), losses):
            whole.gradient.add_(gradient)
        if self._completed:
            parts = [gradient_of(self.trainable[name]) for name in self._completed]
            joined = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(joined)
            pieces = torch.split(joined, [part.numel() for part in parts])
            shaped = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
            torch._foreach_copy_(parts, shaped)
        whole.divide(step)

    def _is_cut(self, name: str) -> bool:
        return name in self._dims

    def _gathered(self, name: str, value: Tensor) -> Tensor:
        if name not in self._dims:
            return value
        pieces = [torch.empty_like(value) for _ in range(self._group.size)]
        dist.all_gather(pieces, value.contiguous())
        return torch.cat(pieces, self._dims[name])

    def _part(self, name: str, whole: Tensor, like: nn.Parameter) -> Tensor:
        if name not in self._dims:
            return whole
        return whole.chunk(self._group.size, self._dims[name])[self._group.rank].contiguous()

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Implement `Strategy.logits`."""
        found: Tensor = self._objective.logits(tokens, mask)
        return found if dist.get_rank() == 0 else None  # all ranks have the same logits


class SequenceParallel(TensorParallel):
    """Layers in pieces. Between them, each rank has a part of every sequence."""

    name = "sequence_parallel"
    records = False  # never tried on GPUs

    def _cut(self, module: nn.Module) -> tuple[dict[nn.Parameter, int], set[nn.Parameter]]:
        self._shards.workload.fill_up(self._group.size)
        plan, layers, group = blocks.plan_of(module), blocks.of(module), self._group
        cuts = cut(plan, group, is_sequence_cut=True)
        layers[0].register_forward_pre_hook(
            lambda _, inputs: (_moved(inputs[0], "part", "join", group), *inputs[1:])
        )
        layers[-1].register_forward_hook(lambda *call: _moved(call[2], "join", "part", group))
        return cuts, set(terms(plan, cuts, in_blocks=layers))
