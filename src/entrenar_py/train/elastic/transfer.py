"""Broadcasts a state with tensors, each tensor by a collective of its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.elastic.group import Group

Wait = Callable[[dist.Work], None]


def broadcast(state: Any, group: Group, *, source: int, wait: Wait) -> Any:
    """Return the state of rank `source` on every rank. `state` is None on the others.

    It consists of tensors and of what torch.load accepts with `weights_only`, in lists, tuples and
    dicts. First it is sent with empty tensors of the device "meta", which have a shape and a dtype.
    Raises UsageError if it has something else.
    """

    def sent(tensor: Tensor) -> Tensor:
        if tensor.numel():  # as bytes: gloo doesn't know every dtype
            wait(group.broadcast(tensor.view(-1).view(torch.uint8), source=source))
        return tensor

    if state is not None:
        frame = io.BytesIO()
        torch.save(pytree.tree_map_only(Tensor, _without_data, state), frame)
        _load(frame.getvalue())  # or no rank could
        header = torch.frombuffer(bytearray(frame.getvalue()), dtype=torch.uint8)
        sent(torch.tensor([len(header)]))
        sent(header)
        for part in pytree.tree_leaves(state):
            if isinstance(part, Tensor):
                sent(part.detach().contiguous())
        return state
    length = int(sent(torch.zeros(1, dtype=torch.int64)))
    frame_of_source = bytes(sent(torch.zeros(length, dtype=torch.uint8)).numpy())
    return pytree.tree_map_only(
        Tensor,
        lambda meta: sent(torch.empty(meta.shape, dtype=meta.dtype)),
        _load(frame_of_source),
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
