"""Parameters that are whole while a rank computes, where `fully_shard` keeps pieces of them.

What a backward pass adds to a whole one is this rank's own; to a piece, everyone's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from entrenar_py.observing import tensors

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
