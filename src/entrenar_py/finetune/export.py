"""Writes what was trained as stock `peft` and `transformers` read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from entrenar_py.finetune.run import Prepared
from entrenar_py.finetune.workload import Finetuning
from entrenar_py.training.tensors import Array


def write(prepared: Prepared, workload: Finetuning, tensors: Mapping[str, Array]) -> Path:
    """Write adapters (or the whole model) and tokenizer to the output folder, and return it.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors.
    """
    parameters = dict(workload.module.named_parameters())
    with torch.no_grad():
        for name, array in tensors.items():
            parameters[name].copy_(torch.from_numpy(array))
    folder = prepared.settings.output
    module = cast("Any", workload.module)  # of peft or transformers
    module.save_pretrained(folder)
    prepared.tokenizer.save_pretrained(folder)
    return folder
