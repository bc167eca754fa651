"""Parameters that are whole while a rank computes, where `fully_shard` keeps pieces of them.

What a backward pass adds to a whole one is this rank's own; to a piece, everyone's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from entrenar_py.observing import backward, tensors

Found = Callable[[str, Tensor], None]


def when_whole(model: nn.Module, found: Found) -> list[Any]:
    """Has `found` told each trainable parameter's name and whole, once, when that is there first;
    the hooks that see to it.

    No collective is called: forward passes put parameters together, and this looks what they have.
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
    """Those of a model in pieces: `ended` is told of each, when it is over, whether what it added
    to whole parameters is finite. Of a piece of the sum nobody can say whose term was not. `begun`
    is called before it adds anything.
    """

    def __init__(self, begun: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._begun, self._ended = begun, ended
        self._ending = False  # whether the end of this one will be heard of
        self._finite = True

    def watch(self, model: nn.Module) -> list[Any]:
        """Looks at what is added; the hooks that see to it."""
        return when_whole(model, lambda _, whole: whole.register_hook(self._look))  # type: ignore[no-untyped-call]

    def expect(self, output: Any) -> None:
        """A forward pass gave `output`: the backward pass begins there.

        Hooks of the pieces are no sign of its end: they are called when a sum is reduced.
        """
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _look(self, gradient: Tensor) -> None:
        self._finite &= tensors.is_finite([gradient])

    def _begin(self, _: Tensor) -> None:
        if not self._ending:
            self._ending = True
            self._begun()
            backward.call_last(self._end)

    def _end(self) -> None:
        finite, self._ending, self._finite = self._finite, False, True
        self._ended(finite)
