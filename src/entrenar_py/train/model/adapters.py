"""Puts adapters into a model by `peft`, and tells which layers can have one."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.model import fitting
from entrenar_py.train.model.settings import Settings

HEADS = ("classifier", "score")  # peft adds these to what is trained whole
_SHOWN = 12  # layers in a message
_TOLD_CHARS = 300


def adapted(settings: Settings, module: Any, new: Sequence[str]) -> nn.Module:
    """Return `module` with adapters. Its `new` parts are trained whole, and saved with them."""
    import peft

    lora, beside = settings.lora, _within(fitting.beside_text(module))
    _require_targets(lora.targets, module, new, beside)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast("Any", lora.alpha),  # divided by the rank, and need not be whole
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        exclude_modules=beside,
        modules_to_save=[name for name in new if name not in HEADS],
        task_type="SEQ_CLS" if settings.task == "classify" else "CAUSAL_LM",
    )
    try:
        with quiet():
            adapted: nn.Module = peft.get_peft_model(module, config)
    except (TypeError, ValueError) as error:
        told = escaping.shortened(" ".join(str(error).split()), chars_max=_TOLD_CHARS)
        raise UsageError(
            f"lora.targets={', '.join(lora.targets)}: peft can't adapt all of them ({told}); leave "
            "that layer out"
        ) from error
    return adapted


def _require_targets(
    targets: Sequence[str], module: nn.Module, new: Sequence[str], beside: str | None
) -> None:
    """Raise UsageError unless each target is a layer of the checkpoint, not only one `beside`."""
    outside = re.compile(beside or "")
    named = [name for name, layer in module.named_modules() if _is_matrix(layer)]
    named = [name for name in named if not outside.fullmatch(name)]
    for target in targets:
        if target in new:
            raise UsageError(
                f"lora.targets={target!r}: the checkpoint lacks that layer, so all of it is "
                "trained; leave it out of the targets"
            )
        if not any(name == target or name.endswith(f".{target}") for name in named):
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in named))
            raise UsageError(
                f"lora.targets={target!r}: the model has no layer of that name with a matrix of "
                f"weights; it has {', '.join(ends[:_SHOWN])}"
            )


def _within(parts: Sequence[str]) -> str | None:
    """Return an expression for the names of all layers within `parts`, as peft excludes them."""
    return rf"({'|'.join(map(re.escape, parts))})\..*" if parts else None


def freeze_beside(module: nn.Module) -> None:
    """Freeze what no text passes through: it would have no gradient."""
    for name in fitting.beside_text(module):
        module.get_submodule(name).requires_grad_(False)


def _is_matrix(layer: nn.Module) -> bool:
    """Return whether a layer is a product with a matrix: nn.Linear, or GPT-2's Conv1D."""
    weight = getattr(layer, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    return is_matrix and not isinstance(layer, nn.Embedding)


def has_target(module: nn.Module, target: str) -> bool:
    """Return whether an adapter can stand on a layer whose name ends in `target`."""
    return any(
        (name == target or name.endswith(f".{target}")) and _is_matrix(layer)
        for name, layer in module.named_modules()
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out peft's warnings of what a later transformers will lack, and of what it mends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        yield
