"""The output folder: written such that a partial output is never used, and read back later."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from blake3 import blake3
from torch import nn

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping, files, printing
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.finetune import NEW_TOKENS, foresight, package, settings_file
from entrenar_py.train.model import (
    evaluation,
    model,
    model_folder,
    precision,
    preparation,
    samples,
    stock,
)
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError, Conversation
from entrenar_py.train.model.evaluation import Scores
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.model.workload import Tuned

PARTIAL = "export.partial"  # a folder in the output: files that are being written
_FULL = os.strerror(errno.ENOSPC)  # also in the errors of safetensors, which have no number
_REPLACED_WEIGHTS = (".safetensors", ".safetensors.index.json")


@contextmanager
def replacing(folder: Path, *, marks: Sequence[str], advice: str) -> Iterator[Path]:
    """Yield a new folder for files. At the end they are synced, and moved into `folder`.

    Without the files named in `marks`, `folder` is not recognised as a model. So old ones are
    removed before anything is moved, and new ones are moved last, in their order. Weights of an
    earlier model are removed, too. Raises SystemFailure, with `advice`, if a file can't be written
    (then `folder` is unchanged) or moved (then `folder` is no model). An interrupt leaves no
    temporary files.
    """
    partial = folder / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        names = sorted(path.name for path in partial.iterdir())
        mode = partial.stat().st_mode & 0o666  # from the user's umask; safetensors writes 0600
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            _sync(path)
        _move(partial, folder, [name for name in names if name not in marks], marks)
    except (
        Exception
    ) as error:  # tokenizers and safetensors raise their own exceptions for a full disk
        told = escaping.shortened(_problem(error, partial))
        raise SystemFailure(f"output {folder}: can't be written ({told}); {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _problem(error: Exception, partial: Path) -> str:
    told = " ".join(str(error).split())
    if _FULL not in told:
        return told
    written = [path for path in partial.rglob("*") if path.is_file()]
    last = max(written, key=lambda path: path.stat().st_mtime_ns, default=partial)
    return f"{last.name}: {files.problem(OSError(errno.ENOSPC, _FULL), partial)}"


def _move(partial: Path, folder: Path, names: Sequence[str], marks: Sequence[str]) -> None:
    for path in folder.iterdir():
        is_stale = path.name.endswith(_REPLACED_WEIGHTS) and path.name not in names
        if path.name in marks or is_stale:
            path.unlink()
    _sync(folder)
    for name in (*names, *(mark for mark in marks if (partial / mark).exists())):
        if (folder / name).is_dir():  # such as a tokenizer's additional chat templates
            shutil.rmtree(folder / name)
        (partial / name).replace(folder / name)
        _sync(folder)
    partial.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SETTINGS = "run.json"  # in the output folder: the settings, for later commands
DIGESTS = "digests"  # a key in SETTINGS: the digests of the run's model and tokenizer
MARKS = ("config.json", "adapter_config.json")  # without these, no library loads the weights
_OWN = (SETTINGS, "state.checkpoint", "ledger.jsonl", "metrics.jsonl")  # files of a run
_OTHERS = (*MARKS, "tokenizer.json")
_WEIGHTS = (".safetensors", ".bin")
_TEMPLATES = "additional_chat_templates"
_ADVICE = "make room or give access, and export it with --resume"


@dataclass(frozen=True)
class Digests:
    """Digests of the content of a run's model and tokenizer, 32 hex digits each."""

    model: str
    tokenizer: str


def write(
    prepared: Prepared, workload: Tuned, tensors: Mapping[str, Array], *, model_digest: str
) -> Path:
    """Write adapters (or the whole model) and tokenizer to the output folder, and return it.

    Adapters are a PEFT folder: adapter_config.json and adapter_model.safetensors. `model_digest` is
    the digest of the checkpoint when it was loaded. Raises SystemFailure if a file can't be
    written; an earlier output is then unchanged. Also raises it if stock libraries read a different
    model than was trained; the files are then kept.
    """
    record = settings_file.to_record(prepared.settings)
    output = prepared.settings.output
    with replacing(output, marks=(*MARKS, SETTINGS), advice=_ADVICE) as partial:
        stock.save(workload.module, tensors, prepared.tokenizer, partial)
        record[DIGESTS] = asdict(Digests(model_digest, tokenizer_digest(partial)))
        text = settings_file.to_text(record)
        (partial / SETTINGS).write_text(text + "\n", encoding="utf-8")
    settings, pad_token = prepared.settings, prepared.pad_token
    stock.require_agreement(settings, workload.module, tensors, pad_token=pad_token, folder=output)
    foresight.say_warnings()
    return output


