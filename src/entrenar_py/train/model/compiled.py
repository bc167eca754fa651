"""Compiles the blocks of a model by torch, so that runs of small operations become one kernel."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

_KINDS_MAX = 64  # kernels of one block, for shapes and masks that are computed in their own way


def compile_blocks(module: nn.Module) -> None:
    """Let torch compile each block of `module` when it is first called, once for all lengths.

    Blocks are the members of a list of layers that isn't within another one. Kernels are chosen by
    rules, never by timing, so that every process has the same.
    """
    from torch._inductor import config
    from torch.fx.experimental import _config as shapes

    cast("Any", config).deterministic = True
    # Else a length that happens to be the hidden size, too, would be taken for a constant.
    cast("Any", shapes).use_duck_shape = False
    dynamo = cast("Any", torch._dynamo.config)
    dynamo.recompile_limit = max(dynamo.recompile_limit, _KINDS_MAX)
    stacks = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    for name in stacks:
        if any(name.startswith(f"{other}.") for other in stacks):
            continue
        for block in cast("nn.ModuleList", module.get_submodule(name)):
            block.compile(dynamic=True)
