"""Backward passes: what DistributedDataParallel makes of their gradients, and when one is over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


def is_reduced() -> bool:
    """Whether the gradients of the forward pass in hand will be reduced when its backward pass is
    over: under DistributedDataParallel's `no_sync` they will not, and that is decided now.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    return wrapper is None or wrapper.require_backward_grad_sync


def compression() -> str:
    """In what the communication hook of DistributedDataParallel sends the gradients of the forward
    pass in hand: `float16`, `bfloat16`, or the name of another of torch's that rounds; "" for none.
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
    """Has `call` made when this backward pass is over, behind all that others had queued when it
    began: so it is queued twice.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
