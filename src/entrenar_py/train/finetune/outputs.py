"""Writes the output folder so that a partial output is never used, and reads it back later."""

from __future__ import annotations

import argparse
import errno
import json
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
from entrenar_py.shared.wording import counted
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.distill import prompts
from entrenar_py.train.distill.answers import LEAST_TEMPERATURE
from entrenar_py.train.finetune import NEW_TOKENS, foresight, package, settings_file
from entrenar_py.train.model import (
    decoding,
    evaluation,
    model,
    model_folder,
    precision,
    preparation,
    rows,
    samples,
    stock,
)
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError, Conversation
from entrenar_py.train.model.evaluation import Scores
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.settings import CHATS, Settings
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


SETTINGS, DIGESTS = model_folder.RUN, model_folder.DIGESTS
MARKS = ("config.json", "adapter_config.json")  # without these, no library loads the weights
_OWN = (SETTINGS, "state.checkpoint", "ledger.jsonl", "metrics.jsonl")  # files of a run
_OTHERS = (*MARKS, "tokenizer.json")
_WEIGHTS = (".safetensors", ".bin")
_KEPT = "kept.json"
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
    output = prepared.settings.output
    with replacing(output, marks=(*MARKS, SETTINGS), advice=_ADVICE) as partial:
        _fill(partial, prepared, workload.module, tensors, model_digest=model_digest)
    settings, pad_token = prepared.settings, prepared.pad_token
    stock.require_agreement(settings, workload.module, tensors, pad_token=pad_token, folder=output)
    foresight.say_warnings()
    return output


