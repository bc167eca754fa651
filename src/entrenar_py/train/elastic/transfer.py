"""Broadcasts a state with tensors, each by a collective of its own, and loads it bit by bit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
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


def load(holder: Any, state: Mapping[str, Any]) -> None:
    """Let `holder` load another rank's `state_dict`, with the same bits.

    Raises UsageError if an optimizer or a module changes a tensor.
    """
    sent = _tensors(state)
    holder.load_state_dict(state)
    if isinstance(holder, Optimizer) and {"state", "param_groups"} <= state.keys():
        _restore(holder, state)
    # Others may load when they are next used, and start processes when they are asked for a state.
    is_known = isinstance(holder, Optimizer | torch.nn.Module)
    loaded = _tensors(holder.state_dict()) if sent and is_known else {}
    for path in sent.keys() & loaded.keys():
        if _is_changed(loaded[path], sent[path]):
            raise UsageError(
                f"{type(holder).__name__}.load_state_dict changed the tensor "
                f"{pytree.keystr(path)} ({sent[path].dtype} on the rank that sent it, "
                f"{loaded[path].dtype} here): this rank would get other weights than the others; "
                "let it keep dtypes and bits"
            )


def _tensors(state: Any) -> dict[Any, Tensor]:
    """Return the tensors in a state by their paths."""
    leaves = pytree.tree_flatten_with_path(state)[0]
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _restore(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what torch's load_state_dict has cast to the dtype and the device of a weight."""
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        if number not in state["state"]:
            continue
        loaded, form = pytree.tree_flatten(optimizer.state[parameter])
        sent, form_sent = pytree.tree_flatten(state["state"][number])
        if form == form_sent:
            leaves = [_restored(*pair) for pair in zip(loaded, sent, strict=True)]
            optimizer.state[parameter] = pytree.tree_unflatten(leaves, form)


def _restored(own: Any, sent: Any) -> Any:
    """Return `sent` if it is a tensor that `own` differs from, and `own` otherwise."""
    both = isinstance(own, Tensor) and isinstance(sent, Tensor)
    return sent if both and (own.device != sent.device or _is_changed(own, sent)) else own


def _is_changed(own: Tensor, sent: Tensor) -> bool:
    """Return whether two tensors differ in dtype or bits. A NaN equals itself."""
    if (own.dtype, own.shape) != (sent.dtype, sent.shape):
        return True
    ours, theirs = (one.detach().reshape(-1).contiguous().view(torch.uint8) for one in (own, sent))
    return not torch.equal(ours, theirs.to(ours.device))


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _without_data(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the strides that `tensor` is sent with."""
    form = torch.preserve_format if _is_dense(tensor) else torch.contiguous_format
    return torch.empty_like(tensor, device="meta", memory_format=form)


def _load(frame: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(frame), weights_only=True)
    except Exception as error:
        raise UsageError(
            f"a state_dict that ranks exchange can't be read: {error}; allowed are tensors, "
            "numbers, text, and lists, tuples and dicts of these"
        ) from error
