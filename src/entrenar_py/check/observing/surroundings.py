"""Objects that a script has created in addition to the optimizer: modules, meshes, schedules.

They are searched for once, among all objects that the garbage collector tracks. Torch has no hook
that reports their creation, and patched constructors would miss copies. The rank of the process is
determined here, too.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.check.rank_files import layout, rank_file
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.shared.errors import UsageError

_Object = TypeVar("_Object")


def model_of(
    called: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    instead: nn.Module | None = None,
) -> nn.Module | None:
    """Return the module that `optimizers` train; None if there is none.

    If `called` has all parameters of the optimizers, the result is `called`. Otherwise it is a list
    of the outermost modules that have some of the parameters, including `called`, and of the
    parameters that no module has. (Frozen ones among these are left out: a checkpoint may have
    replaced them in the module.) If several optimizers step the models in a container, the list has
    these models instead of the container, which is never called as a whole. If no module has any of
    the parameters, the optimizers step copies; then the result is `instead`, a module that the
    script calls, but that no optimizer steps.
    """
    parameters = set[Tensor]().union(*map(tensors.stepped_by, optimizers))
    own = [] if called is None else [tensors.unwrapped(called)]
    for module in own:
        tensors.reshard(module)
    lacking = parameters.difference(*map(flat_parameters.parameters_and_partitions, own))
    if lacking:
        others = _outermost(lacking)
        own += others if len(optimizers) < 2 else _called_alone(others, lacking)
        lacking = lacking.difference(*(module.parameters() for module in own))
        if not own and instead is not None:
            return tensors.unwrapped(instead)
        lacking = {parameter for parameter in lacking if parameter.requires_grad}
    if lacking:
        own.append(Loose(optimizers, lacking))
    if len(own) < 2:
        return own[0] if own else None
    return nn.ModuleList(own)


def _called_alone(modules: Iterable[nn.Module], wanted: set[Any]) -> list[nn.Module]:
    """Return modules, but instead of a mere container its parts that have `wanted` parameters."""
    alone: list[nn.Module] = []
    for module in modules:
        parts = [part for part in module.children() if not wanted.isdisjoint(part.parameters())]
        is_container = type(module).forward is nn.Module.forward
        has_own = any(True for _ in module.parameters(recurse=False))
        alone += _called_alone(parts, wanted) if is_container and not has_own else [module]
    return alone


def have_modules(parameters: Collection[Tensor]) -> bool:
    """Return whether all these tensors are parameters of modules."""
    holders = _outermost({*parameters})
    return bool(parameters) and {*parameters}.issubset(
        parameter for module in holders for parameter in module.parameters()
    )


class Loose(nn.Module):
    """The tensors that optimizers step and no module has; names are places in the optimizers."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], wanted: Collection[Tensor]
    ) -> None:
        super().__init__()
        groups = [group["params"] for opt in optimizers for group in opt.param_groups]
        loose: dict[str, Any] = {
            f"group{number}.{index}": tensor
            for number, group in enumerate(groups)
            for index, tensor in enumerate(group)
            if tensor in wanted
        }
        self._parameters.update(loose)  # set directly, since tensors need not be of class Parameter


def _outermost(parameters: set[Any]) -> list[nn.Module]:
    """Return the outermost modules that have any of `parameters`, without torch's wrappers."""
    holders = [
        module
        for module in _alive(nn.Module)
        if not parameters.isdisjoint(module.parameters()) and tensors.unwrapped(module) is module
    ]
    inner = {part for module in holders for part in module.modules() if part is not module}
    chosen: list[nn.Module] = []
    for module in holders:
        if module not in inner and not parameters.isdisjoint(module.parameters()):
            chosen.append(module)
            parameters = parameters.difference(module.parameters())
    return chosen


