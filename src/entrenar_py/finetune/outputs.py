"""Uses what a run has written: answers prompts, scores rows, merges adapters into their model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.errors import UsageError
from entrenar_py.finetune import export, settings_file
from entrenar_py.tuning import evaluation, model, prepared, samples
from entrenar_py.tuning.evaluation import Scores
from entrenar_py.tuning.settings import Settings


@dataclass(frozen=True)
class Output:
    """A trained model in evaluation mode, with its tokenizer and the settings of its run."""

    folder: Path
    settings: Settings
    tokenizer: Any
    module: nn.Module


def load(folder: Path) -> Output:
    """Return what a run wrote to `folder`. Raises UsageError if there is no such output."""
    record = folder / export.SETTINGS
    if not record.is_file():
        raise UsageError(
            f"{folder}: no {export.SETTINGS} there; give the output folder of a complete run"
        )
    settings = settings_file.load(record)
    tokenizer = model.tokenizer(settings, folder)
    module = model.trained(settings, folder, model.padding(tokenizer))
    return Output(folder, settings, tokenizer, module)


def answer(output: Output, prompt: str, *, new_tokens: int) -> Iterator[str]:
    """Yield the lines of the answer to `prompt`: a class with its probability, or a text."""
    if not prompt.strip():
        raise UsageError("--prompt is empty; give a text")
    settings, tokenizer = output.settings, output.tokenizer
    if settings.task == "instruct":
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        given = tokenizer(prompt, return_tensors="pt")
    given.pop("token_type_ids", None)
    module = cast("Any", output.module)
    with torch.no_grad():
        if settings.task == "classify":
            shares = module(**given).logits[0].softmax(-1).tolist()
            labelled = zip(settings.classes.labels, shares, strict=True)
            for label, share in sorted(labelled, key=lambda pair: -pair[1]):
                yield f"{label} {share:.4f}"
            return
        made = module.generate(
            **given,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.padding(tokenizer),
        )
    yield tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(output: Output, path: Path) -> Scores:
    """Return the scores of a trained model on the rows of the file at `path`."""
    settings, tokenizer = output.settings, output.tokenizer
    rows = samples.load(settings, path, tokenizer, cache=prepared.cache())
    return evaluation.scores(
        output.module, rows, labels=settings.classes.labels, pad_token=model.padding(tokenizer)
    )


def merge(output: Output, folder: Path) -> None:
    """Write a checkpoint to `folder` in which the adapters are added to their layers' weights.

    The weights are float32. Those in NF4 become the numbers that they stand for, as trained.
    """
    if not output.settings.adapts:
        raise UsageError(f"{output.folder}: method: full has no adapters; it is a model already")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: it is not empty; give a new folder")
    module = output.module
    if output.settings.method == "qlora":
        pad_token = model.padding(output.tokenizer)
        module = model.decoded(output.settings, output.folder, pad_token)
    merged = cast("Any", module).merge_and_unload()
    merged.save_pretrained(folder)
    output.tokenizer.save_pretrained(folder)
