"""This rank's part of a DTensor, and the layout of the ranks as device meshes show it.

No collective is called: ranks may have diverged, which is what the checks are to find out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from entrenar_py.check.observing import zero_partitions
from entrenar_py.check.rank_files import layout
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.shared.errors import UsageError

DECLARE = 'declare the axes and their sizes, row-major: observe(..., layout={"dp": 2, "tp": 2})'


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, without a copy, as real numbers.

    A sparse tensor is copied into a dense one.
    """
    if not isinstance(tensor, DTensor):
        return in_numbers(tensor.detach())
    with torch.no_grad():
        return in_numbers(tensor.to_local())


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with memory of its own, placed alike.

    `DTensor.clone` reduces a term of a sum, which is a collective.
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
    """Return a tensor without gradient as a dense one; complex numbers as pairs of real ones."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_partial(tensor: Tensor) -> bool:
    """Return whether `tensor` is a term of a sum that has not been reduced yet."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Partial) for placement in tensor.placements
    )


def piece_of(tensor: Tensor) -> Piece | None:
    """Return the part of `tensor` that this rank holds; None where it holds all of it."""
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
    offset = tuple(min(at, size) for at, size in zip(offset, whole, strict=True))  # an empty piece
    return Piece(offset=offset, shape=tuple(shape), whole=whole, ranks=ranks)


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether torch shards `model` or a part of it, and brings it together for passes.

    `fully_shard` does, `FullyShardedDataParallel`, and DeepSpeed with what it steps (ZeRO).
    """
    kinds = (FSDPModule, FullyShardedDataParallel)
    sharded = any(isinstance(module, kinds) for module in model.modules())
    return sharded or zero_partitions.optimizer_of(model) is not None


def reshard(model: nn.Module) -> None:
    """Put back the pieces of parameters that `fully_shard` holds whole, as after an evaluation.

    The next pass makes the parameters whole again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def declared(given: Any, tied: Iterable[Iterable[str]], world_size: int) -> Layout | None:
    """Return the layout that a script declares; None if it declares nothing.

    It has no axes if the script declares only `tied`. Raises UsageError for an invalid layout.
    """
    ties = layout.require_ties(tied)
    if given is None:
        return Layout(axes={}, tied=ties) if ties else None
    if isinstance(given, DeviceMesh):
        given = _axes(given, "layout")
    if not isinstance(given, Mapping):
        raise UsageError(
            f"layout={given!r}: use a mapping from axes to sizes, or a DeviceMesh whose dimensions "
            'have names: layout={"dp": 2, "tp": 2}'
        )
    return Layout(axes=layout.require(given, world_size, "layout"), tied=ties)


def read_off(model: nn.Module, world_size: int) -> Layout | None:
    """Return the layout that the meshes of the model's parameters show; None without meshes.

    A mesh of one axis with a name of the script's, or none, shows nothing if all ranks keep whole
    copies: they may share samples, or not. Nor does a mesh of this rank alone. Raises UsageError if
    the meshes don't show how all ranks are arranged.
    """
    placed = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    meshes = {parameter.device_mesh: name for name, parameter in placed.items()}
    cut = {p.device_mesh for p in placed.values() if not all(map(_is_copy, p.placements))}
    shown, sharded = None, is_fully_sharded(model)
    for mesh, name in meshes.items():
        root = mesh._get_root_mesh()
        # One that a script unflattens has a name that tells nothing, such as "world".
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
            axes = _axes(whole, where)
        in_order = whole.mesh.flatten().tolist() == list(range(world_size))
        if math.prod(axes.values()) != world_size or not in_order or shown not in (None, axes):
            raise UsageError(
                f"{where} does not show how all {world_size} ranks are arranged: {DECLARE}"
            )
        shown = axes
    return None if shown is None else Layout(axes=layout.require(shown, world_size, where))


def _is_copy(placement: object) -> bool:
    return isinstance(placement, Replicate)


def _axes(mesh: DeviceMesh, where: str) -> dict[str, int]:
    if mesh.mesh_dim_names is None:
        raise UsageError(f"{where}: its dimensions have no names: {DECLARE}")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
