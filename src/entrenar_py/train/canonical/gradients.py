"""Adds the gradients of one rank's micro-batches along the tree, one micro-batch after another.

A binary counter: after k micro-batches, it holds one tree node for each bit set in k, the sum of as
many micro-batches as the bit's value. Before the last of 2^i micro-batches, all levels have a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Gradients = dict[Tensor, Tensor]  # parameter -> gradient


class Counter:
    """The tree nodes whose right sibling is not computed yet, from the leaves up."""

    def __init__(self) -> None:
        self._levels: list[Gradients] = []

    def push(self, node: Gradients) -> None:
        """Add the next micro-batch's gradients. The counter owns `node` and changes it in place."""
        for level, older in enumerate(self._levels):
            if not older:
                self._levels[level] = node
                return
            add(older.values(), node.values())
            node, self._levels[level] = older, {}
        self._levels.append(node)

    def complete(self, parameters: Iterable[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add the pending nodes of `parameters` to the last micro-batch's `gradients`, in place."""
        parameters = list(parameters)
        for waiting in self._levels:
            add(gradients, [waiting.pop(one) for one in parameters])

    def clear(self) -> None:
        """Drop all pending nodes."""
        self._levels.clear()


def take(parameters: Iterable[Tensor]) -> Gradients:
    """Return the gradients of `parameters` and reset each `.grad` to None.

    Parameters without a gradient are left out.
    """
    taken = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter], parameter.grad = parameter.grad, None
    return taken


def add(into: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Add `others` to `into` in place, pair by pair, with one fused call for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(into, others, strict=True):
        ours, theirs = by_dtype.setdefault(one.dtype, ([], []))
        ours.append(one)
        theirs.append(other)
    for ours, theirs in by_dtype.values():
        torch._foreach_add_(ours, theirs)
