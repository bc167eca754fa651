"""A teacher: a checkpoint that is run forward, and its most likely tokens at each position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from entrenar_py import compute as backends
from entrenar_py.shared import scenario, shipped
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill.shards import Places, Rows, joined
from entrenar_py.train.model import blocks, fused_loss, model
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Distillation, Lora, Settings

LENGTHS = 8  # rows are filled up to a multiple of this
_BLOCK = 128  # columns
_LOGITS_MAX = 2**28  # made at a time on a GPU: 512 MiB in bfloat16
_STORED = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Kept:
    """The kept part of some positions: each [m, k], and `rest` [m].

    Once `copied` has happened, if it is not None, they are on the host.
    """

    tokens: Tensor
    log_probabilities: Tensor
    rest: Tensor
    copied: torch.cuda.Event | None = None

    def arrays(self) -> list[Any]:
        """Return them as arrays; waits for a GPU, but not for what it was given later."""
        if self.copied is not None:
            self.copied.synchronize()
        return [one.numpy() for one in (self.tokens, self.log_probabilities, self.rest)]


class Teacher:
    """A causal language model on one device, in evaluation mode."""

    def __init__(
        self, module: nn.Module, device: torch.device, *, top_k: int, stored: str, known: int
    ) -> None:
        """Keep the `top_k` most likely of the tokens below `known`, those that a tokenizer has.

        If there are fewer of these, all tokens are looked at.
        """
        config = cast("Any", module).config
        self.vocabulary = int(config.get_text_config().vocab_size)
        self._top_k, self._stored = top_k, _STORED[stored]
        self._known = known if top_k <= known < self.vocabulary else self.vocabulary
        self.device = device
        self.module = module.to(device)
        self._head = fused_loss.head_of(module)

    @torch.inference_mode()
    def kept(self, tokens: Tensor, places: Tensor) -> Kept:
        """Return what is kept at `places`, int64 [m], of `tokens`, int64 [n, t], flattened."""
        replaced = (
            nullcontext() if self._head is None else fused_loss.replaced_by_identity(self._head)
        )
        with replaced:
            found = self.module(input_ids=self._here(tokens), use_cache=False).logits
        outputs = found.flatten(0, 1).index_select(0, self._here(places))
        held = _LOGITS_MAX if self.device.type == "cuda" else fused_loss.LOGITS_MAX
        rows = max(1, held // self.vocabulary)
        parts = [self._kept(part) for part in outputs.split(rows)]
        tokens = torch.cat([one.tokens for one in parts])
        logs = torch.cat([one.log_probabilities for one in parts])
        rest = torch.cat([one.rest for one in parts])
        if self.device.type == "cpu":
            return Kept(tokens, logs, rest)
        copies = [_to_host(one) for one in (tokens, logs, rest)]
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        return Kept(copies[0], copies[1], copies[2], copied)

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, without waiting for its present work."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _kept(self, outputs: Tensor) -> Kept:
        logits = outputs if self._head is None else self._head(outputs)
        return kept_of(logits, top_k=self._top_k, known=self._known, stored=self._stored)


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is there when the GPU's present work is done."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def kept_of(logits: Tensor, *, top_k: int, known: int, stored: torch.dtype) -> Kept:
    """Return what is kept of `logits` [m, vocabulary]: the `top_k` largest of the first `known`.

    Log-probabilities are rounded to the format `stored`. The rest is NaN where logits are not
    finite. The logits' memory is used.
    """
    if top_k == logits.shape[-1]:
        tokens = torch.arange(top_k, device=logits.device).expand(len(logits), -1)
        values, others = logits.float(), torch.full((len(logits),), -torch.inf).to(logits.device)
    else:
        found, tokens = largest(logits[:, :known], top_k)
        values = found.float()
        # Not 1 less the sum of what is kept: of a teacher that is sure, rounding alone is left.
        others = _log_sum(logits.scatter_(1, tokens, -torch.inf))
    whole = torch.logaddexp(values.logsumexp(-1), others)
    rest = torch.where(whole.isfinite(), others - whole, torch.nan)
    return Kept(tokens.to(torch.int32), (values - whole[:, None]).to(stored), rest)


def largest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest of each row, largest first, and their columns.

    Of blocks of columns, those with the largest maxima have them all. So a large vocabulary is
    passed over once, in place of eight times.
    """
    number = logits.shape[1] // _BLOCK
    if number <= 2 * top_k:
        found = logits.topk(top_k, dim=-1, sorted=True)
        return found.values, found.indices
    size = number * _BLOCK
    blocks = logits[:, :size].view(len(logits), number, _BLOCK)
    chosen = blocks.amax(-1).topk(top_k, dim=-1, sorted=False).indices
    values = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    if size < logits.shape[1]:
        values = torch.cat([values, logits[:, size:]], 1)
    found = values.topk(top_k, dim=-1, sorted=True)
    block = (found.indices // _BLOCK).clamp(max=top_k - 1)
    columns = chosen.gather(1, block) * _BLOCK + found.indices % _BLOCK
    past = found.indices - top_k * _BLOCK  # among the columns that fill no block
    return found.values, torch.where(past >= 0, size + past, columns)


def _log_sum(logits: Tensor) -> Tensor:
    """Return the log of the sum of exponentials of each row, float32 [m]."""
    if logits.device.type == "cuda":
        return _compiled()(logits)
    return logits.float().logsumexp(-1)


@cache
def _compiled() -> Callable[[Tensor], Tensor]:
    """Return a kernel that reads each logit once, which takes a sixth of the operations' time."""

    def log_sum(logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1)

    compiled: Callable[[Tensor], Tensor] = torch.compile(log_sum, dynamic=True)
    return compiled


def device_of(name: str) -> torch.device:
    """Return the device of the backend `name`.

    Raises UsageError for one on which no teacher runs, and BackendUnavailable if it isn't there.
    """
    kind = scenario.backend_kind(name)
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--backend={name}: a teacher runs on cpu or cuda; use one of these")
    backends.open_backend(name)  # a device that is missing ends the command here
    return torch.device(name if kind == "cuda" else "cpu")


def settings_of(settings: Settings, section: Distillation) -> Settings:
    """Return the settings by which the teacher's checkpoint is loaded.

    Raises UsageError if none is named.
    """
    if section.teacher is None:
        raise UsageError(
            "distill.teacher is missing: the folder with the teacher's checkpoint; it is needed "
            "here, and not where the student is trained"
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
    """Return the teacher's model, on the CPU, as it runs on `device`; raises as `load` does."""
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
    """Put the linear layers within blocks in int8, by bitsandbytes' LLM.int8() for CPUs.

    Raises UsageError for a model without any. A warning says if other weights are most.
    """
    try:
        from bitsandbytes import nn as quantised
    except ImportError as error:
        raise UsageError(
            f"distill.precision=int8 needs bitsandbytes; {shipped.extra_advice('finetune')}"
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
    """Raise UsageError if the model can't compute with its layers in int8: it may read weights."""
    try:
        with torch.inference_mode():
            module.eval()(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False)
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise UsageError(
            f"distill.precision=int8: {type(module).__name__} doesn't run with its linear layers "
            f"in int8 ({told}); use precision: bfloat16"
        ) from error


def batches(samples: Samples, ids: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of `ids`, longest samples first; each has at most `batch_tokens`, filled up.

    They follow from a shard's samples alone, so it has the same bits whoever makes it.
    """
    batch = list[int]()
    for one in sorted(ids, key=lambda i: (-samples.length(i), i)):
        longest = _filled(samples.length(batch[0] if batch else one))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _filled(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


class Batch:
    """A batch on the host: tokens int64 [n, t], and the places of its rows, int64 [m]."""

    def __init__(
        self, samples: Samples, places: Places, ids: Sequence[int], pad_token: int, longest: int
    ) -> None:
        """`longest` is the length of the longest sample of all: no row has more tokens."""
        self.ids = ids
        length = min(_filled(max(map(samples.length, ids))), longest)
        tokens = np.full((len(ids), length), pad_token, np.int64)
        positions = [places.positions(one) for one in ids]
        for row, one in enumerate(ids):
            held = samples.tokens[samples.part(one)]
            tokens[row, : len(held)] = held
        self.tokens = torch.from_numpy(tokens)
        self.places = torch.from_numpy(
            np.concatenate([row * length + own for row, own in enumerate(positions)])
        )
        self.sample = np.repeat(np.array(ids, np.int32), [len(own) for own in positions])
        self.position = np.concatenate(positions).astype(np.int32)
        self.target = np.concatenate([places.targets(one) for one in ids])
        self.num_tokens = sum(map(samples.length, ids))

    def rows(self, kept: Kept) -> Rows:
        """Return the batch's rows, with what was kept of them.

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
    """Return the rows of `parts`, those of each sample together and in the order of `ids`."""
    rows = joined(parts)
    rank = np.empty(max(ids) + 1, np.int64)
    rank[list(ids)] = np.arange(len(ids))
    return rows.taken(np.argsort(rank[rows.sample], kind="stable"))
