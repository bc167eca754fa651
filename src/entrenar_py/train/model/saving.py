"""Writes what was trained to folders that stock `peft` and `transformers` load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.train.arithmetic.tensors import Array


def save(module: nn.Module, tensors: Mapping[str, Array], tokenizer: Any, folder: Path) -> None:
    """Set the parameters `tensors` of `module`; write adapters, or the whole model, and tokenizer.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, array in tensors.items():
            parameters[name].copy_(torch.from_numpy(array))
    saved = cast("Any", module)  # of peft or transformers
    for config in getattr(saved, "peft_config", {}).values():
        config.target_modules = sorted(config.target_modules)  # a set has no order
        config.base_model_name_or_path = str(Path(config.base_model_name_or_path).absolute())
    # peft would write the frozen weights under an adapter on a head or a table, too. A coordinator
    # of stages doesn't have them.
    options = {"save_embedding_layers": False} if hasattr(saved, "peft_config") else {}
    saved.save_pretrained(folder, **options)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form for a model card, not filled in
    tokenizer.save_pretrained(folder)


def merge(module: nn.Module, tokenizer: Any, folder: Path) -> nn.Module:
    """Add the adapters of `module` to their layers' weights; write that model and the tokenizer.

    Returns that model.

    `module` is changed. A head with adapters no longer shares its weights with the embeddings.
    """
    _untie(cast("Any", module).get_base_model())
    merged = cast("Any", module).merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return cast("nn.Module", merged)


def _untie(model: Any) -> None:
    """Give a head with adapters weights of its own: they are not added to the embeddings."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if hasattr(head, "base_layer") and head.base_layer.weight is table.weight:
        head.base_layer.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
