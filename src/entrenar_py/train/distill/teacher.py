"""A teacher: a checkpoint that computes its most likely tokens, or answers prompts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from entrenar_py import compute as backends
from entrenar_py.shared import package_data, scenario
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill.prompts import (
    REFUSED,
    TRUNCATED,
    WHOLE,
    Answer,
    Failed,
    Prompt,
    Result,
    day_of,
    journal_of,
)
from entrenar_py.train.distill.shards import Places, Rows, joined
from entrenar_py.train.model import (
    blocks,
    decoding,
    model,
    model_folder,
    objectives,
    preparation,
    rendering,
    samples,
    stock,
)
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Completions, Distillation, Lora, Settings

LENGTHS = 8  # rows are padded to a multiple of this
_BLOCK = 128  # columns
_LOGITS_MAX = 2**28  # computed at a time on a GPU: 512 MiB in bfloat16
_THOUGHT = ("<think>", "</think>")  # which templates find in a content
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
_LAST_TOKENS = 16  # of a prompt, which have the thought that it opens
_STORED = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Kept:
    """The stored part of the distributions at m positions: two tensors [m, k], and `rest` [m].

    They are on the host; if `copied` is not None, only after that event.
    """

    tokens: Tensor
    log_probabilities: Tensor
    rest: Tensor
    copied: torch.cuda.Event | None = None

    def arrays(self) -> list[Any]:
        """Return the tensors as arrays. Waits only for the GPU's copy of them."""
        if self.copied is not None:
            self.copied.synchronize()
        return [one.numpy() for one in (self.tokens, self.log_probabilities, self.rest)]


