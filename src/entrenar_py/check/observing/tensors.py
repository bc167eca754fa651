"""torch tensors as a trace stores them, and facts about a model and its optimizers.

Of a DTensor, this rank's part is used. No collective is called: ranks may have diverged, which is
what the checks should detect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from entrenar_py.check.observing import call_sites
from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.compute import digest
from entrenar_py.shared import trace
from entrenar_py.shared.trace.traits import CONSTANTS

DECLARE = 'declare the axes and their sizes, row-major: observe(..., layout={"dp": 2, "tp": 2})'


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, without a copy, as real numbers.

    A sparse tensor is converted to a dense one, which is a copy.
    """
    if not isinstance(tensor, DTensor):
        return in_numbers(tensor.detach())
    with torch.no_grad():
        return in_numbers(tensor.to_local())


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with its own memory and the same placement.

    `DTensor.clone` is not used: it reduces a partial sum, which is a collective.
    """
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    with torch.no_grad():
        return DTensor.from_local(
            tensor.to_local().clone(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def in_numbers(tensor: Tensor) -> Tensor:
    """Return a dense tensor of real numbers; complex numbers become pairs.

    Floats of 8 bits, for which numpy and most of torch's functions have no numbers, become float32,
    which represents them exactly. Any other dense and real tensor is returned as it is.
    """
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        tensor = tensor.to_dense()
    if tensor.dtype in _EIGHT_BITS:
        return tensor.float()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_partial(tensor: Tensor) -> bool:
    """Return whether `tensor` is a term of a sum that has not been reduced yet."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Partial) for placement in tensor.placements
    )


def piece_of(tensor: Tensor) -> Piece | None:
    """Return the place of this rank's part in `tensor`; None if the rank has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, tensor.placements)
    sharing = [
        slice(None) if not isinstance(placement, Replicate) else slice(at, at + 1)
        for placement, at in zip(tensor.placements, mesh.get_coordinate() or (), strict=True)
    ]
    ranks = tuple(mesh.mesh[tuple(sharing)].flatten().tolist())
    if len(ranks) < 2:
        return None
    # The offset of an empty piece may be beyond the end.
    offset = tuple(min(at, size) for at, size in zip(offset, whole, strict=True))
    return Piece(offset=offset, shape=tuple(shape), whole=whole, ranks=ranks)


def reshard(model: nn.Module) -> None:
    """Shard parameters again that `fully_shard` has left whole, as after an evaluation.

    The next pass makes the parameters whole again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Attribute names of the modules inside wrappers: torch.compile, checkpoint_wrapper, and FSDP.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CONSTANTS = {*CONSTANTS, "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay"}
_NUMBERS = {"lr", "initial_lr", "weight_decay"}
_MORE = {"alpha", "centered", "initial_accumulator_value", "lr_decay", "momentum_decay", "rho"}
_TORCH_S = {
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {torch.optim.Optimizer}
# Modules with a dropout of layers or of attention weights.
_WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)
_WHOLE_MAX = 2**63
_EIGHT_BITS = {kind for name, kind in vars(torch).items() if name.startswith("float8_")}
VALUES_MAX = 2**16  # a model with more elements is recorded as sketches instead of values


@contextmanager
def requiring_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let all of `tensors` require gradients for a while: torch hooks no frozen tensor."""
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def record(tensor: Tensor, *, values: bool) -> trace.TensorRecord:
    """Return the record of a tensor of any shape, on any device; if `values`, with its values.

    bfloat16, which numpy doesn't have, is stored as float32, which represents it exactly.
    """
    plain = in_numbers(tensor.detach()).contiguous()
    if plain.dtype is torch.bfloat16:
        plain = plain.float()
    return trace.record_tensor(plain.cpu().reshape(-1).numpy(), values=values)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module, without the wrappers that torch puts around it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper that only passes calls on, such as accelerate's.

    Such a wrapper has no hooks. An optimizer that steps itself is returned as it is, even if it
    contains another one.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inside = inner_optimizers(optimizer)
        if len(inside) != 1:
            return optimizer
        (optimizer,) = inside
    return optimizer


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are attributes of `optimizer`, or items of a list attribute."""
    held = getattr(optimizer, "__dict__", {}).values()
    alone = [value for value in held if isinstance(value, torch.optim.Optimizer)]
    return [*alone, *_listed_optimizers(optimizer)]


