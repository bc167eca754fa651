"""The decoder blocks of a model of transformers: the layers that are alike, one after another."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from entrenar_py.shared.errors import UsageError


def of(module: nn.Module) -> nn.ModuleList:
    """Return the blocks of `module`, in order.

    Raises UsageError if it has no list of as many layers as its configuration says.
    """
    return place_of(module)[1]


def place_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the blocks in `module`, and the blocks; raises as `of`."""
    config = cast("Any", module).config.get_text_config()
    number = getattr(config, "num_hidden_layers", None)
    for name, layers in module.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == number:
            return name, layers
    raise UsageError(
        f"model: {type(module).__name__} has no list of {number} blocks, which this needs; use "
        "strategy: ddp and recompute: none"
    )
