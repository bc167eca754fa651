"""Dropout by a key, and recomputation of blocks, which has to drop the same elements again.

What is dropped follows from a key, not from a generator's state. While `Masks` is entered, it
replaces torch's dropout functions, and attention with dropout. A mask is a function of the key, the
number of the call and an element's index, so it is the same on every device.

With recomputation, a block's intermediate tensors are freed, and computed again for its gradient.
Then memory holds the intermediate tensors of one block and the inputs of all blocks. It takes a
third more time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn, overrides
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from entrenar_py.compute import draws
from entrenar_py.train.model import blocks


class Masks(TorchFunctionMode):
    """A torch mode in which dropout draws by `key`, int32 [2]; without a key, nothing is dropped.

    `first` is the number of the next draw.
    """

    def __init__(self, key: Tensor | None, first: int = 0) -> None:
        super().__init__()
        self._key = key
        self._number = first

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replaced = _REPLACED.get(func)
        if replaced is None:
            return func(*args, **(kwargs or {}))
        return replaced(self, *args, **(kwargs or {}))

    @property
    def num_drawn(self) -> int:
        """The number of the next draw."""
        return self._number

    def go_on_at(self, number: int) -> None:
        """Set the number of the next draw."""
        self._number = number

    def again(self) -> Masks:
        """Return masks that repeat the draws of these from here on, to recompute a block."""
        return Masks(self._key, self._number)

    def drop(self, x: Tensor, share: float, shape: torch.Size, *, in_place: bool) -> Tensor:
        """Return `x` with elements dropped by a mask of `shape`, and all others scaled up."""
        if self._key is None or share == 0:
            return x
        kept = draws.kept(self._key, self._number, shape, share)
        self._number += 1
        factor = 1 / (1 - share) if share < 1 else 0.0
        if in_place:
            return x.mul_(kept.to(x.dtype) * factor)
        return torch.where(kept, x * factor, 0.0)  # keeps a byte per element for backward


def entered() -> Masks | None:
    """Return the masks that are entered now; None if there are none."""
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in reversed(modes) if isinstance(mode, Masks)), None)


def repetition() -> Masks:
    """Return masks that repeat the draws of the entered masks; if there are none, drop nothing."""
    found = entered()
    return Masks(None) if found is None else found.again()


def _dropout(
    masks: Masks, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return masks.drop(x, p, x.shape, in_place=inplace) if training else x


def _channel_dropout(rank: int) -> Callable[..., Tensor]:
    """Return the dropout of whole channels with `rank` dims each: x is [n, c, *] or [c, *]."""

    def replaced(
        masks: Masks, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        shape = torch.Size([*x.shape[: x.dim() - rank], *(1 for _ in range(rank))])
        return masks.drop(x, p, shape, in_place=inplace) if training else x

    return replaced


def _attention(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention; if weights are dropped, computed by matrix products and a softmax."""
    if not dropout_p:
        return F.scaled_dot_product_attention(
            *(query, key, value, attn_mask, 0.0, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    scores = query @ key.transpose(-2, -1)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1)
    return masks.drop(weights, dropout_p, weights.shape, in_place=False) @ value


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _channel_dropout(1),
    F.dropout2d: _channel_dropout(2),
    F.dropout3d: _channel_dropout(3),
    F.scaled_dot_product_attention: _attention,
}


def recompute(module: nn.Module) -> None:
    """Make every backward pass compute the decoder blocks of `module` again.

    The second pass draws the same random numbers, and gradients have the same bits as without
    recomputation. Raises UsageError if no blocks are found.
    """
    for block in blocks.of(module):
        block.forward = _Recomputed(block)


class _Recomputed:
    """A block's forward pass, which is computed again in the backward pass.

    A gradient may be taken with respect to tensors that are in the block only during the forward
    pass (torch.func.functional_call). So the second pass puts these tensors into the block again,
    which transformers' own checkpointing doesn't do.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._body = block, _Body(block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._body(*inputs, **named)
        held = dict(self._body.named_parameters()) | dict(self._body.named_buffers())
        return checkpoint(_Twice(), self._body, held, inputs, named, use_reentrant=False)


class _Twice:
    """Calls a module with given tensors. The second call repeats the first one's dropout.

    This is not done by the `context_fn` of checkpoints, which takes no such mode while a graph is
    captured.
    """

    def __init__(self) -> None:
        self._masks = repetition()
        self._is_first = True

    def __call__(self, *given: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return functional_call(*given)
        with self._masks.again():
            return functional_call(*given)


class _Body(nn.Module):
    """The block's own forward pass, as a module that has the names of its tensors."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._compute = block, block.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._compute(*inputs, **named)