def _fill(
    folder: Path,
    prepared: Prepared,
    module: nn.Module,
    tensors: Mapping[str, Array],
    *,
    model_digest: str,
) -> None:
    """Write everything to `folder` that later commands read."""
    record = settings_file.to_record(prepared.settings)
    stock.save(module, tensors, prepared.tokenizer, folder)
    record[DIGESTS] = asdict(Digests(model_digest, tokenizer_digest(folder)))
    text = settings_file.to_text(record)
    (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Kept:
    """Facts about adapters that a run kept: the run's digest, their step, and their loss.

    `rows` is the digest of the validation rows of that loss; None if an older release wrote it.
    """

    run: str
    step: int
    loss: float
    rows: str | None

    @classmethod
    def of(cls, folder: Path) -> Kept | None:
        """Return what `keep` noted in `folder`; None if it wrote nothing there."""
        try:
            record = model_folder.record(folder / _KEPT, str(folder))
            rows = record.get("rows")
            return cls(
                run=str(record["run"]),
                step=int(record["step"]),
                loss=float(record["loss"]),
                rows=None if rows is None else str(rows),
            )
        except (UsageError, LookupError, TypeError, ValueError):
            return None


def keep(
    folder: Path,
    prepared: Prepared,
    module: nn.Module,
    tensors: Mapping[str, Array],
    kept: Kept,
    *,
    model_digest: str,
) -> None:
    """Write an evaluated state to `folder`, for later commands.

    Raises SystemFailure if a file can't be written.
    """
    # The note comes last: with it, a resumed run takes the folder to be complete.
    marks = (*MARKS, SETTINGS, _KEPT)
    with replacing(folder, marks=marks, advice="make room or give access") as partial:
        _fill(partial, prepared, module, tensors, model_digest=model_digest)
        (partial / _KEPT).write_text(json.dumps(asdict(kept)) + "\n", encoding="utf-8")


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

    Such files belong to the checkpoint that is trained, or to another one.
    """
    output = settings.output
    problem = f"output={output}: it has a checkpoint that no run of `entrenar` wrote"
    if output.resolve() == settings.model.resolve():
        problem = (
            f"output={output}: this is the model's folder, and the model's files would be replaced"
        )
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
    """Return the model that a run wrote to the folder `path`. Raises UsageError if no run did.

    Python code of the checkpoint runs only if the user `trusts` it, whatever the folder says.
    """
    record = path / SETTINGS
    if not record.is_file():
        raise UsageError(f"{path}: no {SETTINGS} there; give the output folder of a complete run")
    settings, digests = read_settings(path)
    if settings.trust_remote_code and not trusts:
        raise UsageError(
            f"{path}: its run executed Python code of the checkpoint {settings.model} "
            "(trust_remote_code), which a folder can't allow; give --trust-remote-code "
            "if you trust that checkpoint"
        )
    _require_same(path, settings, digests)
    tokenizer = model.tokenizer(settings, path)
    module = model.trained(settings, path, model.padding(tokenizer))
    foresight.say_warnings()
    return Output(path, settings, tokenizer, module)


def _require_same(path: Path, settings: Settings, digests: Digests | None) -> None:
    """Raise UsageError if the model under the adapters, or the tokenizer, isn't the run's own."""
    if digests is None:
        printing.warn(
            f"entrenar: warning: {path / SETTINGS}: an older release wrote no digests of "
            "model and tokenizer, so it isn't checked that they are the run's"
        )
        return
    if settings.adapts and (digest := model_folder.digest(settings.model)) != digests.model:
        raise UsageError(
            f"{path}: its adapters were trained on a different model from {settings.model}, "
            f"which has the digest {digest}; the run's model had {digests.model}. Put that "
            f"checkpoint there, or name its folder in {SETTINGS} (model)"
        )
    if (digest := tokenizer_digest(path)) != digests.tokenizer:
        raise UsageError(
            f"{path}: its tokenizer is not the run's: its files have the digest {digest}, but "
            f"the run's had {digests.tokenizer}. Put back the files that the run wrote, or "
            "export it again: entrenar finetune --resume"
        )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is generated. A `temperature` of 0 takes the most likely token each time.

    Otherwise tokens are drawn from `seed`, among the most likely ones with a total probability of
    `top_p`. A prompt has the same answer alone and in a file.
    """

    new_tokens: int = NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def sampling_of(output: Output, arguments: argparse.Namespace) -> Sampling:
    """Return the sampling of the command line. Raises UsageError for options without an effect."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Sampling)}
    chosen = {name: value for name, value in values.items() if value is not None}
    sampling = Sampling(**chosen)
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise UsageError(
            f"--temperature {sampling.temperature:g}: use 0, which takes the most likely token, or "
            f"at least {LEAST_TEMPERATURE:g}"
        )
    for name in chosen:
        option = f"--{name.replace('_', '-')} {chosen[name]:g}"
        if output.settings.task == "classify":
            raise UsageError(
                f"{option}: {output.folder} answers with classes (task: classify), not with a "
                "text; leave it out"
            )
        if name in ("top_p", "seed") and not sampling.temperature:
            raise UsageError(f"{option}: nothing is sampled; give --temperature, or leave it out")
    return sampling


def answer(output: Output, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yield the lines of the answer to `prompt`: classes with their probabilities, or a text.

    Raises UsageError for a prompt that can't be answered.
    """
    if not prompt.strip():
        raise UsageError("--prompt is empty; give a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("--prompt is not UTF-8; give a text in UTF-8") from error
    try:
        tokens = _tokens(output, prompt, sampling)
    except BadConversationError as error:
        raise UsageError(f"--prompt: {error}") from error
    reply = _answer(output, tokens, sampling)
    if isinstance(reply, str):
        yield reply
    else:
        yield from (f"{label} {share:.4f}" for label, share in reply.items())


def answers(output: Output, path: Path, sampling: Sampling) -> Iterator[str]:
    """Yield a line of JSON for each row at `path`: its place, and its answer or classes.

    The answer that ends a conversation is replaced by the model's. Raises RowsError for rows that
    can't be used or answered, unless the run's `data.on_error` skips them, which is warned of. All
    of them are found before the first answer.
    """
    questions = [_question(output, row, sampling) for row in rows.read(path)]
    bad = [question for question in questions if isinstance(question, BadRow)]
    num_good = len(questions) - len(bad)
    samples.require_usable(output.settings.data, f"--prompts {path}", bad, num_good)
    if bad:
        by = samples.skipped_by(output.settings.data, bad)
        printing.warn(f"entrenar: warning: skipped: {counted(len(bad), 'row')} ({by})")
        printing.warn_lines("\n".join(samples.listed(bad)))
    for question in questions:
        if isinstance(question, BadRow):
            continue
        place, tokens = question
        reply = _answer(output, tokens, sampling)
        key = "answer" if isinstance(reply, str) else "classes"
        yield json.dumps({"place": place, key: reply})


def _question(
    output: Output, row: Row | BadRow, sampling: Sampling
) -> tuple[str, list[int]] | BadRow:
    """Return the place and the tokens of a row's prompt, or why it can't be answered."""
    prompt = row if isinstance(row, BadRow) else prompts.of_row(row, output.settings)
    if isinstance(prompt, BadRow):
        return prompt
    try:
        return prompt.place, _tokens(output, prompt.asked, sampling)
    except BadConversationError as problem:
        return BadRow(prompt.place, escaping.shortened(escaping.exact(problem)))


def _tokens(output: Output, prompt: Conversation | str, sampling: Sampling) -> list[int]:
    """Return the tokens of a prompt. Raises BadConversationError if it can't be answered."""
    settings, tokenizer = output.settings, output.tokenizer
    if isinstance(prompt, str) and _chats(output):
        turn = {"role": "user", "content": prompt}
        prompt = Conversation(messages=[turn], tools=None, learned=())
    if isinstance(prompt, Conversation) and not _chats(output):
        raise BadConversationError(
            f"has messages, but the tokenizer of {output.folder} has no chat template; give a text"
        )
    if isinstance(prompt, Conversation):
        tokens = ChatEncoder(tokenizer, settings.data.date).prompt(prompt)
    elif settings.task == "classify" and settings.data.truncates:
        tokens = samples.first_tokens(tokenizer, prompt, settings.data.max_tokens)
    elif settings.task == "classify":
        tokens = samples.tokens_of(tokenizer, prompt)
    else:
        tokens = samples.open_tokens(tokenizer, prompt)
    model_folder.require_tokens(output.module, tokens, folder=settings.model)
    _require_room(output, tokens, sampling.new_tokens)
    return tokens


def _chats(output: Output) -> bool:
    """Return whether prompts are asked in the chat template."""
    has_template = getattr(output.tokenizer, "chat_template", None) is not None
    return output.settings.task in CHATS and has_template


def _answer(output: Output, prompt: Sequence[int], sampling: Sampling) -> str | dict[str, float]:
    """Return a text, or the probability of each class, the most likely one first."""
    settings, tokenizer = output.settings, output.tokenizer
    module = cast("Any", output.module)
    tokens = torch.tensor([prompt])
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    products = precision.of_products(settings)
    with (
        torch.no_grad(),
        precision.applied(products, module.device),
        torch.random.fork_rng(devices=[]),
    ):
        if settings.task == "classify":
            shares = module(**batch).logits[0].softmax(-1).tolist()
            labelled = zip(settings.classes.labels, shares, strict=True)
            return dict(sorted(labelled, key=lambda pair: -pair[1]))
        torch.manual_seed(sampling.seed)
        drawing: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            drawing = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0}
            drawing["top_p"] = sampling.top_p
        with stock.answering_plainly(module, tokenizer):
            generated = module.generate(
                **batch,
                max_new_tokens=sampling.new_tokens,
                pad_token_id=model.padding(tokenizer),
                **drawing,
            )
    new = generated[0, len(prompt) :].tolist()
    new = decoding.whole(new, tokenizer, stock.ends(module, tokenizer))
    return decoding.text(new, tokenizer, after=() if _chats(output) else prompt)


def _require_room(output: Output, tokens: Sequence[int], new_tokens: int) -> None:
    """Raise BadConversationError unless the model has positions for prompt and answer."""
    limit = model_folder.longest(output.module)
    due = len(tokens) + (new_tokens if output.settings.task != "classify" else 0)
    if limit is not None and due > limit:
        answer = "" if due == len(tokens) else f" and --new-tokens {new_tokens}"
        raise BadConversationError(
            f"has {len(tokens)} tokens{answer}: the model takes {limit} tokens in all; use fewer"
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


def merge(output: Output, merged: Path, *, dtype: str = "float32") -> None:
    """Write a checkpoint to `merged` in which the adapters are added to their layers' weights.

    Sums are computed in float32, and rounded to `dtype`: 16 bits may round away most of what was
    learned. Weights in NF4 or 16 bits are decoded to the same values as in training. Raises
    UsageError if there are no adapters or if `merged` is not empty, and SystemFailure if it can't
    be written or if stock transformers read a different model from it.
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
        merged_module = stock.merge(module.float(), output.tokenizer, partial, dtype)
    stock.require_merged(output.settings, merged_module, pad_token=pad_token, folder=merged)
