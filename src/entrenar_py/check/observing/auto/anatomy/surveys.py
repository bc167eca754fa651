"""What a call meets: modes, buffers, generators, groups of ranks, and the lines of the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import call_sites, tensors
from entrenar_py.check.observing.auto.anatomy import parameters as reading
from entrenar_py.check.observing.auto.anatomy.parameters import rounded

_ROOTS_DEEP = 4


class Before:
    """What a module's call may change: buffers, those of frozen parts, the random numbers."""

    def __init__(self, module: nn.Module, inputs: list[Any]) -> None:
        self._generator = generator()
        self._buffers = _fingerprints(module) if module.training else {}
        self._inputs = {"inputs": reading.shapes(inputs), "digest": reading.digest(inputs)}

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """Return the facts about a call that has ended."""
        now = _fingerprints(module) if self._buffers else {}
        changed = [name for name, print_ in self._buffers.items() if now.get(name) != print_]
        frozen = {name for name, part in module.named_modules() if _is_frozen(part)}
        sizes = {True: 0, False: 0}
        for parameter in module.parameters():
            sizes[parameter.requires_grad] += parameter.numel()
        return {
            **self._inputs,
            "training": module.training,
            "grad": torch.is_grad_enabled(),
            "autocast": autocast(),
            "trainable": sizes[True],
            "frozen": sizes[False],
            "generator": self._generator,
            "draws": self._generator != generator(),
            "modal": has_modes(module),
            "changed": len(changed),
            "stirred": tuple(sorted({name.rpartition(".")[0] for name in changed} & frozen)),
        }


def _fingerprints(module: nn.Module) -> dict[str, int]:
    named = {name: one for name, one in module.named_buffers() if not is_lazy(one)}
    return dict(zip(named, reading.fingerprints(named.values()), strict=True))


def _is_frozen(part: nn.Module) -> bool:
    own = [*part.parameters(recurse=False)]
    return part.training and bool(own) and not any(p.requires_grad for p in own)


def has_modes(part: nn.Module) -> bool:
    """Return whether a part has dropout or batch norm that isn't inside a frozen part."""
    parameters = [*part.parameters()]
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return False
    own = isinstance(part, _BatchNorm) or (isinstance(part, _DropoutNd) and part.p > 0)
    return own or any(map(has_modes, part.children()))


def wrapper(module: nn.Module) -> str:
    """Return what exchanges tensors for a module: DistributedDataParallel, FSDP or ""."""
    parts = {type(part) for part in module.modules()}
    if any(issubclass(part, DistributedDataParallel) for part in parts):
        return "DistributedDataParallel"
    kinds = (kind.__name__ for part in parts for kind in part.__mro__)
    return "FSDP" if any(kind.startswith(("FSDP", "FullySharded")) for kind in kinds) else ""


def leaves(values: Any) -> list[Any]:
    """Return the leaves of nested values, also within mappings that torch doesn't know."""
    return [
        leaf
        for each in tree_leaves(values)
        for leaf in (leaves({**each}) if isinstance(each, Mapping) else [each])
    ]


def named_inputs() -> dict[str, Any]:
    """Return the arguments that are passed by keyword to the module that is called now.

    torch's hooks for all modules are not given them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    named = {} if frame is None else call_sites.local_variables(frame).get("kwargs", {})
    return named if isinstance(named, dict) else {}


def sampler(loader: Any) -> Any:
    """Return what draws the samples of a loader: its sampler, or that of its batch sampler."""
    own, batches = loader.sampler, loader.batch_sampler
    if type(own).__name__ not in ("SequentialSampler", "_InfiniteConstantSampler"):
        return own
    while getattr(batches, "sampler", None) is None and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", own)


def has_tensors(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def path(file: Any) -> str:
    """Return the full path of a file; "" for an open one."""
    return os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""


def group_size(group: Any) -> int:
    """Return the number of ranks of a group, mesh, dimension of a mesh, or list of ranks."""
    mesh, dimension = group if isinstance(group, tuple) else (group, None)
    if isinstance(mesh, DeviceMesh):
        return mesh.size(dimension)
    if isinstance(group, list | tuple):
        return len(group)
    if isinstance(group, str):
        c10d: Any = dist.distributed_c10d
        group = c10d._resolve_process_group(group)
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def reduction(arguments: Mapping[str, Any]) -> str:
    """Return the operation of a reduction with these arguments: "SUM"."""
    named = arguments.get("op", arguments.get("reduceOp", "SUM"))
    return str(named).rpartition(".")[2].upper()


def stepped_by(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def rates(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rates of an optimizer's groups."""
    return tuple(rounded(tensors.rate_of(group)) for group in optimizer.param_groups)


def whole(value: Any) -> int:
    """Return a whole number, or -1 for a different value."""
    return value if type(value) is int else -1


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor."""
    return tensor.numel() * tensor.element_size()


def site() -> call_sites.Site | None:
    """Return the line of the script that runs now, or None."""
    frame = call_sites.own_frame()
    return None if frame is None else (_place(frame.f_code.co_filename), frame.f_lineno)


@cache
def _place(file: str) -> str:
    return call_sites.in_place(Path(file).resolve())


def autocast() -> str:
    """Return the type of autocast, or ""."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def generator() -> str:
    """Return a digest of the states of torch's generators."""
    states, cuda = [torch.random.get_rng_state()], torch.cuda
    if cuda.is_available() and cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(cuda.get_rng_state())
    return reading.digest(states)


def sequence() -> int:
    """Return how many collectives this process has called, as its groups count them."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    count = 0
    groups: Any = [*dist.distributed_c10d._world.pg_map]
    for group in groups:
        with suppress(AttributeError, RuntimeError):
            count += int(group._get_sequence_number_for_group()) if group.size() > 1 else 0
    return count


_LIBRARIES = {
    "torch/distributed/fsdp/": "FSDP",
    "torch/distributed/_composable/": "FSDP",
    "torch/distributed/tensor/": "DTensor",
    "torch/nn/parallel/": "DistributedDataParallel",
    "torch/distributed/algorithms/ddp_comm_hooks/": "DistributedDataParallel",
    "torch/distributed/optim/": "ZeroRedundancyOptimizer",
    "torch/distributed/checkpoint/": "torch.distributed.checkpoint",
    "torch/nn/modules/": "SyncBatchNorm",
}


def caller() -> str:
    """Return what calls a collective: "script", a part of torch, or "a library"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and call_sites.is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    if call_sites.is_own(file):
        return "script"
    return next((name for part, name in _LIBRARIES.items() if part in file), "a library")


def is_cut_off(outputs: Any, own: Tensor) -> bool:
    """Return whether the gathered copies of a tensor have no gradient."""
    return not any(
        one is own or (isinstance(one, Tensor) and one.requires_grad)
        for one in tree_leaves(outputs)
    )


def leads_to(root: Tensor | None, changed: Tensor, node: Any) -> bool:
    """Return whether `root` was computed from the tensor that had `node` when it was changed."""
    if root is None or root.grad_fn is node:
        return False
    nodes = [root.grad_fn]
    for _ in range(_ROOTS_DEEP):
        nodes = [after for one in nodes if one is not None for after, _ in one.next_functions]
        if any(one is node for one in nodes):
            return True
    return False
