"""The whole parameters that a rank computes with, of which `fully_shard` keeps pieces.

The gradient that a backward pass adds to a whole parameter is this rank's own. The gradient of a
piece is part of a sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.shared import hook_calls

Found = Callable[[str, Any], Any]


def when_whole(model: nn.Module, found: Found) -> list[Any]:
    """Call `found` with name and tensor of each trainable parameter when it is first whole.

    Of a FlatParameter it is called now, with what can be hooked as a tensor.

    Returns the hooks that do so. They call no collective, and look only at parameters that forward
    passes have gathered.
    """
    known: set[Tensor] = set()

    @hook_calls.outside
    def look(prefix: str, module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters():
            whole = not isinstance(parameter, DTensor)
            if whole and parameter.requires_grad and parameter not in known:
                known.add(parameter)
                found(tensors.plain_name(f"{prefix}.{name}" if prefix else name), parameter)

    hooked = flat_parameters.when_whole(model, found)
    for prefix, module in model.named_modules():
        if isinstance(cast(object, module), FSDPModule):
            look(prefix, module)  # the pass that has just begun has gathered some
            hooked.append(module.register_forward_pre_hook(partial(look, prefix)))
    return hooked