def is_torch_s(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's class belongs to torch."""
    return type(optimizer).__module__.partition(".")[0] == "torch"


def stepped_by(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the tensors in an optimizer's groups."""
    return {tensor for group in optimizer.param_groups for tensor in group["params"]}


def stepping(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that take the steps of `optimizer`: itself, or those in its list.

    The listed optimizers count if they have exactly its parameters, in groups of their own. Then
    they have the state, and the learning rates that schedules change.
    """
    optimizer = unwrapped_optimizer(optimizer)
    listed = _listed_optimizers(optimizer)
    own, groups = optimizer.param_groups, [group for opt in listed for group in opt.param_groups]
    held, stepped = ({p for group in many for p in group["params"]} for many in (own, groups))
    are_copies = not any(group is other for group in own for other in groups)
    return listed if listed and held == stepped and are_copies else [optimizer]


def _listed_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    lists = [v for v in getattr(optimizer, "__dict__", {}).values() if isinstance(v, list | tuple)]
    return [value for held in lists for value in held if isinstance(value, torch.optim.Optimizer)]


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (`parameter/key`, value) of the optimizer's state, for parameters in `names`.

    For a `ZeroRedundancyOptimizer` it is the state of the rank's own inner optimizer.
    """
    inner = getattr(optimizer, "optim", None)
    keeper = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    for parameter, entries in keeper.state.items():
        if parameter in names and isinstance(entries, Mapping):
            for key, value in entries.items():
                if isinstance(value, Tensor | int | float):
                    known = torch.as_tensor(value)
                    yield from ((f"{name}/{key}", known) for name in names[parameter])


def stepped_copies(
    trained: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Return parameter name -> the copy that an optimizer steps instead (such as a float32 master).

    The copies are recognised because their order and shapes are those of the parameters. The result
    is {} if the optimizers step no such copies.
    """
    stepped = [parameter for group in groups for parameter in group["params"]]
    named = dict(zip(trained, stepped, strict=False))
    alike = all(p.shape == named[name].shape for name, p in trained.items() if name in named)
    are_others = {*stepped}.isdisjoint(trained.values())
    return named if are_others and alike and len(stepped) == len(trained) else {}


def is_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether this rank's parts of `tensors` contain no NaN and no infinity."""
    own_parts = [local(tensor) for tensor in tensors if tensor is not None]
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in own_parts:
        if tensor.is_cuda and tensor.numel() and tensor.is_floating_point():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    # This launches one kernel for many tensors, and waits for the GPU once.
    largest = [torch.stack(torch._foreach_norm(many, math.inf)) for many in by_kind.values()]
    rest = (tensor for tensor in own_parts if not (tensor.is_cuda and tensor.is_floating_point()))
    return all(map(digest.is_finite, (*largest, *rest)))


def norm(tensors: Iterable[Tensor | None]) -> float:
    """Return the L2 norm of this rank's parts of `tensors`, summed in float64.

    It is 0 if there are no tensors, and NaN if any element is not finite.
    """
    held = [local(tensor).double() for tensor in tensors if tensor is not None]
    squares = [float(tensor.square().sum()) for tensor in held]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


@cache
def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of submodules add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; 0 if it has none that is a number.

    Some optimizers keep their rate elsewhere, or determine it themselves.
    """
    return _number(group.get("lr"))


def _number(value: Any) -> float:
    number = _plain(value)
    return float(number) if isinstance(number, int | float) else 0.0


def _plain(value: Any) -> Any:
    """Return a number, or a list of numbers and Nones, for JSON; None for any other value."""
    if isinstance(value, tuple | list):
        numbers = [_plain(item) for item in value]
        return None if any(isinstance(number, list) for number in numbers) else numbers
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    is_small = isinstance(value, int) and abs(value) < _WHOLE_MAX
    return value if is_small or isinstance(value, float) else None


def _is_alone(module: torch.nn.Module) -> bool:
    is_batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    return is_batch_norm and not isinstance(module, torch.nn.SyncBatchNorm)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is not kind
    return f"{kind.__module__}.{kind.__name__}" if own else kind.__name__


def groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the constants of the parameter groups, as values for JSON."""
    return [
        {
            **{str(name): _plain(value) for name, value in group.items() if name != "params"},
            **{name: _number(group[name]) for name in _NUMBERS & group.keys()},
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def constants(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the constants of each parameter group, except its learning rate."""
    known = _CONSTANTS | _MORE
    return [{key: group[key] for key in known & group.keys()} for group in groups(optimizers)]


def rule(optimizer: torch.optim.Optimizer) -> tuple[str, bool]:
    """Return the name of an optimizer's torch.optim class, and whether it is a subclass of that.

    If no class of torch.optim is among the optimizer's classes, the name is "", and the second
    value says whether the script defines its class, and not a library. A
    `ZeroRedundancyOptimizer` counts as the optimizer inside it.
    """
    inner = getattr(optimizer, "optim", None)
    stepping = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    classes = [kind.__name__ for kind in type(stepping).__mro__ if kind in _TORCH_S]
    if not classes:
        return "", call_sites.is_own_class(type(stepping))
    return classes[0], type(stepping) not in _TORCH_S


def facts(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return facts about optimizers, dropout and batch normalisation, as values for JSON."""
    return {
        "optimizer": " and ".join(dict.fromkeys(map(_kind, optimizers))),
        "groups": groups(optimizers),
        "dropout": max(map(_dropout, model.modules()), default=0.0),
        "batch_norm": any(map(_is_alone, model.modules())),
        "short_betas": any(map(_has_short_betas, optimizers)),
    }


def _dropout(module: torch.nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    return float(module.dropout) if isinstance(module, _WITH_DROPOUT) else 0.0


def _has_short_betas(optimizer: torch.optim.Optimizer) -> bool:
    # Fused and capturable kernels compute with constants in float32.
    return any(
        bool(group.get("fused") or group.get("capturable"))
        and any(parameter.device.type != "cpu" for parameter in group["params"])
        for group in optimizer.param_groups
    )
