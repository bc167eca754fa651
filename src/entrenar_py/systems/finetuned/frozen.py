"""Records the weights that aren't trained: in the checkpoint's files, and in a module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from torch import nn

from entrenar_py import trace


def of_files(folder: Path) -> trace.Frozen:
    """Return the record of all weights in the safetensors files of a checkpoint."""
    arrays = {
        name: array
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }
    records = {name: trace.record_tensor(array) for name, array in arrays.items()}
    return trace.Frozen(when="in the checkpoint", weights=records)


def of_module(module: nn.Module, when: str) -> trace.Frozen:
    """Return the record of the parameters of `module` that get no gradient, as they are now."""
    records = {
        name_in_checkpoint(name): trace.record_tensor(
            np.ascontiguousarray(parameter.detach().cpu().numpy())
        )
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    return trace.Frozen(when=when, weights=records)


def name_in_checkpoint(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the checkpoint."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
