"""Parameters that a wrapper of the model keeps in flat tensors, or in pieces.

A flat tensor has the elements of several parameters, one after another, and each rank has an equal
part of it. The elements that a rank has of one parameter are a piece in C order, a `Part`.

- A FlatParameter of `FullyShardedDataParallel`: optimizers step these pieces, or (without
  `use_orig_params`) the rank's part of the FlatParameter. Torch documents the attributes that are
  read here.
- DeepSpeed's ZeRO: a rank has an equal part of the parameters in float32, either of those of a
  group, one after another (stages 1 and 2), or of each parameter (stage 3). The script's optimizer
  steps these partitions one after another, within the step of DeepSpeed's optimizer. The partitions
  are recorded. The model computes with copies of them in its own dtype, which DeepSpeed gathers for
  all ranks. DeepSpeed documents how to read the partitions (`safe_get_local_grad`,
  `safe_get_full_fp32_param`), but these functions call collectives at stages 1 and 2. So
  `_hp_mapping` is read here, which these functions read, too.
- `fully_shard`: a rank keeps pieces, and computes with whole parameters (`when_whole`). The
  gradient that a backward pass adds to a whole parameter is this rank's own. The gradient of a
  piece is part of a sum over all ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import tensors
from entrenar_py.check.rank_files import layout
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.shared import hook_calls
from entrenar_py.shared.errors import UsageError


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter that is a part of the flat tensor `flat`, beginning at element `begin`.

    `owner` is the tensor that optimizers step. `shape` is the shape of the whole parameter. This
    rank has the `piece` that begins at element `first` of the rank's part of `flat`. If `piece` is
    None, the rank has the whole parameter.
    """

    flat: Any
    owner: Tensor
    shape: tuple[int, ...]
    begin: int
    first: int
    piece: Piece | None

    @property
    def numel(self) -> int:
        """The number of elements that this rank has."""
        return math.prod(self.shape if self.piece is None else self.piece.shape)

    def weights(self) -> Tensor:
        """Return this rank's elements, even while a pass computes with whole parameters."""
        held: Tensor = getattr(self.flat, "_local_shard", self.flat)
        return self._cut(held.detach())

    def gradient(self) -> Tensor | None:
        """Return this rank's elements of the gradient; None if no reduced gradient is available."""
        gradient: Tensor | None = self.owner.grad
        if self.owner is self.flat and gradient is None:
            gradient = getattr(self.flat, "_saved_grad_shard", None)  # while a pass adds to it
        return self.of(gradient) if gradient is not None and self.fits(gradient) else None

    def fits(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has one number for each element that the optimizer steps."""
        return tensor.numel() == self._num_owned and (tensor.ndim > 0 or self._num_owned == 0)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements of a gradient or of optimizer state that `fits`."""
        return self._cut(tensor) if self.owner is self.flat else tensor

    def of_whole(self, flat: Tensor) -> Tensor:
        """Return the elements of the whole parameter in a whole FlatParameter or its gradient."""
        return flat[self.begin : self.begin + math.prod(self.shape)].view(self.shape)

    @property
    def _num_owned(self) -> int:
        is_flat = self.owner is self.flat
        return math.prod(self.flat._sharded_size) if is_flat else self.numel

    def _cut(self, flat: Tensor) -> Tensor:
        own = flat.reshape(-1)[self.first : self.first + self.numel]
        return own.view(self.shape) if self.piece is None else own


def piece_of(
    begin: int, size: int, num_held: int, rank: int, ranks: Sequence[int]
) -> tuple[Piece, int]:
    """Return a rank's piece of a parameter, and where the piece begins in the rank's part.

    The parameter has `size` elements and begins at element `begin` of the flat tensor. Each rank in
    `ranks` has `num_held` elements of the flat tensor. `rank` is the index of this rank in `ranks`.
    """
    own = rank * num_held
    at, end = (min(max(place - begin, 0), size) for place in (own, own + num_held))
    last = max(begin, begin + size - 1)
    piece = Piece(
        offset=(at,),
        shape=(end - at,),
        whole=(size,),
        ranks=tuple(ranks[begin // num_held : last // num_held + 1]),
    )
    return piece, max(begin - own, 0)


# --- FlatParameters -------------------------------------------------------------------------------


class WithinPass:
    """A whole parameter during a backward pass. Hooks get its part of the gradient of `flat`.

    The gradient is this rank's own, before the reduction.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call `hook` as a tensor would; return the handle that removes it."""
        return self._part.flat.register_hook(partial(self._call, hook))

    def _call(self, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        changed = hook(self._part.of_whole(gradient))
        if changed is None:
            return None
        copy = gradient.clone()
        self._part.of_whole(copy).copy_(changed)
        return copy


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return name -> Part, for the parameters of `model` that are parts of flat tensors."""
    parts: dict[str, Part] = {
        tensors.plain_name(name): part for name, part in zero_parts_of(model).items()
    }
    for prefix, module in _wrappers(model):
        parts.update(_of_handle(prefix, module._handle))
    return parts


def _when_whole_in_flat(model: nn.Module, call: Callable[[str, Any], Any]) -> list[Any]:
    parts = parts_of(model).items()
    return [
        call(name, part.parameter if isinstance(part, Partition) else WithinPass(part))
        for name, part in parts
        if part.owner.requires_grad
    ]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's plain name and this rank's part; shared ones once for each name."""
    yield from not_flat(model, remove_duplicate=False)
    weights = {
        name: part.weights().requires_grad_(part.owner.requires_grad)
        for name, part in parts_of(model).items()
    }
    yield from weights.items()
    yield from ((name, weights[first]) for name, first in _shared(model))


def not_flat(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield plain name and tensor of each parameter that is in no FlatParameter."""
    flat = {*parts_of(model), *(name for name, _ in _shared(model))}
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        plain = tensors.plain_name(name)
        if plain not in flat and plain.rpartition(".")[2] != "_flat_param":
            yield plain, parameter


def layout_of(model: nn.Module, world_size: int) -> Layout | None:
    """Return the arrangement of ranks that flat parameters show; None without flat parameters.

    Raises UsageError if it doesn't arrange all ranks.
    """
    zero = _zero_axes(model)
    shown = [zero] if zero is not None else [_axes(module) for _, module in _wrappers(model)]
    if not shown:
        return None
    where = "FullyShardedDataParallel" if zero is None else "DeepSpeed's ZeRO"
    axes = next((one for one in shown if "dp" not in one), shown[0])
    if math.prod(axes.values()) != world_size:
        raise UsageError(
            f"{where} does not show how all {world_size} ranks are arranged: {tensors.DECLARE}"
        )
    return Layout(axes=layout.require(axes, world_size, where))


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield tensors.plain_name(path), module


def _axes(module: Any) -> dict[str, int]:
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
    """Return this rank's piece of a parameter, and where the piece begins in the rank's part.

    The parameter has `size` elements and begins at element `begin` of the FlatParameter. The piece
    is None if the rank has all of the parameter.
    """
    if not handle.uses_sharded_strategy:
        return None, begin
    ranks = dist.get_process_group_ranks(handle.process_group)
    return piece_of(begin, size, math.prod(handle.flat_param._sharded_size), handle.rank, ranks)


def _shared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each other name of a parameter in a flat tensor, with its first name."""
    yield from _shared_in_zero(model)
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


# --- DeepSpeed's partitions -----------------------------------------------------------------------


_STAGE_3 = "fp32_partitioned_groups_flat"
# The attribute with the partitions that ranks step -> the attribute with the groups of parameters
# in them. They are for stages 1 and 2, for 16-bit models with sums in float32, and for stage 3.
_GROUPS = {
    "single_partition_of_fp32_groups": "round_robin_bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
    _STAGE_3: "fp16_groups",
}


@dataclass(frozen=True, eq=False)
class Partition(Part):
    """A parameter of the model, as a place in the partitions of the ZeRO optimizer `zero`.

    `group` is the index of the parameter's group in `zero`; None if no optimizer steps the
    parameter.
    """

    zero: Any
    parameter: Any
    group: int | None

    def gradient(self) -> Tensor | None:
        """Return this rank's elements of the gradient to apply, or else of the last reduced one.

        None if neither exists.
        """
        applied: Tensor | None = self.owner.grad
        if self.group is None and applied is not None and self.piece is not None:
            # Each rank has the whole gradient: cut out this rank's elements.
            return applied.reshape(-1)[self.piece.offset[0] :][: self.numel]
        if applied is not None:
            return self.of(applied) if self.fits(applied) else None
        reduced = self._reduced()
        scale = float(getattr(self.zero, "loss_scale", 1.0))
        return reduced if reduced is None or scale == 1.0 else reduced / scale

    def _reduced(self) -> Tensor | None:
        if self.group is None:
            return None
        if hasattr(self.zero, _STAGE_3):
            if self.zero.averaged_gradients.get(self.group) is None:
                return None
            local = self.zero.get_local_fp32_grad_for_param(self.parameter)
            return self._shaped(local.reshape(-1)[: self.numel])
        mapping = getattr(self.parameter, "_hp_mapping", None)
        if mapping is None:
            return self.owner.detach().new_empty(0)
        try:
            fragment = mapping.get_lp_grad_fragment(self.parameter._index_in_param_group)
        except ValueError:  # the mapping has no gradients between two steps
            return None
        own, address = fragment.reshape(-1), mapping.lp_fragment_address
        if own.numel() == self.parameter.numel():
            own = own[address.start : address.start + address.numel]
        return self._shaped(own)

    def _shaped(self, own: Tensor) -> Tensor:
        return own.view(self.shape) if self.piece is None else own

    @property
    def _num_owned(self) -> int:
        return self.flat.numel() if self.owner is self.flat else self.numel


class ZeroSteps:
    """Calls `begins` before each step of a ZeRO optimizer, and `ends` after each step.

    The argument of `ends` is true if the optimizer skipped the step because gradients were not
    finite. Torch's own step hooks don't report these steps: they run once per partition, for the
    optimizer inside the ZeRO optimizer.
    """

    def __init__(self, zero: Any, begins: Callable[[], Any], ends: Callable[[bool], Any]) -> None:
        self._zero, original = zero, zero.step
        begins, ends = hook_calls.outside(begins), hook_calls.outside(ends)

        def step(*given: Any, **named: Any) -> Any:
            begins()
            result = original(*given, **named)
            ends(bool(getattr(zero, "overflow", False)))
            return result

        zero.step = step

    def remove(self) -> None:
        """Restore the original step of the optimizer."""
        vars(self._zero).pop("step", None)


def zero_optimizer(model: nn.Module) -> Any | None:
    """Return the ZeRO optimizer of a model, or of a DeepSpeed engine; None if there is none."""
    if "deepspeed" not in sys.modules:
        return None
    linked = (
        getattr(parameter, name, None)
        for parameter in model.parameters()
        for name in ("_z3_optimizer", "_zero_optimizer")
    )
    held = (getattr(model, "optimizer", None), *linked)
    return next((zero for zero in held if _attributes_of(zero) is not None), None)


def zero_partitions(zero: Any) -> list[Tensor]:
    """Return the flat tensors of a ZeRO optimizer that its inner optimizer steps."""
    names = _attributes_of(zero)
    return [] if names is None else [*getattr(zero, names[0])]


def parameters_and_partitions(model: nn.Module) -> set[Tensor]:
    """Return a model's parameters, together with the partitions that a ZeRO optimizer steps."""
    return {*model.parameters(), *zero_partitions(zero_optimizer(model))}


def zero_groups(zero: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of the inner optimizer with all their tensors, as in a step.

    With stage 3 the groups have no tensors between two steps.
    """
    flats, groups = zero_partitions(zero), zero.optimizer.param_groups
    numbers = getattr(zero, "sub_group_to_group_id", range(len(flats)))
    return [
        {**group, "params": [flat for at, flat in enumerate(flats) if numbers[at] == number]}
        for number, group in enumerate(groups)
    ]


def zero_parts_of(model: nn.Module) -> dict[str, Partition]:
    """Return name -> partition of each parameter of `model` that a ZeRO optimizer partitions."""
    zero = zero_optimizer(model)
    if zero is None:
        return {}
    placed = {part.parameter: part for part in _placed(zero)}
    named = model.named_parameters()
    known = ((name, placed.get(p) or _unstepped(zero, p)) for name, p in named)
    return {name: part for name, part in known if part is not None}


def _shared_in_zero(model: nn.Module) -> Iterator[tuple[str, str]]:
    first = {part.parameter: name for name, part in zero_parts_of(model).items()}
    for name, parameter in model.named_parameters(remove_duplicate=False) if first else ():
        if first.get(parameter, name) != name:
            yield name, first[parameter]


def _zero_axes(model: nn.Module) -> dict[str, int] | None:
    zero = zero_optimizer(model)
    if zero is None:
        return None
    sizes = {dist.get_world_size(group) for group in _process_groups(zero)}
    return {"fsdp": min(sizes)} if sizes else None


def _process_groups(zero: Any) -> Sequence[Any]:
    if hasattr(zero, _STAGE_3):
        held = [p for group in zero.fp16_groups for p in group]
        return [parameter.ds_process_group for parameter in held] or [zero.dp_process_group]
    return [*zero.real_dp_process_group]


def _attributes_of(zero: Any) -> tuple[str, str] | None:
    if not isinstance(getattr(zero, "optimizer", None), torch.optim.Optimizer):
        return None
    return next((names for names in _GROUPS.items() if hasattr(zero, names[0])), None)


def _placed(zero: Any) -> Iterator[Partition]:
    """Yield the partition of each parameter that a ZeRO optimizer steps."""
    names = _attributes_of(zero)
    if names is None:
        return
    held = getattr(zero, names[1])
    flats = zero_partitions(zero)
    for number, (parameters, flat) in enumerate(zip(held, flats, strict=True)):
        places = _places_of_stage_3 if names[0] == _STAGE_3 else _places_in_group
        for parameter, begin, first, piece in places(zero, number, parameters, flat):
            yield Partition(
                flat=flat,
                owner=flat,
                shape=_shape(parameter),
                begin=begin,
                first=first,
                piece=piece,
                zero=zero,
                parameter=parameter,
                group=number,
            )


def _places_in_group(
    zero: Any, number: int, parameters: Sequence[Tensor], flat: Tensor
) -> Iterator[tuple[Tensor, int, int, Any]]:
    """Yield, for each parameter of a group, its offset in the flat tensor and in this rank's part.

    The first item is the parameter itself. The last one is this rank's piece of it; None if the
    group has a single rank.
    """
    group = zero.real_dp_process_group[number]
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    offsets = getattr(zero, "round_robin_bit16_offsets", None)
    begin = 0
    for index, parameter in enumerate(parameters):
        begin = begin if offsets is None else offsets[number][index]
        piece, first = piece_of(begin, parameter.numel(), flat.numel(), rank, ranks)
        yield parameter, begin, first, piece if len(ranks) > 1 else None
        begin += parameter.numel()


def _places_of_stage_3(
    zero: Any, _number: int, parameters: Sequence[Any], _flat: Tensor
) -> Iterator[tuple[Tensor, int, int, Any]]:
    for parameter in parameters:
        first = zero.grad_position[zero.get_param_id(parameter)][1]
        yield parameter, 0, first, _piece_of_stage_3(parameter)


def _piece_of_stage_3(parameter: Any) -> Any:
    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    rank = dist.get_rank(parameter.ds_process_group)
    held = parameter.partition_numel()
    return piece_of(0, parameter.ds_numel, held, rank, ranks)[0] if len(ranks) > 1 else None


def _unstepped(zero: Any, parameter: Any) -> Partition | None:
    """Return the partition of a parameter that no optimizer steps.

    None if every rank has all of it.
    """
    if getattr(parameter, "ds_tensor", None) is None:
        return None
    return Partition(
        flat=parameter.ds_tensor,
        owner=parameter,
        shape=_shape(parameter),
        begin=0,
        first=0,
        piece=_piece_of_stage_3(parameter),
        zero=zero,
        parameter=parameter,
        group=None,
    )


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def zero_formats(model: nn.Module) -> set[str]:
    """Return the dtypes (such as bfloat16) of a model's passes if ZeRO's partitions are float32."""
    return {
        str(part.parameter.dtype).removeprefix("torch.") for part in zero_parts_of(model).values()
    }


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether passes gather the sharded parameters of `model`, or of a part of it.

    `fully_shard`, `FullyShardedDataParallel` and DeepSpeed's ZeRO do this.
    """
    kinds = (FSDPModule, FullyShardedDataParallel)
    sharded = any(isinstance(module, kinds) for module in model.modules())
    return sharded or zero_optimizer(model) is not None


# --- parameters that are whole during a pass ------------------------------------------------------


Found = Callable[[str, Any], Any]


def when_whole(model: nn.Module, call: Found) -> list[Any]:
    """Call `call(name, tensor)` for each trainable parameter when it is whole for the first time.

    For a parameter in a flat tensor, `call` is called at once, with an object that accepts hooks
    like a tensor. Returns the hooks that make the calls. These hooks start no collective, and
    examine only parameters that a forward pass has already gathered.
    """
    known: set[Tensor] = set()

    @hook_calls.outside
    def look(prefix: str, module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters():
            whole = not isinstance(parameter, DTensor)
            if whole and parameter.requires_grad and parameter not in known:
                known.add(parameter)
                call(tensors.plain_name(f"{prefix}.{name}" if prefix else name), parameter)

    hooked = _when_whole_in_flat(model, call)
    for prefix, module in model.named_modules():
        if isinstance(cast(object, module), FSDPModule):
            look(prefix, module)  # the current pass has already gathered some parameters
            hooked.append(module.register_forward_pre_hook(partial(look, prefix)))
    return hooked
