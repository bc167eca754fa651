"""Keeps the files of a checkpoint, or of an output folder, from making a library do anything.

Python of a checkpoint runs by the user's consent alone (`trust_remote_code`). Other keys make
transformers, peft or tokenizers fetch something, import a module, or read other files than those
whose digest is written down. No consent covers these, so they are refused before a library sees
them. `library` moreover keeps what the libraries fetch without any key (kernels for a kind of
model) from reaching a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, files, json_text

CONFIG, TOKENIZER, ADAPTERS = "config.json", "tokenizer_config.json", "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_JSON_BYTES_MAX = 2**26
# Values of these name code that is already here, such as `sdpa`, or `owner/name` of a hub.
_CODE = ("attn_implementation", "experts_implementation")
# What `entrenar` writes there. All else has peft's default, and may import a module
# (`megatron_core`), load another model, or draw the adapters from a file.
_OWN = frozenset(
    {
        *("base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "peft_version", "r"),
        *("target_modules", "task_type"),
    }
)


def record(path: Path, whose: str) -> Mapping[str, Any]:
    """Return the object of JSON at `path`. Raises UsageError, which begins with `whose`."""
    found: object = None
    what = "the checkpoint" if path.name == CONFIG else "it"
    try:
        found = json_text.load(files.read(path, bytes_max=_JSON_BYTES_MAX))
        problem = "" if isinstance(found, dict) else "it is no object of JSON"
    except (OSError, ValueError) as error:
        problem = str(error)
    if not isinstance(found, dict):
        raise UsageError(f"{whose}: {path.name} can't be read ({problem}); copy {what} again")
    return found


def require_offline() -> None:
    """Let the libraries of a hub, which are not imported yet, reach no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def require_model(folder: Path) -> None:
    """Raise UsageError if `folder`'s config.json makes a library fetch code or other weights."""
    found = record(folder / CONFIG, f"model={folder}")
    for key, value in _nested(found):
        if key.lstrip("_").removesuffix("_internal") in _CODE:
            for name in _texts(value):
                if "/" in name or ":" in name:
                    _refuse(folder, CONFIG, key, name, "use sdpa or eager, or leave it out")
    if (other := found.get("transformers_weights")) is not None:
        advice = "leave it out: weights are model.safetensors, or what its index names"
        _refuse(folder, CONFIG, "transformers_weights", other, advice)


def require_tokenizer(folder: Path) -> None:
    """Raise UsageError if `folder`'s tokenizer_config.json makes a library fetch a file."""
    if not (folder / TOKENIZER).is_file():
        return
    for key, value in _nested(record(folder / TOKENIZER, str(folder))):
        if key.endswith("_file") and isinstance(value, str) and "://" in value:
            _refuse(folder, TOKENIZER, key, value, "leave it out, and copy that file there")


def require_adapters(folder: Path) -> None:
    """Raise UsageError unless `folder` has adapters as `entrenar` writes them, and no other key."""
    import peft

    found = record(folder / ADAPTERS, str(folder))
    usual = peft.LoraConfig().to_dict()
    if (kind := found.get("peft_type")) != "LORA":
        _refuse(folder, ADAPTERS, "peft_type", kind, "give the output of a run, which has LORA")
    for key, value in found.items():
        if key in usual and key not in _OWN and value and value != usual[key]:
            advice = "give the output as the run wrote it, where that key has peft's default"
            _refuse(folder, ADAPTERS, key, value, advice)
    if not (folder / WEIGHTS).is_file():
        raise UsageError(
            f"{folder}: no {WEIGHTS} there; give the output folder as the run wrote it"
        )


def _refuse(folder: Path, name: str, key: str, value: object, advice: str) -> None:
    shown = escaping.shortened(json.dumps(value, ensure_ascii=False))
    raise UsageError(
        f"{folder}: {name} has {key}={shown}, which makes a library fetch, import or read "
        f"what is not in this folder; {advice}"
    )


def _nested(found: object) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, also those of objects within (`text_config`)."""
    waiting = [found]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value, which may be an object with one for each part of a model."""
    if isinstance(value, str):
        yield value
    for _, inner in _nested(value):
        if isinstance(inner, str):
            yield inner
