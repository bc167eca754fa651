"""The gradients that a step's backward passes have left, and how these were reduced."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from entrenar_py.observing import tensors

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


class ReducedGradients:
    """The gradients as the last backward pass left them, and as the script has changed them since.

    They are kept, to be looked at again when the parameters have them no more: a script that
    reduces them by hand does so in place. `was_reduced` tells whether the last backward pass was to
    reduce them, and left some: `fully_shard` keeps to itself what it has yet to reduce.
    """

    def __init__(self) -> None:
        self._reduces = True
        self.was_reduced = True
        self._overflowed = False
        self._kept: list[Tensor] = []

    def expect(self) -> None:
        """Note, as a forward pass begins, whether its gradients will be reduced.

        Under DistributedDataParallel's `no_sync` they won't; that is decided in the forward pass.
        """
        wrapper = DistributedDataParallel._active_ddp_module
        self._reduces = wrapper is None or wrapper.require_backward_grad_sync

    def look(self, gradients: Iterable[Tensor | None]) -> None:
        """Keep the gradients that a backward pass has left."""
        left = [gradient for gradient in gradients if gradient is not None]
        self._kept = left if self._reduces else []
        self.was_reduced = bool(self._kept)
        self._overflowed = not tensors.is_finite(self._kept)

    def has_overflowed(self) -> bool:
        """Return whether any gradient of a whole step is not finite, or was not."""
        return self._overflowed or not tensors.is_finite(self._kept)

    def forget(self) -> None:
        """Forget them: the step was made."""
        self._kept, self._overflowed = [], False


def compression() -> str:
    """Return how the communication hook of DistributedDataParallel rounds gradients.

    That is `float16`, `bfloat16`, the name of another hook of torch's, or "" if nothing is rounded.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    for hook, _ in getattr(wrapper, "_comm_hooks", ()):
        name = str(getattr(hook, "__name__", ""))
        if getattr(hook, "__module__", "").startswith(_HOOKS) and name not in _EXACT:
            return {"fp16": "float16", "bf16": "bfloat16"}.get(name.partition("_")[0], name)
    return ""
