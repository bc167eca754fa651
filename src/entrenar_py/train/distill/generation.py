"""A teacher that answers prompts on this machine, by `transformers`' generation."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from blake3 import blake3

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.distill import teacher
from entrenar_py.train.distill.journal import day_of, journal_of
from entrenar_py.train.distill.prompts import (
    REFUSED,
    TRUNCATED,
    WHOLE,
    Answer,
    Failed,
    Prompt,
    Result,
)
from entrenar_py.train.model import encoding, fitting, model, prepared, rendering, samples
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError
from entrenar_py.train.model.settings import Completions, Distillation, Settings


class Generation:
    """The checkpoint `distill.teacher` on one device. Reads its weights when the first is asked."""

    def __init__(
        self, settings: Settings, section: Distillation, text: Completions, name: str
    ) -> None:
        """`name` is the backend. Raises UsageError for a teacher that can't answer."""
        self._settings, self._section, self._text = settings, section, text
        self._own = teacher.settings_of(settings, section)
        self._device = teacher.device_of(name)
        fitting.require_checkpoint(self._own.model)
        self._tokenizer = model.tokenizer(self._own)
        if settings.task == "instruct" and not getattr(self._tokenizer, "chat_template", None):
            raise UsageError(
                f"distill.teacher={self._own.model}: its tokenizer has no chat template, which "
                "task: instruct needs; use the checkpoint of a chat model, or task: text"
            )
        # What is resumed goes on with the day on which it began.
        begun = day_of(journal_of(text.rows))
        dated = prepared.dated(settings, self._tokenizer, begun)
        self.day = dated.data.date if rendering.has_clock(self._tokenizer) else None
        self._chats = ChatEncoder(self._tokenizer, self.day)
        self._module: Any = None

    @property
    def identity(self) -> list[str]:
        """The source of the answers: digests and format; reads all of the checkpoint."""
        ends = self._own.model / "generation_config.json"
        return [
            fitting.digest(self._own.model),
            samples.tokenizer_digest(self._tokenizer),
            self._section.precision,
            blake3(ends.read_bytes() if ends.is_file() else b"").hexdigest(16),
            *([self.day] if self.day is not None else []),
        ]

    def answers(
        self, prompts: Sequence[Prompt], stopping: threading.Event
    ) -> Generator[tuple[Prompt, Result], None, None]:
        """Yield each prompt with its answer, or why it has none.

        Once `stopping` is set, the answer in work is given up. Raises UsageError if the checkpoint
        can't be loaded.
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
            return encoding.tokens_of(self._tokenizer, prompt.asked)
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
        fitting.require_tokens(module, tokens, folder=self._own.model)
        limit, most = fitting.longest(module), self._text.new_tokens
        if limit is not None and len(tokens) >= limit:
            return Failed(f"has {len(tokens)} tokens; the teacher takes {limit} with its answer")
        if limit is not None:
            most = min(most, limit - len(tokens))
        made = self._generated(prompt, tokens, most, stopping)
        if stopping.is_set():
            return None
        if made[-1] not in self._ends():
            return Answer(TRUNCATED, self._decoded(prompt, tokens, made))
        content = self._decoded(prompt, tokens, made[:-1])
        return Answer(WHOLE if content.strip() else REFUSED, content)

    @torch.inference_mode()
    def _generated(
        self, prompt: Prompt, tokens: list[int], most: int, stopping: threading.Event
    ) -> list[int]:
        """Return the new tokens, at most `most`. Sampling follows from the seed and the prompt."""
        given = torch.tensor([tokens], device=self._device)
        is_cuda = self._device.type == "cuda"
        temperature = self._text.temperature
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        with torch.random.fork_rng(devices=[self._device] if is_cuda else []):
            torch.manual_seed(self._seed(prompt))
            made = self._module.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=most,
                pad_token_id=model.padding(self._tokenizer),
                eos_token_id=sorted(self._ends()),
                stopping_criteria=_criteria(stopping),
                logits_processor=[_require_finite],
                **how,
            )
        return cast("list[int]", made[0, len(tokens) :].tolist())

    def _seed(self, prompt: Prompt) -> int:
        told = f"{self._settings.seed} {prompt.digest}".encode()
        return int.from_bytes(blake3(told).digest(8)) >> 1

    def _ends(self) -> set[int]:
        """Return the tokens that end an answer."""
        named = getattr(self._module.generation_config, "eos_token_id", None)
        several = named if isinstance(named, list) else [named]
        return {int(one) for one in (*several, self._tokenizer.eos_token_id) if one is not None}

    def _decoded(self, prompt: Prompt, tokens: list[int], made: list[int]) -> str:
        decode = self._tokenizer.decode
        answer = str(decode(made, skip_special_tokens=True))
        if not isinstance(prompt.asked, str):
            return answer
        # Some tokenizers leave out a space where a text begins.
        whole = str(decode([*tokens, *made], skip_special_tokens=True))
        before = str(decode(tokens, skip_special_tokens=True))
        return whole.removeprefix(before) if whole.startswith(before) else answer

    def _loaded(self) -> Any:
        if self._module is None:
            module = teacher.checkpoint(self._settings, self._section, self._device)
            self._module = module.to(self._device)
            self._module.generation_config = _plain(self._module.generation_config)
        return self._module


def _require_finite(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the next token's logits. Raises SystemFailure if they are not finite."""
    if scores.isnan().any() or (scores == torch.inf).any():
        raise SystemFailure(
            "the teacher's logits are not finite; check the checkpoint, or try distill.precision: "
            "float32"
        )
    return scores


def _plain(config: Any) -> Any:
    """Return a way of generating with the ends of `config` alone.

    A checkpoint's penalties, beams and the like are not followed: the settings have the
    temperature, and nothing else is asked for.
    """
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=getattr(config, "eos_token_id", None))


def _criteria(stopping: threading.Event) -> Any:
    """Return what ends a generation once `stopping` is set."""
    from transformers import StoppingCriteriaList

    def is_over(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(tokens),), stopping.is_set(), device=tokens.device)

    return StoppingCriteriaList([is_over])
