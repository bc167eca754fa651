"""torch tensors as a trace keeps them, and what of a model and an optimizer is recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from entrenar_py import trace
from entrenar_py.observing import dtensors

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, checkpoint_wrapper
_CONSTANTS = {
    *("momentum", "dampening", "nesterov", "betas", "eps", "weight_decay", "maximize", "amsgrad"),
    "decoupled_weight_decay",
}
VALUES_MAX = 2**16  # elements of a model up to which values are kept beside digests


def record(tensor: Tensor, *, values: bool) -> trace.TensorRecord:
    """The record of a tensor on any device. What numpy has no name for is kept as float32, which
    holds every bfloat16 exactly.
    """
    plain = tensor.detach().contiguous()
    if plain.dtype is torch.bfloat16:
        plain = plain.float()
    return trace.record_tensor(plain.cpu().reshape(-1).numpy(), values=values)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module, out of the wrappers that torch puts around it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = inner if inner is not None else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that steps, out of what only passes calls on to it (accelerate's) and has no hooks of
    its own; an optimizer that steps beside another is left as it is.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer
        optimizer = inner
    return optimizer


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> Iterator[tuple[str, Tensor]]:
    """`parameter/key` -> what the optimizer keeps, of parameters that have a name."""
    for parameter, entries in optimizer.state.items():
        if parameter in names:
            for key, value in entries.items():
                if isinstance(value, Tensor | int | float):
                    yield f"{names[parameter]}/{key}", torch.as_tensor(value)


def is_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing that this rank holds of them is NaN or Inf."""
    held = (dtensors.local(one) for one in tensors if one is not None)
    return all(bool(one.isfinite().all()) for one in held)


def norm(tensors: Iterable[Tensor | None]) -> float:
    """The L2 norm of what this rank holds of all of them together, added in float64; of none, 0."""
    held = [dtensors.local(one).double() for one in tensors if one is not None]
    squares = [float(one.square().sum()) for one in held]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def random_state(model: torch.nn.Module) -> str:
    """A digest of the state of the generators that `model` draws from."""
    digest = blake3(torch.get_rng_state().numpy().tobytes())
    devices = {one.device for one in model.parameters() if one.device.type == "cuda"}
    for device in sorted(devices, key=str):
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest.hexdigest(16)


def progress(scheduler: Any) -> dict[str, int]:
    """Where a schedule stands, if there is one."""
    place = getattr(scheduler, "last_epoch", None)
    return {} if place is None else {"schedule": int(place)}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers of parts of the model put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(value: Any) -> Any:
    """A number, or a tuple of them, as JSON can hold it."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return float(value) if isinstance(value, Tensor) else value


def _is_alone(module: torch.nn.Module) -> bool:
    """Whether it normalises by the samples of its own rank, where it is trained."""
    kinds = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
    return isinstance(module, kinds[0]) and not isinstance(module, kinds[1])


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class, and of its module where that is not torch's: its rule may differ."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is not kind
    return f"{kind.__module__}.{kind.__name__}" if own else kind.__name__


def groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups without their parameters, as JSON can hold them."""
    return [
        {
            name: _plain(value)
            for name, value in group.items()
            if isinstance(value, bool | int | float | Tensor | tuple | None)
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def constants(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Of each parameter group what its optimizer's rule has beside the learning rate."""
    return [{key: group[key] for key in _CONSTANTS & group.keys()} for group in groups(optimizers)]


def facts(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What is declared of the optimizers, of dropout and of batch normalisation, as JSON can hold
    it.
    """
    dropouts = [one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)]
    return {
        "optimizer": " and ".join(dict.fromkeys(map(_kind, optimizers))),
        "groups": groups(optimizers),
        "dropout": max(dropouts, default=0.0),
        "batch_norm": any(map(_is_alone, model.modules())),
    }
