"""Writes what a run trained as the commands do, and reads it back with stock libraries alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from entrenar_py.shared import trace
from entrenar_py.systems.finetuned import nf4
from entrenar_py.systems.finetuned.asked import Asked
from entrenar_py.systems.finetuned.frozen import name_in_checkpoint
from entrenar_py.systems.finetuned.small import LABELS, Made
from entrenar_py.systems.finetuned.textbook import Textbook
from entrenar_py.systems.finetuned.weights import weights_of
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.model import model, stock
from entrenar_py.train.model.preparation import Prepared

_NUM_ROWS = 3  # whose logits are compared


def written(
    made: Made, prepared: Prepared, module: nn.Module, final: Mapping[str, Array]
) -> trace.ReadBack:
    """Write `final` to the output folder, and return it as a stock library reads it."""
    folder = made.settings.output
    stock.save(module, final, prepared.tokenizer, folder)
    read = dict(stock_model(made, folder).named_parameters())
    records = {
        name: trace.record_tensor(np.ascontiguousarray(read[name].detach().numpy()))
        for name in final
        if name in read
    }
    by = "peft" if made.settings.adapts else "transformers"
    return trace.ReadBack(by=by, tensors=records)


def stock_model(made: Made, folder: Path) -> Any:
    """Return the model in `folder`, or the checkpoint with the adapters there, by stock libraries.

    In float32 and evaluation mode. Weights in NF4 are the numbers that they stand for.
    """
    import peft
    import transformers

    is_adapters = (folder / "adapter_config.json").is_file()
    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if made.settings.task == "classify":
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": len(LABELS)}
    base = kind.from_pretrained(
        made.settings.model if is_adapters else folder,
        dtype=torch.float32,
        local_files_only=True,
        **options,
    )
    if is_adapters and made.settings.method == "qlora":
        numbers = {name: torch.from_numpy(array) for name, array in nf4.decoded(made).items()}
        base.load_state_dict(numbers, strict=False)
    found: Any = peft.PeftModel.from_pretrained(base, str(folder)) if is_adapters else base
    return found.eval()


def merged(
    made: Made, asked: Asked, prepared: Prepared, final: Mapping[str, Array]
) -> Iterator[trace.Event]:
    """Merge the written adapters as `entrenar merge` does; yield its weights and its logits."""
    settings, folder = made.settings, made.settings.output.parent / "merged"
    load = model.decoded if settings.method == "qlora" else model.trained
    adapted = load(settings, settings.output, prepared.pad_token)
    stock.merge(adapted, prepared.tokenizer, folder)
    yield from adapters("merged", made, asked, final, weights_of(folder))
    shapes = {name: array.shape for name, array in final.items()}
    textbook = Textbook(made, asked, shapes)
    tensors = {name: torch.from_numpy(array) for name, array in final.items()}
    ids = range(_NUM_ROWS)
    tokens, mask, _ = textbook.batch(ids)
    for name, place in (("adapter model", settings.output), ("merged model", folder)):
        with torch.no_grad():
            given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
            logits = stock_model(made, place)(**given).logits
        yield from textbook.logits(name, logits, tensors, ids)


def adapters(
    when: str,
    made: Made,
    asked: Asked,
    tensors: Mapping[str, Array],
    merged_weights: Mapping[str, Array] | None = None,
) -> Iterator[trace.Adapted]:
    """Yield the matrices of each layer with an adapter."""
    base = nf4.decoded(made) if asked.method == "qlora" else weights_of(made.settings.model)
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        layer = name_in_checkpoint(name).partition(".lora_A.")[0]
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        arrays = {"a": a, "b": b, "base": _as_product(base, layer, a)}
        if merged_weights is not None:
            arrays["merged"] = _as_product(merged_weights, layer, a)
        yield trace.Adapted(
            when=when,
            layer=layer,
            rank=asked.rank,
            alpha=asked.alpha,
            shape=(b.shape[0], a.shape[1]),
            tensors={key: trace.record_tensor(one, values=True) for key, one in arrays.items()},
        )


def _as_product(weights: Mapping[str, Array], layer: str, a: Array) -> Array:
    """Return a layer's weight as [out, in]; GPT-2 keeps the transposed one."""
    weight = weights[f"{layer}.weight"]
    is_transposed = ".c_" in f".{layer}"
    return np.ascontiguousarray(weight.T if is_transposed else weight)