class Teacher:
    """A causal language model on one device, in evaluation mode."""

    def __init__(
        self, module: nn.Module, device: torch.device, *, top_k: int, stored: str, known: int
    ) -> None:
        """Keep the `top_k` most likely tokens among those below `known`, which a tokenizer has.

        If there are fewer than `top_k` of these, tokens are chosen from the whole vocabulary.
        """
        config = cast("Any", module).config
        self.vocabulary = int(config.get_text_config().vocab_size)
        self._top_k, self._stored = top_k, _STORED[stored]
        self._known = known if top_k <= known < self.vocabulary else self.vocabulary
        self.device = device
        self.module = module.to(device)
        self._head = objectives.head_of(module)

    @torch.inference_mode()
    def kept(self, tokens: Tensor, places: Tensor) -> Kept:
        """Return the stored part of the distributions at `places`, int64 [m].

        Places are indices into all elements of `tokens`, int64 [n, t], in C order.
        """
        replaced = (
            nullcontext() if self._head is None else objectives.replaced_by_identity(self._head)
        )
        with replaced:
            output = self.module(input_ids=self._here(tokens), use_cache=False).logits
        outputs = output.flatten(0, 1).index_select(0, self._here(places))
        held = _LOGITS_MAX if self.device.type == "cuda" else objectives.LOGITS_MAX
        rows = max(1, held // self.vocabulary)
        parts = [self._kept(part) for part in outputs.split(rows)]
        tokens = torch.cat([part.tokens for part in parts])
        logs = torch.cat([part.log_probabilities for part in parts])
        rest = torch.cat([part.rest for part in parts])
        if self.device.type == "cpu":
            return Kept(tokens, logs, rest)
        copies = [_to_host(part) for part in (tokens, logs, rest)]
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        return Kept(copies[0], copies[1], copies[2], copied)

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, without waiting for the device's present work."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _kept(self, outputs: Tensor) -> Kept:
        logits = outputs if self._head is None else self._head(outputs)
        return kept_of(logits, top_k=self._top_k, known=self._known, stored=self._stored)


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def kept_of(logits: Tensor, *, top_k: int, known: int, stored: torch.dtype) -> Kept:
    """Return the stored part of `logits` [m, vocabulary]: the `top_k` largest of the first `known`.

    Log-probabilities are rounded to the dtype `stored`. The rest is NaN where logits are not
    finite. The memory of `logits` is overwritten.
    """
    if top_k == logits.shape[-1]:
        tokens = torch.arange(top_k, device=logits.device).expand(len(logits), -1)
        values, others = logits.float(), torch.full((len(logits),), -torch.inf).to(logits.device)
    else:
        found, tokens = largest(logits[:, :known], top_k)
        values = found.float()
        # Not 1 minus the sum of what is kept: for a confident teacher, only rounding would be left.
        others = _log_sum(logits.scatter_(1, tokens, -torch.inf))
    whole = torch.logaddexp(values.logsumexp(-1), others)
    rest = torch.where(whole.isfinite(), others - whole, torch.nan)
    return Kept(tokens.to(torch.int32), (values - whole[:, None]).to(stored), rest)


def largest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest values of each row, largest first, and their columns.

    Columns are grouped into blocks. The blocks with the `top_k` largest maxima contain all results,
    so a large vocabulary is read once instead of eight times.
    """
    number = logits.shape[1] // _BLOCK
    if number <= 2 * top_k:
        top = logits.topk(top_k, dim=-1, sorted=True)
        return top.values, top.indices
    size = number * _BLOCK
    blocks = logits[:, :size].view(len(logits), number, _BLOCK)
    chosen = blocks.amax(-1).topk(top_k, dim=-1, sorted=False).indices
    values = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    if size < logits.shape[1]:
        values = torch.cat([values, logits[:, size:]], 1)
    top = values.topk(top_k, dim=-1, sorted=True)
    block = (top.indices // _BLOCK).clamp(max=top_k - 1)
    columns = chosen.gather(1, block) * _BLOCK + top.indices % _BLOCK
    past = top.indices - top_k * _BLOCK  # index among the last columns, which fill no block
    return top.values, torch.where(past >= 0, size + past, columns)


def _log_sum(logits: Tensor) -> Tensor:
    """Return the log of the sum of exponentials of each row, float32 [m]."""
    if logits.device.type == "cuda":
        return _compiled()(logits)
    return logits.float().logsumexp(-1)


@cache
def _compiled() -> Callable[[Tensor], Tensor]:
    """Return a kernel that reads each logit once, in a sixth of the time of separate operations."""

    def log_sum(logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1)

    torch.use_deterministic_algorithms(True)  # tells the compiler, too; `open_cuda` did not
    compiled: Callable[[Tensor], Tensor] = torch.compile(log_sum, dynamic=True)
    return compiled


def device_of(name: str) -> torch.device:
    """Return the device of the backend `name`.

    Raises UsageError for a backend on which no teacher runs, and BackendUnavailable if it is
    missing.
    """
    kind = scenario.backend_kind(name)
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--backend={name}: a teacher runs on cpu or cuda; use one of these")
    backends.open_backend(name)  # raises here if the device is missing
    return torch.device(name if kind == "cuda" else "cpu")


def settings_of(settings: Settings, section: Distillation) -> Settings:
    """Return the settings with which the teacher's checkpoint is loaded.

    Raises UsageError if no teacher is named.
    """
    if section.teacher is None:
        raise UsageError(
            "distill.teacher is missing: the folder with the teacher's checkpoint; it "
            "is needed for this command, but not for training the student"
        )
    return replace(
        settings,
        model=section.teacher,
        task="text",
        method="lora",
        lora=Lora(),
        precision="float32" if section.precision == "float32" else "bfloat16",
        recompute="none",
        strategy=None,
        stages=(),
    )


def load(settings: Settings, section: Distillation, device: torch.device, *, known: int) -> Teacher:
    """Return the teacher on `device`. Raises UsageError if it can't be loaded."""
    module = checkpoint(settings, section, device)
    return Teacher(module, device, top_k=section.top_k, stored=section.stored, known=known)


def checkpoint(settings: Settings, section: Distillation, device: torch.device) -> nn.Module:
    """Return the teacher's model on the CPU, in the form that runs on `device`.

    Raises UsageError if it can't be loaded, or for int8 on a device that is not a CPU.
    """
    if section.precision == "int8" and device.type != "cpu":
        raise UsageError(
            f"distill.precision=int8 on {device}: int8 is for CPUs; use bfloat16 there"
        )
    module = model.plain(settings_of(settings, section))
    if section.precision == "int8":
        _quantise(module)
        _require_running(module)
    return module


def _quantise(module: nn.Module) -> None:
    """Convert the linear layers within blocks to int8, with bitsandbytes' LLM.int8() for CPUs.

    Raises UsageError for a model without such layers. Warns if most weights in blocks are in other
    layers.
    """
    try:
        from bitsandbytes import nn as quantised
    except ImportError as error:
        raise UsageError(
            f"distill.precision=int8 needs bitsandbytes; {package_data.extra_advice('finetune')}"
        ) from error
    of_blocks = blocks.of(module)
    total, narrowed = sum(one.numel() for one in of_blocks.parameters()), 0
    for block in of_blocks:
        for name, layer in list(block.named_modules()):
            if type(layer) is not nn.Linear:
                continue
            narrowed += layer.weight.numel()
            narrow = quantised.Linear8bitLt(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                has_fp16_weights=False,
            )
            narrow.load_state_dict(layer.state_dict())
            above, _, own = name.rpartition(".")
            setattr(block.get_submodule(above), own, narrow.to("cpu").requires_grad_(False))
    if not narrowed:
        raise UsageError(
            f"distill.precision=int8: the blocks of {type(module).__name__} have no linear layer "
            "(nn.Linear), so all would stay in bfloat16; use precision: bfloat16"
        )
    if 2 * narrowed < total:
        printing.warn(
            f"warning: distill.precision=int8: {narrowed / total:.0%} of the weights in blocks of "
            f"{type(module).__name__} are in int8; the others, such as experts, stay in bfloat16"
        )


def _require_running(module: nn.Module) -> None:
    """Raise UsageError if the model can't run with int8 layers: its code may read their weights."""
    try:
        with torch.inference_mode():
            module.eval()(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False)
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise UsageError(
            f"distill.precision=int8: {type(module).__name__} doesn't run with its linear layers "
            f"in int8 ({message}); use precision: bfloat16"
        ) from error


def batches(samples: Samples, ids: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of `ids`, longest samples first, with up to `batch_tokens` tokens with padding.

    A longer sample is a batch of its own. Batches depend only on a shard's samples, so a shard has
    the same bits whichever process computes it.
    """
    batch = list[int]()
    for sample in sorted(ids, key=lambda i: (-samples.length(i), i)):
        longest = _filled(samples.length(batch[0] if batch else sample))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _filled(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


class Batch:
    """A batch on the host: tokens int64 [n, t], and the places of its rows, int64 [m]."""

    def __init__(
        self, samples: Samples, places: Places, ids: Sequence[int], pad_token: int, longest: int
    ) -> None:
        """`longest` is the length of the longest of all samples: no row is padded beyond it."""
        self.ids = ids
        length = min(_filled(max(map(samples.length, ids))), longest)
        tokens = np.full((len(ids), length), pad_token, np.int64)
        positions = [places.positions(sample) for sample in ids]
        for row, sample in enumerate(ids):
            own_tokens = samples.tokens[samples.part(sample)]
            tokens[row, : len(own_tokens)] = own_tokens
        self.tokens = torch.from_numpy(tokens)
        self.places = torch.from_numpy(
            np.concatenate([row * length + own for row, own in enumerate(positions)])
        )
        self.sample = np.repeat(np.array(ids, np.int32), [len(own) for own in positions])
        self.position = np.concatenate(positions).astype(np.int32)
        self.target = np.concatenate([places.targets(sample) for sample in ids])
        self.num_tokens = sum(map(samples.length, ids))

    def rows(self, kept: Kept) -> Rows:
        """Return the batch's rows, with the distributions in `kept`.

        Raises SystemFailure if the teacher's logits are not finite.
        """
        rows = Rows(self.sample, self.position, self.target, *kept.arrays())
        [wrong] = np.nonzero(np.isnan(rows.rest))
        if len(wrong):
            raise SystemFailure(
                f"the teacher's logits are not finite in {len(wrong)} of {len(rows)} rows, first "
                f"at position {rows.position[wrong[0]]} of sample {rows.sample[wrong[0]]}; the "
                "shard was not written; check the checkpoint, or try distill.precision: float32"
            )
        return rows


def in_order(parts: Sequence[Rows], ids: Sequence[int]) -> Rows:
    """Return the rows of `parts`, grouped by sample, with samples in the order of `ids`."""
    rows = joined(parts)
    rank = np.empty(max(ids) + 1, np.int64)
    rank[list(ids)] = np.arange(len(ids))
    return rows.taken(np.argsort(rank[rows.sample], kind="stable"))


class Generation:
    """The checkpoint `distill.teacher` on one device. Its weights are loaded when needed."""

    def __init__(
        self, settings: Settings, section: Distillation, text: Completions, name: str
    ) -> None:
        """`name` is the backend. Raises UsageError for a teacher that can't answer."""
        self._settings, self._section, self._text = settings, section, text
        self._own = settings_of(settings, section)
        self._device = device_of(name)
        model_folder.require_checkpoint(self._own.model)
        self._tokenizer = model.tokenizer(self._own)
        if settings.task == "instruct" and not getattr(self._tokenizer, "chat_template", None):
            raise UsageError(
                f"distill.teacher={self._own.model}: its tokenizer has no chat template, which "
                "task: instruct needs; use the checkpoint of a chat model, or task: text"
            )
        # A resumed command continues with the day on which it began.
        begun = day_of(journal_of(text.rows))
        dated = preparation.dated(settings, self._tokenizer, begun)
        self.day = dated.data.date if rendering.has_clock(self._tokenizer) else None
        self._chats = ChatEncoder(self._tokenizer, self.day)
        self._module: Any = None

    @property
    def identity(self) -> list[str]:
        """Texts that identify the source: digests and the precision. Reads the whole checkpoint."""
        ends = self._own.model / "generation_config.json"
        return [
            model_folder.digest(self._own.model),
            samples.tokenizer_digest(self._tokenizer),
            self._section.precision,
            blake3(ends.read_bytes() if ends.is_file() else b"").hexdigest(16),
            *([self.day] if self.day is not None else []),
        ]

    def answers(
        self, prompts: Sequence[Prompt], stopping: threading.Event
    ) -> Generator[tuple[Prompt, Result], None, None]:
        """Yield each prompt with its answer, or with the reason why it has none.

        Once `stopping` is set, the answer in progress is abandoned. Raises UsageError if the
        checkpoint can't be loaded.
        """
        for prompt in prompts:
            try:
                result = self._answer(prompt, self._tokens(prompt), stopping)
            except BadConversationError as problem:
                result = Failed(str(problem))
            if result is None:
                return
            yield prompt, result

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt.asked, str):
            return samples.open_tokens(self._tokenizer, prompt.asked)
        return self._chats.prompt(prompt.asked)

    def _answer(
        self, prompt: Prompt, tokens: list[int], stopping: threading.Event
    ) -> Result | None:
        """Return the answer to a prompt of `tokens`; None if `stopping` was set before its end."""
        if stopping.is_set():
            return None
        module = self._loaded()
        if not tokens:
            return Failed("has no token")
        model_folder.require_tokens(module, tokens, folder=self._own.model)
        limit, most = model_folder.longest(module), self._text.new_tokens
        if limit is not None and len(tokens) >= limit:
            return Failed(
                f"has {len(tokens)} tokens; prompt and answer together may have at most "
                f"{limit}, the teacher's limit"
            )
        if limit is not None:
            most = min(most, limit - len(tokens))
        answer = self._generated(prompt, tokens, most, stopping)
        if stopping.is_set():
            return None
        ends = stock.ends(module, self._tokenizer)
        new = decoding.whole(answer, self._tokenizer, ends)
        is_text = isinstance(prompt.asked, str)
        content = decoding.text(new, self._tokenizer, after=tokens if is_text else ())
        if answer[-1] not in ends:
            return Answer(TRUNCATED, content)
        if not content.strip():
            return Answer(REFUSED, content)
        if is_text:
            return Answer(WHOLE, content)
        names = [one for one in decoding.special(new, self._tokenizer) if one not in _THOUGHT]
        if names:
            return Failed(
                f"the answer has {' and '.join(names)}, which the teacher's chat template reads as "
                "calls, thoughts or turns, and no content can have; use an endpoint, which reads "
                "them, too"
            )
        return Answer(WHOLE, self._opened(tokens) + content)

    @torch.inference_mode()
    def _generated(
        self, prompt: Prompt, tokens: list[int], most: int, stopping: threading.Event
    ) -> list[int]:
        """Return up to `most` new tokens. Sampling depends only on the seed and the prompt."""
        prompt_tokens = torch.tensor([tokens], device=self._device)
        is_cuda = self._device.type == "cuda"
        temperature = self._text.temperature
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        with torch.random.fork_rng(devices=[self._device] if is_cuda else []):
            torch.manual_seed(self._seed(prompt))
            output = self._module.generate(
                input_ids=prompt_tokens,
                attention_mask=torch.ones_like(prompt_tokens),
                max_new_tokens=most,
                pad_token_id=model.padding(self._tokenizer),
                stopping_criteria=_criteria(stopping),
                logits_processor=[_require_finite],
                **how,
            )
        return cast("list[int]", output[0, len(tokens) :].tolist())

    def _seed(self, prompt: Prompt) -> int:
        told = f"{self._settings.seed} {prompt.digest}".encode()
        return int.from_bytes(blake3(told).digest(8)) >> 1

    def _opened(self, tokens: list[int]) -> str:
        """Return the beginning of an answer with which the template ends a prompt of `tokens`."""
        found = _OPEN_THOUGHT.search(str(self._tokenizer.decode(tokens[-_LAST_TOKENS:])))
        return "" if found is None else found[0]

    def _loaded(self) -> Any:
        if self._module is None:
            module = checkpoint(self._settings, self._section, self._device)
            self._module = module.to(self._device)
            self._module.generation_config = stock.plain_generation(module, self._tokenizer)
        return self._module


def _require_finite(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if scores.isnan().any() or (scores == torch.inf).any():
        raise SystemFailure(
            "the teacher's logits are not finite; check the checkpoint, or try distill.precision: "
            "float32"
        )
    return scores


def _criteria(stopping: threading.Event) -> Any:
    from transformers import StoppingCriteriaList

    def is_over(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(tokens),), stopping.is_set(), device=tokens.device)

    return StoppingCriteriaList([is_over])
