"""The parameters of a model that `FullyShardedDataParallel` or DeepSpeed's ZeRO keep in flat ones.

A FlatParameter has the elements of several parameters, one after another, and each rank has an
equal part of it. What a rank has of one parameter is a piece of its elements in C order. Optimizers
step these pieces (`use_orig_params=True`), or the rank's part of the FlatParameter.

Torch documents the attributes that are read here as those of a FlatParameter. Those of DeepSpeed
are read in `zero_partitions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from entrenar_py.check.observing import dtensors, tensors, zero_partitions
from entrenar_py.check.observing.flat_parts import Part, piece_of
from entrenar_py.check.observing.zero_partitions import Partition
from entrenar_py.check.rank_files import layout
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.shared.errors import UsageError


class WithinPass:
    """A whole parameter as a backward pass sees it: a hook is given its part of `flat`'s gradient.

    The gradient is this rank's own: it is not reduced yet.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call `hook` as that of a tensor; return the handle that removes it."""
        return self._part.flat.register_hook(partial(self._call, hook))

    def _call(self, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        changed = hook(self._part.of_whole(gradient))
        if changed is None:
            return None
        copy = gradient.clone()
        self._part.of_whole(copy).copy_(changed)
        return copy


def of(model: nn.Module) -> dict[str, Part]:
    """Return by name the parameters of `model` that are parts of flat tensors."""
    parts: dict[str, Part] = {
        tensors.plain_name(name): part for name, part in zero_partitions.of(model).items()
    }
    for prefix, module in _wrappers(model):
        parts.update(_of_handle(prefix, module._handle))
    return parts


def when_whole(model: nn.Module, found: Callable[[str, Any], Any]) -> list[Any]:
    """Call `found` with each trainable parameter, as a backward pass sees it, and its name.

    Return what `found` returns.
    """
    parts = of(model).items()
    return [
        found(name, part.parameter if isinstance(part, Partition) else WithinPass(part))
        for name, part in parts
        if part.owner.requires_grad
    ]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of each parameter, with its plain name; shared ones by each name."""
    yield from beside(model, remove_duplicate=False)
    held = {
        name: part.weights().requires_grad_(part.owner.requires_grad)
        for name, part in of(model).items()
    }
    yield from held.items()
    yield from ((name, held[first]) for name, first in _shared(model))


def beside(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are in no FlatParameter, and the plain names of these."""
    flat = {*of(model), *(name for name, _ in _shared(model))}
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        plain = tensors.plain_name(name)
        if plain not in flat and plain.rpartition(".")[2] != "_flat_param":
            yield plain, parameter


def layout_of(model: nn.Module, world_size: int) -> Layout | None:
    """Return the arrangement of the ranks that flat parameters show; None without these.

    Raises UsageError if it doesn't arrange all ranks.
    """
    zero = zero_partitions.axes_of(model)
    shown = [zero] if zero is not None else [_axes(module) for _, module in _wrappers(model)]
    if not shown:
        return None
    where = "FullyShardedDataParallel" if zero is None else "DeepSpeed's ZeRO"
    axes = next((one for one in shown if "dp" not in one), shown[0])
    if math.prod(axes.values()) != world_size:
        raise UsageError(
            f"{where} does not show how all {world_size} ranks are arranged: {dtensors.DECLARE}"
        )
    return Layout(axes=layout.require(axes, world_size, where))


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each wrapper that has a FlatParameter, after the plain name of its module."""
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield tensors.plain_name(path), module


def _axes(module: Any) -> dict[str, int]:
    """Return the axes of one wrapper: its shards, copies of these, or whole copies only."""
    handle, size = module._handle, module.process_group.size()
    if (copies := getattr(module, "_inter_node_pg", None)) is not None:
        return {"dp_replicate": copies.size(), "dp_shard": size}
    return {"fsdp" if handle.uses_sharded_strategy or size == 1 else "dp": size}


def _of_handle(prefix: str, handle: Any) -> Iterator[tuple[str, Part]]:
    flat = handle.flat_param
    numbers = flat._numels_with_padding
    begins = (end - number for end, number in zip(accumulate(numbers), numbers, strict=True))
    known = (begin for begin, gap in zip(begins, flat._is_padding_mask, strict=True) if not gap)
    owners = flat._params or [flat] * len(flat._fqns)
    for name, begin, shape, owner in zip(flat._fqns, known, flat._shapes, owners, strict=True):
        piece, first = _piece(handle, begin, math.prod(shape))
        yield (
            _joined(prefix, name),
            Part(
                flat=flat,
                owner=owner,
                shape=tuple(shape),
                begin=begin,
                first=first,
                piece=piece,
            ),
        )


def _piece(handle: Any, begin: int, size: int) -> tuple[Piece | None, int]:
    """Return this rank's piece of a parameter, and where that begins in the rank's part.

    The parameter has `size` elements, from element `begin` of the FlatParameter on.
    """
    if not handle.uses_sharded_strategy:
        return None, begin
    ranks = dist.get_process_group_ranks(handle.process_group)
    return piece_of(begin, size, math.prod(handle.flat_param._sharded_size), handle.rank, ranks)


def _shared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each further name of a parameter in a flat tensor, with its first one."""
    yield from zero_partitions.shared(model)
    for prefix, module in _wrappers(model):
        for info in module._handle.flat_param._shared_param_infos:
            other, first = (
                _joined(prefix, _joined(path, name))
                for path, name in (
                    (info.module_name, info.param_name),
                    (info.prim_module_name, info.prim_param_name),
                )
            )
            yield other, first


def _joined(path: str, name: str) -> str:
    return tensors.plain_name(f"{path}.{name}" if path else name)
