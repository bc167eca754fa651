"""Checks before training that the canonical all-reduce supports a model and the world size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from entrenar_py.shared.errors import UsageError

_DTYPES = (torch.float32, torch.bfloat16)


def require_wrapped(model: object) -> None:
    """Raise UsageError unless `model` is a DistributedDataParallel."""
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"model is a {type(model).__name__}: wrap it first, "
            "canonical_all_reduce(DistributedDataParallel(model), micro_batches=...)"
        )


def require_numbers(*, micro_batches: int, world_size: int) -> None:
    """Raise UsageError unless ranks can share the tree over the micro-batches evenly."""
    if not _is_power_of_two(micro_batches):
        raise UsageError(
            f"micro_batches={micro_batches!r}: only a power of two has a tree that ranks can share "
            "evenly; use 1, 2, 4, 8 ..., the same for every world size"
        )
    if not _is_power_of_two(world_size):
        raise UsageError(
            f"world_size={world_size}: the canonical all-reduce needs a power of two; "
            "start 1, 2, 4, 8 ... ranks"
        )
    if world_size > micro_batches:
        raise UsageError(
            f"micro_batches={micro_batches} with world_size={world_size}: every rank needs one; "
            f"cut the global batch into {world_size} or more micro-batches, or start fewer ranks"
        )


def require_model(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Return the trainable parameters with their names; UsageError if `model` isn't supported."""
    parameters = {}
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name} has dtype {parameter.dtype}: allowed are "
                f"{' and '.join(map(str, _DTYPES))}, whose range holds sums over all micro-batches"
            )
        if not _is_dense(parameter):
            raise UsageError(
                f"parameter {name} has strides {tuple(parameter.stride())}, with gaps or overlaps: "
                "make it contiguous"
            )
        parameters[parameter] = name
    if model.parameters_to_ignore:
        raise UsageError(
            f"parameters_to_ignore={sorted(model.parameters_to_ignore)}: their gradients would not "
            "be reduced; freeze them, or let DistributedDataParallel reduce them"
        )
    for name, module in model.module.named_modules():
        _require_module(name, module)
    _require_options(model)
    return parameters


def _require_options(model: DistributedDataParallel) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise UsageError(
                f"DistributedDataParallel({option}=True): torch would reduce only the parameters "
                "that a rank's last micro-batch used, which depend on the world size; leave the "
                "option out, and use every parameter in every micro-batch"
            )
    if model.mixed_precision is not None:
        raise UsageError("DistributedDataParallel(mixed_precision=...): use torch.autocast instead")


def _require_module(name: str, module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
        raise UsageError(
            f"module {name} is a {type(module).__name__}: its statistics depend on how "
            "micro-batches are spread over ranks; use LayerNorm or GroupNorm, or freeze it with "
            "eval()"
        )
    if getattr(module, "sparse", False) is True:
        raise UsageError(f"module {name} makes sparse gradients: set sparse=False")


def _is_power_of_two(number: object) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps or overlaps, in any dim order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
