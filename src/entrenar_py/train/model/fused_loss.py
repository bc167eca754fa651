"""A language model's last product and its cross entropy, without ever holding all logits.

Logits of 8,192 tokens over a vocabulary of 150,000 are 5 GB in float32, and autograd keeps several
copies. Here they are made for some hundred tokens at a time, and their gradient is taken at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from entrenar_py.train.model import precision
from entrenar_py.train.model.modes import in_evaluation

LOGITS_MAX = 2**26  # made at a time: 256 MiB in float32
_PROBED = (1, 2, 3, 4)  # tokens that every vocabulary has


def head_of(module: nn.Module) -> nn.Linear | None:
    """Return the layer that makes the logits of `module`, or None if more than it makes them.

    Logits that are capped or scaled afterwards are not its outputs, and an adapter on it is more
    than a product. Runs the model on four tokens.
    """
    head = cast("Any", module).get_output_embeddings()
    if not _is_plain(head):
        return None
    place = head.weight.device
    tokens = torch.tensor([_PROBED], device=place)
    with in_evaluation(module):
        logits = module(input_ids=tokens, use_cache=False).logits
        with replaced_by_identity(head):
            hidden = module(input_ids=tokens, use_cache=False).logits
        is_last = (
            hidden.shape[-1] == head.in_features
            and hidden.dtype == head.weight.dtype  # some convert what they give the head
            and torch.equal(head(hidden), logits)
        )
    return cast("nn.Linear", head) if is_last else None


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.bias is None


@contextlib.contextmanager
def replaced_by_identity(head: nn.Linear) -> Iterator[None]:
    """Let `head` return its input: the model then returns the last hidden state as its logits."""
    head.forward = _identity  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy of `hidden @ weight.T`, 0-d float32.

    `hidden` is [m, d], `weight` [vocabulary, d], and `targets` int64 [m], negative where there is
    none. The products have the format of torch.autocast, where that is on.
    """
    dtype = precision.current(hidden.device)
    if dtype != torch.float32:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with precision.as_given(hidden.device):
        result: Tensor = _CrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return result


def select(hidden: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `hidden`, [n, d], at `places`, int64 [m], which ascend: [m, d].

    The first of equal places has the gradient of their row. Unlike `Tensor.index_select`, whose
    deterministic derivative reads the places on the host, no pass waits for a device.
    """
    result: Tensor = _Select.apply(hidden, places)  # type: ignore[no-untyped-call]
    return result


class _Select(torch.autograd.Function):
    """See `select`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(hidden)
        return hidden.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of `hidden`."""
        [places] = ctx.saved_tensors
        rows = torch.arange(ctx.num_rows, device=places.device)
        found = torch.searchsorted(places, rows).clamp_(max=len(places) - 1)
        is_there = places.index_select(0, found) == rows
        return gradient.index_select(0, found) * is_there[:, None], None


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. The gradients are computed in the forward pass, at scale 1."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        loss = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        tokens = torch.arange(len(weight), device=targets.device)
        rows = max(1, LOGITS_MAX // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ weight.t()
            shares = logits.log_softmax(-1, dtype=torch.float32)
            wanted, counts = targets[part, None], targets[part, None] >= 0
            loss -= (shares.gather(1, wanted.clamp(min=0)) * counts).sum()
            # Not by scatter: a kernel of it that is deterministic reads the targets on the host.
            gradient = shares.exp_().sub_((tokens == wanted).view(torch.uint8)).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
                of_hidden[part] *= counts
            if of_weight is not None:
                of_weight += gradient.t() @ (hidden[part] * counts)
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of `hidden` and `weight`, times that of the loss."""
        of_hidden, of_weight = (
            None if one is None else one * scale.to(one.dtype) for one in ctx.saved_tensors
        )
        return of_hidden, of_weight, None
