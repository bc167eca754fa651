"""Writes what was trained as stock `peft` and `transformers` read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from entrenar_py.finetune import settings_file
from entrenar_py.training.tensors import Array
from entrenar_py.tuning.prepared import Prepared
from entrenar_py.tuning.workload import Finetuning

SETTINGS = "run.json"  # in the output folder: the settings, for later commands


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
    for config in getattr(module, "peft_config", {}).values():
        config.target_modules = sorted(config.target_modules)  # a set has no order
    module.save_pretrained(folder)
    prepared.tokenizer.save_pretrained(folder)
    record = json.dumps(settings_file.to_record(prepared.settings), indent=2)
    (folder / SETTINGS).write_text(record + "\n", encoding="utf-8")
    return folder
