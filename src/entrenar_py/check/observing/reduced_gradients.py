"""The gradients that a step's backward passes have left, and how these were reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from entrenar_py.check.observing import tensors, zero_partitions

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


class ReducedGradients:
    """The gradients that the last backward pass left, with changes that the script made in place.

    They are kept after the parameters have dropped them. `was_reduced` tells whether the last
    backward pass was to reduce gradients, and left some (`fully_shard` hides unreduced ones).
    """

    def __init__(self) -> None:
        self._reduces = True
        self.was_reduced = True
        self._overflowed = False
        self._kept: dict[str, Tensor] = {}

    @property
    def left(self) -> Mapping[str, Tensor]:
        """The gradients that the last backward pass left, by name, if it reduced them."""
        return self._kept

    def expect(self, called: nn.Module) -> None:
        """Note, as a forward pass of `called` begins, whether its gradients will be reduced.

        Under a wrapper's `no_sync` they won't be; the forward pass decides that.
        """
        wrapper = _wrapper(called)
        self._reduces = wrapper is None or wrapper.require_backward_grad_sync
        if isinstance(called, FullyShardedDataParallel):
            self._reduces &= called._sync_gradients

    def look(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep the gradients that a backward pass has left, if it reduced them."""
        left = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self._kept = left if self._reduces else {}
        self.was_reduced = bool(self._kept)
        self._overflowed = not tensors.is_finite(self._kept.values())

    def has_overflowed(self) -> bool:
        """Return whether a reduced gradient is NaN or Inf now, or was when it was kept."""
        return self._overflowed or not tensors.is_finite(self._kept.values())

    def forget(self) -> None:
        """Forget the gradients: their step was made."""
        self._kept, self._overflowed = {}, False


def compression(model: nn.Module) -> str:
    """Return the format to which gradients are rounded before ranks add them.

    That is `float16`, `bfloat16`, the name of another communication hook of torch's, or "" without
    rounding. DistributedDataParallel's hook says so, or the policy of a sharded module, which may
    compute in 16 bits and add in 32. PowerSGD adds the gradients of the first steps as they are; a
    hook of the script's own may call it.
    """
    wrapper = _wrapper(model)
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        if isinstance(state, PowerSGDState):
            return "PowerSGD" if state.iter >= state.start_powerSGD_iter else ""
        name = str(getattr(hook, "__name__", ""))
        if getattr(hook, "__module__", "").startswith(_HOOKS) and name not in _EXACT:
            return {"fp16": "float16", "bf16": "bfloat16"}.get(name.partition("_")[0], name)
    formats = {name for module in model.modules() for name in _policy_formats(module)}
    formats |= zero_partitions.formats_of(model)
    return next((name for name in ("bfloat16", "float16") if name in formats), "")


def _wrapper(called: nn.Module) -> DistributedDataParallel | None:
    """Return torch's wrapper that is being called, or that compiled code is about to call."""
    active = DistributedDataParallel._active_ddp_module
    parts = (part for part in called.modules() if isinstance(part, DistributedDataParallel))
    return next(parts, None) if active is None else active


def _policy_formats(module: nn.Module) -> set[str]:
    """Return the formats in which a sharded module computes and reduces gradients."""
    formats: tuple[Any, ...] = ()
    if isinstance(module, FullyShardedDataParallel):
        if (handle := module._handle) is not None:
            formats = handle._fwd_bwd_param_dtype, handle._reduce_dtype
    elif isinstance(cast(object, module), FSDPModule):
        policy = cast(FSDPModule, module)._get_fsdp_state()._mp_policy
        formats = policy.param_dtype, policy.reduce_dtype
    return {str(name).removeprefix("torch.") for name in formats}
