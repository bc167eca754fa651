"""Parameters that are whole while a rank computes, of which `fully_shard` keeps pieces.

The gradient that a backward pass adds to a whole parameter is this rank's own; that of a piece is
the sum of all ranks'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from entrenar_py.observing import gradients_ready, tensors

Found = Callable[[str, Tensor], None]


def when_whole(model: nn.Module, found: Found) -> list[Any]:
    """Call `found` with name and tensor of each trainable parameter when it is first whole.

    Returns the hooks that do so. They call no collective: they look at what forward passes have
    put together.
    """
    known: set[Tensor] = set()

    def look(prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            whole = not isinstance(parameter, DTensor)
            if whole and parameter.requires_grad and parameter not in known:
                known.add(parameter)
                found(tensors.plain_name(f"{prefix}.{name}" if prefix else name), parameter)

    return [
        module.register_forward_pre_hook(lambda module, _, prefix=prefix: look(prefix, module))
        for prefix, module in model.named_modules()
        if isinstance(cast(object, module), FSDPModule)
    ]


class BackwardPasses:
    """Calls `begun` before a backward pass of a model in pieces, and `ended` after it.

    `ended` is told whether all that the pass added to whole parameters is finite. In a piece of
    the sum that could not be told: it has the terms of all ranks.
    """

    def __init__(self, begun: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._begun, self._ended = begun, ended
        self._ending = False  # whether the end of this one will be heard of
        self._finite = True

    def watch(self, model: nn.Module) -> list[Any]:
        """Look at what passes add to whole parameters; return the hooks that do so."""
        return when_whole(model, lambda _, whole: whole.register_hook(self._look))  # type: ignore[no-untyped-call]

    def expect(self, output: Any) -> None:
        """Note that a forward pass gave `output`, where the backward pass begins.

        Hooks on the pieces can't tell its end: they are called when a sum is reduced.
        """
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _look(self, gradient: Tensor) -> None:
        self._finite &= tensors.is_finite([gradient])

    def _begin(self, _: Tensor) -> None:
        if not self._ending:
            self._ending = True
            self._begun()
            gradients_ready.call_last(self._end)

    def _end(self) -> None:
        finite, self._ending, self._finite = self._finite, False, True
        self._ended(finite)