def are_replicas(model: nn.Module) -> bool:
    """Return whether torch's wrapper keeps a copy of `model`, or of a part of it, on each rank.

    Then each rank should draw its own samples. Also True for a single process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    parts = set(model.modules())
    return any(
        wrapper.module in parts
        and dist.get_world_size(wrapper.process_group) == dist.get_world_size()
        for wrapper in _alive(DistributedDataParallel)
    )


def are_joined(model: nn.Module) -> bool:
    """Return whether `model` trains within torch's `Join`, so ranks may have fewer batches.

    Then every batch of a rank has the same weight, including a short last batch.
    """
    parts = set(model.modules())
    return any(
        wrapper.module in parts and wrapper._join_config.enable
        for wrapper in _alive(DistributedDataParallel)
    )


def schedule_of(optimizers: Iterable[torch.optim.Optimizer]) -> LRScheduler | None:
    """Return the schedule of the optimizers' learning rate; None if there is none, or several.

    It may be the schedule of an inner optimizer. A schedule that calls others in turn (a warm-up,
    then a decay) counts as one.
    """
    stepped = [one for opt in optimizers for one in (opt, *tensors.inner_optimizers(opt))]
    alive = [s for s in _alive(LRScheduler) if any(s.optimizer is opt for opt in stepped)]
    parts = {id(part) for schedule in alive for part in _parts_of(schedule)}
    outer = [schedule for schedule in alive if id(schedule) not in parts]
    return outer[0] if len(outer) == 1 else None


def _parts_of(schedule: LRScheduler) -> list[LRScheduler]:
    held = vars(schedule).values()
    each = [part for value in held for part in (value if isinstance(value, list) else [value])]
    return [part for part in each if isinstance(part, LRScheduler)]


def _alive(kind: type[_Object]) -> list[_Object]:
    things = gc.get_objects()
    # Test each type only once: there are about a hundred objects per type, and some metaclasses
    # test subclasses in Python.
    kinds = {each for each in {*map(type, things)} if issubclass(each, kind)}
    return [thing for thing in things if type(thing) in kinds] if kinds else []


# --- the arrangement of the ranks -----------------------------------------------------------------


def mesh(world_size: int) -> DeviceMesh | None:
    """Return the script's mesh if it arranges all ranks along axes that `observe` knows.

    If several meshes differ only by axes with a single rank, return the one with the most axes,
    provided that all its axes are data axes. Return None if there are several distinct meshes.
    """
    meshes: dict[Any, DeviceMesh] = {}
    for device_mesh in _alive(DeviceMesh):
        names, sizes = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
        in_order = device_mesh.mesh.flatten().tolist() == list(range(world_size))
        if in_order and names and layout.knows(names):
            shown = tuple(axis for axis in zip(names, sizes, strict=True) if axis[1] > 1)
            if shown not in meshes or (
                device_mesh.ndim > meshes[shown].ndim and layout.are_data(names)
            ):
                meshes[shown] = device_mesh
    return next(iter(meshes.values())) if len(meshes) == 1 else None


def declared(axes: Any, tied: Iterable[Iterable[str]], world_size: int) -> Layout | None:
    """Return the layout that a script declares; None if it declares none.

    If the script declares only `tied`, the layout has no axes. Raises UsageError for an invalid
    layout.
    """
    ties = layout.require_ties(tied)
    if axes is None:
        return Layout(axes={}, tied=ties) if ties else None
    if isinstance(axes, DeviceMesh):
        axes = _mesh_axes(axes, "layout")
    if not isinstance(axes, Mapping):
        raise UsageError(
            f"layout={axes!r}: use a mapping from axes to sizes, or a DeviceMesh with names of its "
            'dimensions: layout={"dp": 2, "tp": 2}'
        )
    return Layout(axes=layout.require(axes, world_size, "layout"), tied=ties)


def read_off(model: nn.Module, world_size: int) -> Layout | None:
    """Return the layout that the meshes of the model's parameters show; None without meshes.

    A mesh of one axis, with an unknown name or no name, shows nothing if all ranks keep whole
    copies: they may or may not share samples. Nor does a mesh of this rank alone. Raises UsageError
    if the meshes don't show how all ranks are arranged.
    """
    placed = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    meshes = {parameter.device_mesh: name for name, parameter in placed.items()}
    cut = {p.device_mesh for p in placed.values() if not all(map(_is_copy, p.placements))}
    shown, sharded = None, flat_parameters.is_fully_sharded(model)
    for mesh, name in meshes.items():
        root = mesh._get_root_mesh()
        # The name of a mesh that a script has unflattened, such as "world", has no meaning here.
        whole = root if layout.knows(root.mesh_dim_names) else mesh
        if whole.size() == 1 < world_size:
            continue
        where = f"the mesh of parameter {name}"
        is_known = layout.knows(whole.mesh_dim_names)
        if not is_known and whole.ndim == 1 and whole.size() == world_size:
            if not sharded and mesh not in cut:
                continue
            axes = {"fsdp" if sharded else "tp": world_size}
        elif not is_known and whole.ndim == 2 and sharded and _is_copy(placed[name].placements[0]):
            axes = dict(zip(("dp_replicate", "dp_shard"), whole.shape, strict=True))
        else:
            axes = _mesh_axes(whole, where)
        in_order = whole.mesh.flatten().tolist() == list(range(world_size))
        if math.prod(axes.values()) != world_size or not in_order or shown not in (None, axes):
            raise UsageError(
                f"{where} does not show how all {world_size} ranks are arranged: {tensors.DECLARE}"
            )
        shown = axes
    return None if shown is None else Layout(axes=layout.require(shown, world_size, where))


def _is_copy(placement: object) -> bool:
    return isinstance(placement, Replicate)


def _mesh_axes(mesh: DeviceMesh, where: str) -> dict[str, int]:
    if mesh.mesh_dim_names is None:
        raise UsageError(f"{where}: its dimensions have no names: {tensors.DECLARE}")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


# --- the rank of this process ---------------------------------------------------------------------


def place() -> tuple[int, int]:
    """Return rank and world size, as the launcher set them, or from the process group.

    Ranks that a script spawns itself (`torch.multiprocessing.spawn`) may have no environment
    variables.
    """
    is_told = not {"RANK", "ENTRENAR_RANK"}.isdisjoint(os.environ)
    if not is_told and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_file.environment_rank()


def keep_groups() -> None:
    """Keep the current process groups until the process has ended.

    When a script releases the last reference to a group, the group waits for its own thread. This
    thread may be about to release a tensor of the last collective, and then waits for Python's
    global lock, which the script's thread has: a deadlock (gloo, torch 2.11 and 2.13). So the
    groups are never destroyed.
    """
    if dist.is_available() and dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
