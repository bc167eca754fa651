"""Cuts the layers of a model of transformers over ranks, by the plan in its own configuration.

The plan names layers that are cut by columns (their outputs) or by rows (their inputs). Adapters of
peft are cut along: by columns A is whole and B is cut, by rows A is cut and B is whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from entrenar_py.errors import UsageError

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"  # a layer between two that are cut, such as a head's norm


@dataclass(frozen=True)
class Plan:
    """The layers of `decoder` to cut, by name: `colwise` or `rowwise`."""

    decoder: nn.Module
    styles: dict[str, str]

    @property
    def regions(self) -> list[str]:
        """The modules within which ranks have different things, by name: attentions and MLPs."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.styles))


def plan_of(module: nn.Module, strategy: str) -> Plan:
    """Return how `module` can be cut. Raises UsageError if its configuration has no usable plan."""
    decoder = decoder_of(module)
    named = type(decoder).__name__
    rules = getattr(cast("Any", decoder).config, "base_model_tp_plan", None)
    if not rules:
        raise UsageError(
            f"strategy={strategy}: the configuration of {named} says nothing of how its layers are "
            "cut (base_model_tp_plan); use ddp, ddp_canonical, fsdp or pipeline_parallel"
        )
    styles = dict[str, str]()
    for name, layer in decoder.named_modules():
        for pattern, style in rules.items():
            if not re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                continue
            if style not in (_COLUMNS, _ROWS, _WHOLE) or (
                style != _WHOLE and type(_base(layer)) is not nn.Linear
            ):
                raise UsageError(
                    f"strategy={strategy}: {named} has {name} cut by {style}, a "
                    f"{type(_base(layer)).__name__}; only linear layers cut by {_COLUMNS} or "
                    f"{_ROWS} are; use ddp, ddp_canonical, fsdp or pipeline_parallel"
                )
            if style != _WHOLE:
                styles[name] = style
    return Plan(decoder, styles)


def decoder_of(module: nn.Module) -> nn.Module:
    """Return the model below peft's wrapper and below the head."""
    base = cast("Any", module)
    base = base.get_base_model() if hasattr(base, "peft_config") else base
    found: nn.Module = base.base_model
    return found


def require_even(plan: Plan, strategy: str, world_size: int) -> None:
    """Raise UsageError unless `world_size` ranks can share heads and layers evenly."""
    config = cast("Any", plan.decoder).config
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(config, key, None) or 0) % world_size:
            raise UsageError(
                f"strategy={strategy} with {world_size} ranks: the model has {key}={number}; use a "
                "number of ranks that divides it"
            )
    for name, style in plan.styles.items():
        weight = cast("Tensor", _base(plan.decoder.get_submodule(name)).weight)
        size = weight.shape[0 if style == _COLUMNS else 1]
        if size % world_size:
            raise UsageError(
                f"strategy={strategy} with {world_size} ranks: {name} has {size} "
                f"{'outputs' if style == _COLUMNS else 'inputs'}; use a number of ranks that "
                "divides it"
            )


def require_no_dropout(module: nn.Module, strategy: str) -> None:
    """Raise UsageError if the model drops anything itself: ranks would drop other things.

    What peft's adapters drop is drawn for the whole layer.
    """
    config = cast("Any", module).config
    rates = {key: value for key, value in config.to_dict().items() if _is_rate(key, value)}
    for key, value in rates.items():
        raise UsageError(
            f"strategy={strategy}: the model has {key}={value} in config.json, which ranks can't "
            "draw alike; set it to 0, or use ddp, ddp_canonical, fsdp or pipeline_parallel"
        )


def _is_rate(key: str, value: object) -> bool:
    is_dropout = ("drop" in key) and not key.startswith("classifier")
    return is_dropout and isinstance(value, float) and value > 0


def cut(plan: Plan, mesh: DeviceMesh, *, outside: Placement) -> None:
    """Cut the layers of `plan`, in place.

    Between the regions, hidden states [n, t, d] lie as `outside` says: whole, or cut by t.
    """
    for name in plan.regions:
        region = plan.decoder.get_submodule(name)
        region.register_forward_pre_hook(_Entrance(mesh, outside), with_kwargs=True)
    for name, style in plan.styles.items():
        layer = cast("Any", plan.decoder.get_submodule(name))
        styles: dict[str, ParallelStyle] = {}
        first = "base_layer" if layer is not _base(layer) else ""
        if style == _COLUMNS:
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
    """Apply each style; what was frozen stays so, though styles make new parameters."""
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    for name, style in styles.items():
        parallelize_module(layer.get_submodule(name) if name else layer, mesh, style)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)


def complete_gradients(module: nn.Module) -> None:
    """Let the gradients of whole DTensors be added over ranks, where each has a term.

    Call it once the model is on its device: it would lose the hooks on its way.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            parameter.register_hook(_complete)  # type: ignore[no-untyped-call]


def _complete(gradient: DTensor) -> DTensor:
    """Return a gradient whose terms, if ranks have one each, are added."""
    if not gradient.placements[0].is_partial():
        return gradient
    return gradient.redistribute(placements=[Replicate()])


def terms(
    plan: Plan, module: nn.Module, *, in_blocks: nn.ModuleList | None
) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters of whose gradient each rank has a term.

    They are whole, and what they compute is cut: within regions, and with `in_blocks` everywhere
    in these blocks.
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


def _base(layer: nn.Module) -> nn.Module:
    """Return the layer below peft's adapter, or the layer itself."""
    return cast("nn.Module", getattr(layer, "base_layer", layer))


def _adapters(layer: nn.Module) -> list[str]:
    return list(cast("Any", layer).lora_A) if hasattr(layer, "lora_A") else []


class _Entrance:
    """A region's hook: makes its first tensor a DTensor that all ranks have whole."""

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
    """Keeps a layer whole on all ranks, its parameters as DTensors, as its inputs are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class _Drop(nn.Module):
    """Dropout of an adapter's input: the mask is that of the whole input, the same on all ranks."""

    def __init__(self, rate: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self._rate, self._mesh = rate, mesh

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, whole as a DTensor or a part of its last dim, with elements dropped."""
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
    """Return the whole sequence of which each rank has a part, `hidden`."""
    held = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    return held.redistribute(placements=[Replicate()]).to_local()