def read_settings(output: Path) -> tuple[Settings, Digests | None]:
    """Return the settings and digests that `write` stored; None for digests of older releases.

    Raises UsageError or ContractError if `write` did not write them.
    """
    path = output / SETTINGS
    record = dict(model_folder.record(path, str(output)))
    noted = record.pop(DIGESTS, None)
    settings = settings_file.of_text(settings_file.to_text(record), str(path))
    if noted is None:
        return settings, None
    names = sorted(field.name for field in fields(Digests))
    is_whole = isinstance(noted, dict) and sorted(noted) == names
    if not is_whole or not all(isinstance(one, str) for one in noted.values()):
        raise UsageError(
            f"{path}: {DIGESTS}={escaping.shortened(repr(noted))}: use {', '.join(names)}, a text "
            "each, as the run wrote them"
        )
    return settings, Digests(**noted)


def tokenizer_digest(folder: Path) -> str:
    """Return 32 hex digits over all files in `folder` that decide what its tokenizer does.

    These are its vocabulary, its special tokens and its chat templates. The files are hashed, not
    what a library reads from them, since a later release may represent that differently.
    """
    hasher = blake3()
    places = [folder / name for name in package.TOKENIZER]
    places += (folder / _TEMPLATES).rglob("*")
    for path in sorted(place for place in places if place.is_file()):
        content = blake3(path.read_bytes()).digest()
        hasher.update(str(path.relative_to(folder)).encode() + b"\0" + content)
    return hasher.hexdigest(16)


def require_own(settings: Settings) -> None:
    """Raise UsageError if an export would replace files in the output folder that no run wrote.

    These are the checkpoint that is trained, or any other checkpoint.
    """
    output = settings.output
    problem = f"output={output}: it has a checkpoint that no run has written"
    if output.resolve() == settings.model.resolve():
        problem = f"output={output}: it is the model's folder, and its files would be replaced"
    elif any((output / name).exists() for name in _OWN) or not any(
        path.name in _OTHERS or path.suffix in _WEIGHTS for path in _listed(output)
    ):
        return
    raise UsageError(f"{problem}; give another folder")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it doesn't exist yet, or creating it will report the problem
        return []


def make_folder(prepared: Prepared) -> Path:
    """Create the output folder, with a list of the skipped rows, and return its path.

    Raises UsageError if that is impossible.
    """
    output = prepared.settings.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output={output}: can't be made ({error.strerror})") from error
    foresight.keep_skipped(prepared)
    return output


@dataclass(frozen=True)
class Output:
    """A trained model in evaluation mode, with its tokenizer and the settings of its run."""

    folder: Path
    settings: Settings
    tokenizer: Any
    module: nn.Module


def load(path: Path, *, trusts: bool) -> Output:
    """Return what a run wrote to the folder `path`. Raises UsageError if it is no output.

    Python code of the checkpoint runs only if the user `trusts` it, whatever the folder says.
    """
    record = path / SETTINGS
    if not record.is_file():
        raise UsageError(f"{path}: no {SETTINGS} there; give the output folder of a complete run")
    settings, digests = read_settings(path)
    if settings.trust_remote_code and not trusts:
        raise UsageError(
            f"{path}: its run had Python code of the checkpoint {settings.model} run "
            "(trust_remote_code), and a folder can't allow that; give --trust-remote-code if you "
            "trust that checkpoint"
        )
    _require_same(path, settings, digests)
    tokenizer = model.tokenizer(settings, path)
    module = model.trained(settings, path, model.padding(tokenizer))
    foresight.say_warnings()
    return Output(path, settings, tokenizer, module)


def _require_same(path: Path, settings: Settings, digests: Digests | None) -> None:
    """Raise UsageError if the model under the adapters, or the tokenizer, is not the run's."""
    if digests is None:
        printing.warn(
            f"entrenar: warning: {path / SETTINGS}: an older release wrote no digests of "
            "model and tokenizer, so it isn't checked that they are the run's"
        )
        return
    if settings.adapts and (digest := model_folder.digest(settings.model)) != digests.model:
        raise UsageError(
            f"{path}: its adapters were trained on another model than {settings.model}, which has "
            f"the digest {digest}; the run's had {digests.model}. Put that checkpoint there, or "
            f"name its folder in {SETTINGS} (model)"
        )
    if (digest := tokenizer_digest(path)) != digests.tokenizer:
        raise UsageError(
            f"{path}: its tokenizer is not the run's: its files have the digest {digest}, the "
            f"run's had {digests.tokenizer}. Put back the files that the run wrote, or export it "
            "again: entrenar finetune --resume"
        )


