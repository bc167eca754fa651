"""The gradients of one rank's micro-batches, folded along the tree while they come.

A binary counter: after k of them it holds one node for every bit that is set in k, over as many
micro-batches as that bit is worth. The last one of a power of two finds a node on every level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Gradients = dict[Tensor, Tensor]  # parameter -> gradient


class Counter:
    """The nodes that wait for their siblings, leaves first; empty at the start of a batch."""

    def __init__(self) -> None:
        self._levels: list[Gradients] = []

    def push(self, node: Gradients) -> None:
        """Take over the next micro-batch's gradients; the counter adds to them in place."""
        for level, older in enumerate(self._levels):
            if not older:
                self._levels[level] = node
                return
            add(older.values(), node.values())
            node, self._levels[level] = older, {}
        self._levels.append(node)

    def complete(self, parameters: Iterable[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add all that waits to the last micro-batch's `gradients`, shaped as `parameters`."""
        parameters = list(parameters)
        for waiting in self._levels:
            add(gradients, [waiting.pop(one) for one in parameters])

    def clear(self) -> None:
        """Drop what waits."""
        self._levels.clear()


def take(parameters: Iterable[Tensor]) -> Gradients:
    """Take the `.grad` of `parameters` from them, so that the next one is its own micro-batch's.

    A parameter without one is left out.
    """
    taken = {}
    for one in parameters:
        if one.grad is not None:
            taken[one], one.grad = one.grad, None
    return taken


def add(into: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """`into += others`, tensor by tensor, in few launches: those of one dtype at once."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(into, others, strict=True):
        ours, theirs = by_dtype.setdefault(one.dtype, ([], []))
        ours.append(one)
        theirs.append(other)
    for ours, theirs in by_dtype.values():
        torch._foreach_add_(ours, theirs)
