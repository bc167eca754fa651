"""Recomputation of blocks: what one computes within is let go, and computed again for its gradient.

It takes the memory of one block's inside and of all blocks' inputs, and a third more time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from entrenar_py.train.model import blocks, masks


def install(module: nn.Module) -> None:
    """Let the decoder blocks of `module` be computed again in every backward pass.

    The second time they draw the same random numbers, and gradients have the same bits as without.
    Raises UsageError if no blocks are found.
    """
    for block in blocks.of(module):
        block.forward = _Recomputed(block)


class _Recomputed:
    """A block's forward pass, which is computed again.

    A gradient may be taken of tensors that stand in the block only during the forward pass
    (torch.func.functional_call). So they are put there again. transformers' own checkpoints don't.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._body = block, _Body(block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._body(*inputs, **named)
        held = dict(self._body.named_parameters()) | dict(self._body.named_buffers())
        return checkpoint(_Twice(), self._body, held, inputs, named, use_reentrant=False)


class _Twice:
    """Calls a module with other tensors; the second time, dropout repeats what it drew at first.

    Not by the `context_fn` of checkpoints, which takes no such mode while a graph is captured.
    """

    def __init__(self) -> None:
        self._masks = masks.repetition()
        self._is_first = True

    def __call__(self, *given: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return functional_call(*given)
        with self._masks.again():
            return functional_call(*given)


class _Body(nn.Module):
    """The block's own forward pass, with the names of its tensors."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._compute = block, block.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the block returns."""
        return self._compute(*inputs, **named)
