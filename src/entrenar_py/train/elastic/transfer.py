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


def broadcast(state: Any, group: Group, *, source: int, wait: Wait) -> Any:
    """Return the state of rank `source` on every rank. `state` is None on the others.

    It consists of tensors and of what torch.load accepts with `weights_only`, in lists, tuples and
    dicts. Tensors are on the CPU or on the group's device, on all ranks alike. First it is sent
    with empty tensors of the device "meta", which have a shape and a dtype. Raises UsageError if it
    has something else.
    """

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor of the source on `device`."""
        moved = tensor.detach().contiguous().to(group.device)
        if tensor.numel():  # as bytes: gloo doesn't know every dtype
            wait(group.broadcast(moved.view(-1).view(torch.uint8), source=source))
        return moved.to(device)

    cpu = torch.device("cpu")
    if state is not None:
        parts = [part for part in pytree.tree_leaves(state) if isinstance(part, Tensor)]
        empty = pytree.tree_map_only(Tensor, _without_data, state)
        file = io.BytesIO()
        torch.save((empty, [part.device == cpu for part in parts]), file)
        _load(file.getvalue())  # or no rank could
        header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        sent(torch.tensor([len(header)]), cpu)
        sent(header, cpu)
        for part in parts:
            sent(part, part.device)
        return state
    length = int(sent(torch.zeros(1, dtype=torch.int64), cpu))
    header = sent(torch.zeros(length, dtype=torch.uint8), cpu)
    empty, on_cpu = _load(bytes(header.numpy()))
    devices = (cpu if one else group.device for one in on_cpu)
    return pytree.tree_map_only(
        Tensor,
        lambda meta: sent(
            torch.empty(meta.shape, dtype=meta.dtype, device=group.device), next(devices)
        ),
        empty,
    )


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _load(frame: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(frame), weights_only=True)
    except Exception as error:
        raise UsageError(
            f"a state_dict that ranks exchange can't be read: {error}; allowed are tensors, "
            "numbers, text, and lists, tuples and dicts of these"
        ) from error
