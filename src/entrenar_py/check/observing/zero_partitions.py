"""The parameters of a model that DeepSpeed's ZeRO optimizers step in flat partitions.

Each rank has, in float32, an equal part of the parameters: of a group's, one after another (stages
1 and 2), or of each one (stage 3). The script's optimizer steps these partitions, one after the
other, within the step of DeepSpeed's. What is recorded are the partitions. The model computes with
copies of them, in its own format, which DeepSpeed brings together for all ranks.

DeepSpeed documents how to read them (`safe_get_local_grad`, `safe_get_full_fp32_param`), but calls
collectives at stages 1 and 2. So `_hp_mapping` is read here, which these calls read themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrenar_py.check.observing.flat_parts import Part, piece_of
from entrenar_py.shared import hook_calls

_STAGE_3 = "fp32_partitioned_groups_flat"
# By the name of the partitions that ranks step: that of the groups of parameters in them. The names
# are those of stages 1 and 2, of 16 bits that are added in float32, and of stage 3.
_GROUPS = {
    "single_partition_of_fp32_groups": "round_robin_bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
    _STAGE_3: "fp16_groups",
}


@dataclass(frozen=True, eq=False)
class Partition(Part):
    """A parameter of the model in the partitions of the ZeRO optimizer `zero`.

    It is in group `group` of these; None if no optimizer steps it.
    """

    zero: Any
    parameter: Any
    group: int | None

    def gradient(self) -> Tensor | None:
        """Return this rank's elements of the gradient that is applied, or was reduced last."""
        applied: Tensor | None = self.owner.grad
        if self.group is None and applied is not None and self.piece is not None:
            return applied.reshape(-1)[self.piece.offset[0] :][: self.numel]  # whole, and its own
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
            held = mapping.get_lp_grad_fragment(self.parameter._index_in_param_group)
        except ValueError:  # between two steps
            return None
        own, address = held.reshape(-1), mapping.lp_fragment_address
        if own.numel() == self.parameter.numel():
            own = own[address.start : address.start + address.numel]
        return self._shaped(own)

    def _shaped(self, own: Tensor) -> Tensor:
        return own.view(self.shape) if self.piece is None else own

    @property
    def _num_owned(self) -> int:
        return self.flat.numel() if self.owner is self.flat else self.numel


class Steps:
    """Calls `begins` before the steps of a ZeRO optimizer, and `ends` after them.

    `ends` is told whether the step was skipped, as gradients were not finite. Torch has no hooks of
    these steps: it sees those of the optimizer inside, one for each partition.
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
        """Have the optimizer step as before."""
        vars(self._zero).pop("step", None)


def optimizer_of(model: nn.Module) -> Any | None:
    """Return the ZeRO optimizer of a model, or of DeepSpeed's engine; None if there is none."""
    if "deepspeed" not in sys.modules:
        return None
    linked = (
        getattr(parameter, name, None)
        for parameter in model.parameters()
        for name in ("_z3_optimizer", "_zero_optimizer")
    )
    held = (getattr(model, "optimizer", None), *linked)
    return next((zero for zero in held if _names(zero) is not None), None)


def partitions(zero: Any) -> list[Tensor]:
    """Return the flat tensors that a ZeRO optimizer has the optimizer inside of it step."""
    names = _names(zero)
    return [] if names is None else [*getattr(zero, names[0])]


def parameters_of(model: nn.Module) -> set[Tensor]:
    """Return the parameters of a model, with the partitions of these that its optimizer steps."""
    return {*model.parameters(), *partitions(optimizer_of(model))}


def groups(zero: Any) -> list[dict[str, Any]]:
    """Return the groups of the optimizer inside, with all tensors of each, as they are in a step.

    Between two steps those of stage 3 have none.
    """
    flats, held = partitions(zero), zero.optimizer.param_groups
    numbers = getattr(zero, "sub_group_to_group_id", range(len(flats)))
    return [
        {**group, "params": [flat for at, flat in enumerate(flats) if numbers[at] == number]}
        for number, group in enumerate(held)
    ]


def of(model: nn.Module) -> dict[str, Partition]:
    """Return by name the parameters of `model` of which a ZeRO optimizer has partitions."""
    zero = optimizer_of(model)
    if zero is None:
        return {}
    placed = {part.parameter: part for part in _placed(zero)}
    named = model.named_parameters()
    known = ((name, placed.get(p) or _unstepped(zero, p)) for name, p in named)
    return {name: part for name, part in known if part is not None}


def shared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each further name of a parameter that a ZeRO optimizer has, with its first one."""
    first = {part.parameter: name for name, part in of(model).items()}
    for name, parameter in model.named_parameters(remove_duplicate=False) if first else ():
        if first.get(parameter, name) != name:
            yield name, first[parameter]


def axes_of(model: nn.Module) -> dict[str, int] | None:
    """Return how ranks share the work by a ZeRO optimizer; None if there is none."""
    zero = optimizer_of(model)
    if zero is None:
        return None
    sizes = {dist.get_world_size(group) for group in _process_groups(zero)}
    return {"fsdp": min(sizes)} if sizes else None


def _process_groups(zero: Any) -> Sequence[Any]:
    if hasattr(zero, _STAGE_3):
        held = [p for group in zero.fp16_groups for p in group]
        return [parameter.ds_process_group for parameter in held] or [zero.dp_process_group]
    return [*zero.real_dp_process_group]


def _names(zero: Any) -> tuple[str, str] | None:
    """Return the attributes of the partitions and of the parameters; None if it is no ZeRO's."""
    if not isinstance(getattr(zero, "optimizer", None), torch.optim.Optimizer):
        return None
    return next((names for names in _GROUPS.items() if hasattr(zero, names[0])), None)


def _placed(zero: Any) -> Iterator[Partition]:
    """Yield the parameters that a ZeRO optimizer steps."""
    names = _names(zero)
    if names is None:
        return
    held = getattr(zero, names[1])
    flats = partitions(zero)
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
    """Yield the parameters of a group that lie one after another, with their places."""
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
    """Yield the parameters of each of which every rank has a part, with their places."""
    for parameter in parameters:
        first = zero.grad_position[zero.get_param_id(parameter)][1]
        yield parameter, 0, first, _piece_of_stage_3(parameter)


def _piece_of_stage_3(parameter: Any) -> Any:
    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    rank = dist.get_rank(parameter.ds_process_group)
    held = parameter.partition_numel()
    return piece_of(0, parameter.ds_numel, held, rank, ranks)[0] if len(ranks) > 1 else None


def _unstepped(zero: Any, parameter: Any) -> Partition | None:
    """Return the place of a parameter that no optimizer steps; None if each rank has all of it."""
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


def formats_of(model: nn.Module) -> set[str]:
    """Return the formats in which a model with partitions in float32 computes."""
    return {str(part.parameter.dtype).removeprefix("torch.") for part in of(model).values()}
