"""Broadcasts a state with tensors, each tensor by a collective of its own."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.elastic.exchange import Wait
from entrenar_py.train.elastic.group import Group

_CPU = torch.device("cpu")


def broadcast(state: Any, group: Group, *, source: int, wait: Wait, keeps: bool = True) -> Any:
    """Return the state of rank `source`. `state` is None on the others.

    It consists of tensors and of what torch.load accepts with `weights_only`, in lists, tuples and
    dicts. Tensors are on the CPU or on the group's device, on all ranks alike, and keep their
    strides if they have no gaps. First the state is sent with empty tensors of the device "meta". A
    rank that doesn't keep it takes part, returns None, and has one tensor in memory at a time.
    Raises UsageError if the state has something else.
    """

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor of the source on `device`."""
        moved = tensor.detach().to(group.device)
        if not _is_dense(moved):
            moved = moved.contiguous()
        if moved.numel():  # as bytes, in the order of memory: gloo doesn't know every dtype
            flat = moved.as_strided((moved.numel(),), (1,))
            wait(group.broadcast(flat.view(torch.uint8), source=source))
        return moved.to(device)

    if state is not None:
        parts = [part for part in pytree.tree_leaves(state) if isinstance(part, Tensor)]
        empty = pytree.tree_map_only(Tensor, _without_data, state)
        file = io.BytesIO()
        torch.save((empty, [part.device == _CPU for part in parts]), file)
        _load(file.getvalue())  # or no rank could
        header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        sent(torch.tensor([len(header)]), _CPU)
        sent(header, _CPU)
        for part in parts:
            sent(part, part.device)
        return state
    length = int(sent(torch.zeros(1, dtype=torch.int64), _CPU))
    header = sent(torch.zeros(length, dtype=torch.uint8), _CPU)
    empty, on_cpu = _load(bytes(header.numpy()))
    devices = (_CPU if one else group.device for one in on_cpu)

    def received(meta: Tensor) -> Tensor | None:
        tensor = sent(torch.empty_like(meta, device=group.device), next(devices))
        return tensor if keeps else None

    whole = pytree.tree_map_only(Tensor, received, empty)
    return whole if keeps else None


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _load(frame: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(frame), weights_only=True)
    except Exception as error:
        raise UsageError(
            f"a state_dict that ranks exchange can't be read: {error}; allowed are tensors, "
            "numbers, text, and lists, tuples and dicts of these"
        ) from error
