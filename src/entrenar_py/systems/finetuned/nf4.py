"""Frozen weights in NF4: the trainer's, and those that stock `bitsandbytes` makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from entrenar_py.shared import trace
from entrenar_py.shared.trace import Tensors
from entrenar_py.systems.finetuned.frozen import name_in_checkpoint
from entrenar_py.systems.finetuned.small import Made
from entrenar_py.systems.finetuned.weights import weights_of
from entrenar_py.train.arithmetic.tensors import Array

_WITHIN_BLOCKS = re.compile(r"\.layers\.\d+\..*_proj\.weight$")  # of qwen3 and llama
_HEADS = ("lm_head.weight",)


def is_within_blocks(name: str) -> bool:
    """Return whether a weight of the checkpoint is one of a linear layer within a block."""
    return bool(_WITHIN_BLOCKS.search(name))


def decoded(made: Made) -> dict[str, Array]:
    """Return the checkpoint's weights; those within blocks as the numbers that NF4 stands for."""
    weights = weights_of(made.settings.model)
    for name, array in weights.items():
        if is_within_blocks(name):
            codes, state = _quantised(array)
            weights[name] = np.ascontiguousarray(_functional().dequantize_4bit(codes, state))
    return weights


def events(made: Made, module: nn.Module) -> Iterator[trace.Quantised]:
    """Yield the weight of each linear layer, as `module` has it, and in NF4 by `bitsandbytes`."""
    held = {name_in_checkpoint(name): layer for name, layer in _linear(module)}
    for name, array in weights_of(made.settings.model).items():
        if not (is_within_blocks(name) or name in _HEADS):
            continue
        weight = held[name].weight
        is_nf4 = getattr(weight, "quant_state", None) is not None
        yield trace.Quantised(
            layer=name.removesuffix(".weight"),
            due=is_within_blocks(name),
            held=_records(weight.data, weight.quant_state) if is_nf4 else {},
            stock=_records(*_quantised(array)),
        )


def _linear(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each layer with a matrix by the name of its weight."""
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and ".lora_" not in name:
            yield f"{name}.weight", layer


def _quantised(array: Array) -> tuple[Tensor, Any]:
    codes, state = _functional().quantize_4bit(
        torch.from_numpy(array), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return codes, state


def _records(codes: Tensor, state: Any) -> Tensors:
    """Return records of the codes, the scales' codes, their scales and mean, and both levels."""
    parts = {
        "codes": codes,
        "levels": state.code,
        "scales": state.absmax,
        **({"mean": state.offset, "second scales": state.state2.absmax} if state.nested else {}),
    }
    return {
        name: trace.record_tensor(np.ascontiguousarray(part.detach().cpu().numpy()))
        for name, part in parts.items()
    }


def _functional() -> Any:
    from bitsandbytes import functional

    return functional
