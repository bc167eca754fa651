"""Uses what a run has written: answers prompts, scores rows, merges adapters into their model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import NEW_TOKENS, export, folder, rows_read
from entrenar_py.train.model import (
    encoding,
    evaluation,
    fitting,
    model,
    precision,
    prepared,
    samples,
    saving,
    stock,
)
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError, Conversation
from entrenar_py.train.model.evaluation import Scores
from entrenar_py.train.model.settings import Settings


@dataclass(frozen=True)
class Output:
    """A trained model in evaluation mode, with its tokenizer and the settings of its run."""

    folder: Path
    settings: Settings
    tokenizer: Any
    module: nn.Module


def load(path: Path, *, trusts: bool) -> Output:
    """Return what a run wrote to the folder `path`. Raises UsageError if there is no output.

    Python of the checkpoint runs if the user `trusts` it, whatever the folder says.
    """
    record = path / export.SETTINGS
    if not record.is_file():
        raise UsageError(
            f"{path}: no {export.SETTINGS} there; give the output folder of a complete run"
        )
    settings, digests = export.read(path)
    if settings.trust_remote_code and not trusts:
        raise UsageError(
            f"{path}: its run had Python code of the checkpoint {settings.model} run "
            "(trust_remote_code), and a folder can't allow that; give --trust-remote-code if you "
            "trust that checkpoint"
        )
    _require_same(path, settings, digests)
    tokenizer = model.tokenizer(settings, path)
    module = model.trained(settings, path, model.padding(tokenizer))
    rows_read.say_warnings()
    return Output(path, settings, tokenizer, module)


def _require_same(path: Path, settings: Settings, digests: export.Digests | None) -> None:
    """Raise UsageError for another model below the adapters, or tokenizer, than the run had."""
    if digests is None:
        printing.warn(
            f"entrenar: warning: {path / export.SETTINGS}: an older release wrote no digests of "
            "model and tokenizer, so nobody checks that they are the run's"
        )
        return
    if settings.adapts and (digest := fitting.digest(settings.model)) != digests.model:
        raise UsageError(
            f"{path}: its adapters were trained on another model than {settings.model}, which has "
            f"the digest {digest}; the run's had {digests.model}. Put that checkpoint there, or "
            f"name its folder in {export.SETTINGS} (model)"
        )
    if (digest := export.tokenizer_digest(path)) != digests.tokenizer:
        raise UsageError(
            f"{path}: its tokenizer is not the run's: its files have the digest {digest}, the "
            f"run's had {digests.tokenizer}. Put back the files that the run wrote, or export it "
            "again: entrenar finetune --resume"
        )


def answer(output: Output, prompt: str, *, new_tokens: int | None) -> Iterator[str]:
    """Yield the lines of the answer to `prompt`: a class with its probability, or a text.

    A text has at most `new_tokens`, by default NEW_TOKENS.
    """
    if not prompt.strip():
        raise UsageError("--prompt is empty; give a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("--prompt is not UTF-8; give a text in UTF-8") from error
    settings, tokenizer = output.settings, output.tokenizer
    if new_tokens is not None and settings.task == "classify":
        raise UsageError(
            f"--new-tokens {new_tokens}: {output.folder} answers with classes (task: classify), "
            "not with a text; leave it out"
        )
    new_tokens = new_tokens or NEW_TOKENS
    if settings.task == "instruct":
        asked = _asked(tokenizer, prompt, settings.data.date)
    else:
        asked = encoding.tokens_of(tokenizer, prompt)
    module = cast("Any", output.module)
    _require_room(output, asked, new_tokens)
    tokens = torch.tensor([asked])
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    products = precision.of_products(settings)
    with torch.no_grad(), precision.applied(products, module.device):
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
    yield tokenizer.decode(made[0, len(asked) :], skip_special_tokens=True)


def _asked(tokenizer: Any, prompt: str, day: str | None) -> list[int]:
    """Return a question as the chat template writes it. Raises UsageError if it refuses that."""
    turn = {"role": "user", "content": prompt}
    try:
        return ChatEncoder(tokenizer, day).prompt(
            Conversation(messages=[turn], tools=None, learned=())
        )
    except BadConversationError as error:
        raise UsageError(f"--prompt: {error}") from error


def _require_room(output: Output, tokens: Sequence[int], new_tokens: int) -> None:
    """Raise UsageError unless the model has embeddings and positions for prompt and answer."""
    fitting.require_tokens(output.module, tokens, folder=output.settings.model)
    limit = fitting.longest(output.module)
    due = len(tokens) + (new_tokens if output.settings.task != "classify" else 0)
    if limit is not None and due > limit:
        answer = "" if due == len(tokens) else f" and --new-tokens {new_tokens}"
        raise UsageError(
            f"--prompt of {len(tokens)} tokens{answer}: the model takes {limit} tokens in all; use "
            "fewer"
        )


def evaluate(output: Output, path: Path) -> Scores:
    """Return the scores of a trained model on the rows of the file at `path`.

    Prints which rows were skipped, if the run's settings say so.
    """
    settings, tokenizer = output.settings, output.tokenizer
    rows = samples.load(settings, path, tokenizer, cache=prepared.cache())
    rows_read.say_skipped(rows.skipped)
    fitting.require_samples(settings, output.module, [rows], model.padding(tokenizer))
    return evaluation.scores(
        output.module, rows, settings=settings, pad_token=model.padding(tokenizer)
    )


def merge(output: Output, merged: Path) -> None:
    """Write a checkpoint to `merged` in which the adapters are added to their layers' weights.

    The weights are float32: narrower ones would round away most of what was learned. Those in NF4
    or 16 bits become the numbers that they stand for, as trained. Raises UsageError if there are no
    adapters, or `merged` is not empty, and SystemFailure if it can't be written, or stock
    transformers doesn't read the merged model there.
    """
    if not output.settings.adapts:
        raise UsageError(f"{output.folder}: method: full has no adapters; it is a model already")
    if merged.exists() and not (merged.is_dir() and not any(merged.iterdir())):
        raise UsageError(f"{merged}: it is not an empty folder; give a new one")
    module, pad_token = output.module, model.padding(output.tokenizer)
    if output.settings.method == "qlora":
        module = model.decoded(output.settings, output.folder, pad_token)
    advice = "make room or give access, and merge again"
    with folder.replacing(merged, marks=export.MARKS, advice=advice) as partial:
        merged_module = saving.merge(module.float(), output.tokenizer, partial)
    stock.require_merged(output.settings, merged_module, pad_token=pad_token, folder=merged)
