"""How DistributedDataParallel reduces the gradients of a backward pass, and when one is over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


def is_reduced() -> bool:
    """Return whether the backward pass of the forward pass in hand will reduce its gradients.

    Under DistributedDataParallel's `no_sync` it won't; that is decided in the forward pass.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    return wrapper is None or wrapper.require_backward_grad_sync


def compression() -> str:
    """Return how the communication hook of DistributedDataParallel rounds gradients.

    That is `float16`, `bfloat16`, the name of another hook of torch's, or "" if nothing is rounded.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    for hook in hooks:
        if getattr(hook, "__module__", "").startswith(_HOOKS):
            name = str(getattr(hook, "__name__", ""))
            if name in _EXACT:
                continue
            return {"fp16": "float16", "bf16": "bfloat16"}.get(name.partition("_")[0], name)
    return ""


def call_last(call: Callable[[], None]) -> None:
    """Call `call` when this backward pass is over, after all callbacks that were queued by then.

    Others queue theirs while the pass begins: so `call` is queued by a callback.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
