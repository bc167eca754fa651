"""Records the weights that aren't trained: in the checkpoint's files, and in a module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from entrenar_py.shared import trace
from entrenar_py.systems.finetuned.weights import weights_of


def of_files(folder: Path) -> trace.Frozen:
    """Return the record of all weights in the safetensors files of a checkpoint."""
    records = {name: trace.record_tensor(array) for name, array in weights_of(folder).items()}
    return trace.Frozen(when="in the checkpoint", weights=records)


def of_module(module: nn.Module, when: str) -> trace.Frozen:
    """Return the record of the parameters of `module` that get no gradient, as they are now.

    Those in NF4 are bytes, not what the checkpoint has, and have a name of their own.
    """
    records = {
        name_in_checkpoint(name)
        + (" in NF4" if parameter.dtype == torch.uint8 else ""): trace.record_tensor(
            np.ascontiguousarray(parameter.detach().cpu().numpy())
        )
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    return trace.Frozen(when=when, weights=records)


def name_in_checkpoint(name: str) -> str:
    """Return the name that a parameter of a model with adapters has in the checkpoint."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