def answer(output: Output, prompt: str, *, new_tokens: int | None) -> Iterator[str]:
    """Yield the lines of the answer to `prompt`: classes with their probabilities, or a text.

    A text has at most `new_tokens` tokens, by default NEW_TOKENS. Raises UsageError for a prompt
    that can't be answered.
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
        question = _asked(tokenizer, prompt, settings.data.date)
    else:
        question = samples.tokens_of(tokenizer, prompt)
    module = cast("Any", output.module)
    _require_room(output, question, new_tokens)
    tokens = torch.tensor([question])
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    products = precision.of_products(settings)
    with torch.no_grad(), precision.applied(products, module.device):
        if settings.task == "classify":
            shares = module(**batch).logits[0].softmax(-1).tolist()
            labelled = zip(settings.classes.labels, shares, strict=True)
            for label, share in sorted(labelled, key=lambda pair: -pair[1]):
                yield f"{label} {share:.4f}"
            return
        generated = module.generate(
            **batch,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.padding(tokenizer),
        )
    yield tokenizer.decode(generated[0, len(question) :], skip_special_tokens=True)


def _asked(tokenizer: Any, prompt: str, day: str | None) -> list[int]:
    """Return the tokens of a question in the chat template. Raises UsageError if it is refused."""
    turn = {"role": "user", "content": prompt}
    try:
        return ChatEncoder(tokenizer, day).prompt(
            Conversation(messages=[turn], tools=None, learned=())
        )
    except BadConversationError as error:
        raise UsageError(f"--prompt: {error}") from error


def _require_room(output: Output, tokens: Sequence[int], new_tokens: int) -> None:
    """Raise UsageError unless the model has embeddings and positions for prompt and answer."""
    model_folder.require_tokens(output.module, tokens, folder=output.settings.model)
    limit = model_folder.longest(output.module)
    due = len(tokens) + (new_tokens if output.settings.task != "classify" else 0)
    if limit is not None and due > limit:
        answer = "" if due == len(tokens) else f" and --new-tokens {new_tokens}"
        raise UsageError(
            f"--prompt of {len(tokens)} tokens{answer}: the model takes {limit} tokens in all; use "
            "fewer"
        )


def evaluate(output: Output, path: Path) -> Scores:
    """Return the scores of a trained model on the rows of the file at `path`.

    Prints the skipped rows, if the run's settings skip any.
    """
    settings, tokenizer = output.settings, output.tokenizer
    rows = samples.load(settings, path, tokenizer, cache=preparation.cache())
    foresight.say_skipped(settings, rows.skipped)
    model_folder.require_samples(settings, output.module, [rows], model.padding(tokenizer))
    return evaluation.scores(
        output.module, rows, settings=settings, pad_token=model.padding(tokenizer)
    )


def merge(output: Output, merged: Path) -> None:
    """Write a checkpoint to `merged` in which the adapters are added to their layers' weights.

    The weights are float32: narrower ones would round away most of what was learned. Weights in NF4
    or 16 bits are decoded to the same values as in training. Raises UsageError if there are no
    adapters or if `merged` is not empty, and SystemFailure if it can't be written or if stock
    transformers read a different model from it.
    """
    if not output.settings.adapts:
        raise UsageError(f"{output.folder}: method: full has no adapters; it is a model already")
    if merged.exists() and not (merged.is_dir() and not any(merged.iterdir())):
        raise UsageError(f"{merged}: it is not an empty folder; give a new one")
    module, pad_token = output.module, model.padding(output.tokenizer)
    if output.settings.method == "qlora":
        module = model.decoded(output.settings, output.folder, pad_token)
    advice = "make room or give access, and merge again"
    with replacing(merged, marks=MARKS, advice=advice) as partial:
        merged_module = stock.merge(module.float(), output.tokenizer, partial)
    stock.require_merged(output.settings, merged_module, pad_token=pad_token, folder=merged)
