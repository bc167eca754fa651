"""Strategies `tensor_parallel` and `sequence_parallel`: ranks share each layer, and all shards.

With `sequence_parallel`, hidden states between attentions and MLPs are cut, too: there, each rank
has a part of every sequence. All ranks compute the loss of all shards.

Layers are cut by the model's own plan (`train.model.blocks`), and peft's adapters with them: in a
layer cut by columns, A is whole and B is cut; in a layer cut by rows, A is cut and B is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.autograd import backward
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from entrenar_py.train.finetune.strategies import strategy
from entrenar_py.train.finetune.strategies.strategy import (
    Shards,
    Step,
    Strategy,
    gradient_of,
    trainable_of,
)
from entrenar_py.train.model import blocks
from entrenar_py.train.model.blocks import COLUMNS, Plan, base_of


def cut(plan: Plan, mesh: DeviceMesh, *, outside: Placement) -> None:
    """Cut the layers of `plan`, in place.

    `outside` is the placement of hidden states [n, t, d] between the regions: whole, or cut by t.
    """
    for name in plan.regions:
        region = plan.decoder.get_submodule(name)
        region.register_forward_pre_hook(_Entrance(mesh, outside), with_kwargs=True)
    for name, style in plan.styles.items():
        layer = cast("Any", plan.decoder.get_submodule(name))
        styles: dict[str, ParallelStyle] = {}
        first = "base_layer" if layer is not base_of(layer) else ""
        if style == COLUMNS:
            styles[first] = ColwiseParallel()
            for adapter in _adapters(layer):
                styles |= {f"lora_A.{adapter}": _Whole(), f"lora_B.{adapter}": ColwiseParallel()}
        else:
            styles[first] = RowwiseParallel(output_layouts=outside)
            for adapter in _adapters(layer):
                styles[f"lora_A.{adapter}"] = RowwiseParallel(output_layouts=outside)
        _apply(layer, mesh, styles)
        for adapter in _adapters(layer):
            drop = layer.lora_dropout[adapter]
            if isinstance(drop, nn.Dropout) and drop.p:
                layer.lora_dropout[adapter] = _Drop(drop.p, mesh)


def _apply(layer: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    """Apply each style. Frozen parameters stay frozen, although styles create new parameters."""
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    for name, style in styles.items():
        parallelize_module(layer.get_submodule(name) if name else layer, mesh, style)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)


def complete_gradients(module: nn.Module) -> None:
    """Register hooks that sum a whole DTensor's gradient over ranks if each rank has only a term.

    Call it once the model is on its device, since moving the model would remove the hooks.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            parameter.register_hook(_complete)  # type: ignore[no-untyped-call]


def _complete(gradient: DTensor) -> DTensor:
    """Return `gradient`; if each rank has only a term of it, return the sum over ranks."""
    if not gradient.placements[0].is_partial():
        return gradient
    return gradient.redistribute(placements=[Replicate()])


def terms(
    plan: Plan, module: nn.Module, *, in_blocks: nn.ModuleList | None
) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters for which each rank computes only a term of the gradient.

    They are whole, but they compute with parts: inside regions, or with `in_blocks` everywhere in
    these blocks.
    """
    scopes = [plan.decoder.get_submodule(name) for name in plan.regions]
    scopes = [in_blocks] if in_blocks is not None else scopes
    own = {p for scope in scopes for p in scope.parameters()}
    planned = {
        p
        for name in plan.styles
        for p in plan.decoder.get_submodule(name).parameters()
        if in_blocks is None
    }
    for parameter in module.parameters():
        is_plain = parameter.requires_grad and not isinstance(parameter, DTensor)
        if is_plain and parameter in own and parameter not in planned:
            yield parameter


# --- the parts of a layer -------------------------------------------------------------------------


def _adapters(layer: nn.Module) -> list[str]:
    return list(cast("Any", layer).lora_A) if hasattr(layer, "lora_A") else []


class _Entrance:
    """A hook of a region: makes its first tensor a DTensor that is whole on all ranks."""

    def __init__(self, mesh: DeviceMesh, outside: Placement) -> None:
        self._mesh, self._outside = mesh, outside

    def __call__(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (self._whole(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": self._whole(named["hidden_states"])}

    def _whole(self, hidden: Tensor) -> Tensor:
        held = DTensor.from_local(hidden, self._mesh, [self._outside], run_check=False)
        return held.redistribute(placements=[Replicate()])


class _Whole(ParallelStyle):
    """Keeps a layer whole on all ranks, with its parameters and inputs as DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class _Drop(nn.Module):
    """Dropout of an adapter's input. The mask is for the whole input, the same on all ranks."""

    def __init__(self, rate: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self._rate, self._mesh = rate, mesh

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements dropped: a whole DTensor, or a part of its last dimension."""
        if not self.training:
            return x
        if isinstance(x, DTensor):
            held = F.dropout(x.to_local(grad_placements=[Replicate()]), self._rate)
            return DTensor.from_local(held, self._mesh, [Replicate()], run_check=False)
        size, rank = self._mesh.size(), self._mesh.get_local_rank()
        whole = F.dropout(torch.ones_like(x).repeat(*[1] * (x.dim() - 1), size), self._rate)
        return x * whole.chunk(size, dim=-1)[rank]


def scattered(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of the sequence in `hidden`, [n, t, d], which all ranks have."""
    held = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return held.redistribute(placements=[Shard(1)]).to_local()


def gathered(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence; `hidden` is this rank's part of it."""
    held = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    return held.redistribute(placements=[Replicate()]).to_local()


class TensorParallel(Strategy):
    """Layers in pieces. Hidden states between them are whole on all ranks."""

    name = "tensor_parallel"

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device = shards, shards.device
        workload, module = shards.workload, shards.workload.module
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        with strategy.filled(module):
            before = strategy.reference_of(workload, next(module.parameters()).device)
            self._terms = self._cut(module, mesh)
            workload.objective.to(self.device)
            complete_gradients(module)
            after = strategy.probe_logits(workload, self.device)
        strategy.require_same_logits(before, after, self.name, type(module).__name__)
        self._objective = cast("Any", workload.objective)
        self.trainable = trainable_of(module)

    def _cut(self, module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
        """Cut the model in place; return the result of `terms`."""
        plan = blocks.plan_of(module)
        cut(plan, mesh, outside=Replicate())
        return list(terms(plan, module, in_blocks=None))

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        self._objective.zero_grad()
        losses = self._shards.zeros()
        for shard in range(len(step.shards)):
            loss = self._shards.loss(self._objective, step, shard)
            losses[shard] = loss.detach()
            backward(loss / step.weight)
        for parameter in self._terms:
            dist.all_reduce(gradient_of(parameter))
        return losses if dist.get_rank() == 0 else losses * 0  # all ranks have the same losses

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Implement `Strategy.logits`."""
        found: Tensor = self._objective.logits(tokens, mask)
        return found if dist.get_rank() == 0 else None  # all ranks have the same logits


class SequenceParallel(TensorParallel):
    """Layers in pieces. Between them, each rank has a part of every sequence."""

    name = "sequence_parallel"

    def _cut(self, module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
        self._shards.workload.fill_up(mesh.size())
        plan = blocks.plan_of(module)
        cut(plan, mesh, outside=Shard(1))
        layers = blocks.of(module)
        layers[0].register_forward_pre_hook(
            lambda _, inputs: (scattered(inputs[0], mesh), *inputs[1:])
        )
        layers[-1].register_forward_hook(lambda *call: gathered(call[2], mesh))
        return list(terms(plan, module, in_blocks=layers))
