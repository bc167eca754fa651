"""A small fine-tuning run: a scenario's options for it, its checkpoint and its rows."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.model.settings import (
    CLASS_WEIGHTS,
    METHODS,
    RECOMPUTED,
    STRATEGIES,
    TASKS,
    Classes,
    Data,
    Lora,
    Preference,
    Settings,
)

FAMILIES = ("qwen3", "llama", "gpt2")
# Facts that a run records in addition to its training: samples and the positions that the loss
# depends on; the written files, as stock libraries load them; the merged model; each step compared
# with float64; a student's refusals.
FACTS = ("samples", "outputs", "merged", "gradients", "refusals")
_CHOICES = {
    "task": TASKS,
    "method": METHODS,
    "class_weights": CLASS_WEIGHTS,
    "family": FAMILIES,
    "strategy": STRATEGIES,
    "recompute": RECOMPUTED,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a scenario: the model's family, the task, and the facts to record.

    `blocks` is the number of the model's blocks. `cuts` has, for each part of a run between two
    stops, the blocks of each worker: the first, and the one after the last. Workers with the same
    blocks are copies. The last part's blocks are used until the end. Without `cuts`, stages have
    equal parts.

    Raises UsageError for a value that is not possible.
    """

    task: str = "instruct"
    method: str = "lora"
    rank: int = 2
    alpha: float = 6.0
    beta: float = 0.1
    label_smoothing: float = 0.0
    class_weights: str = "none"
    oversample: bool = False
    packing: bool = False
    marks: bool = False  # marks the assistant's text in the chat template
    family: str = "qwen3"
    strategy: str = "ddp"
    recompute: str = "none"
    blocks: int = 2
    cuts: tuple[tuple[tuple[int, int], ...], ...] = ()
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refused(name, getattr(self, name), f"allowed are {', '.join(choices)}")
        if type(self.rank) is not int or self.rank < 1:
            raise _refused("rank", self.rank, "use a whole number >= 1")
        if type(self.blocks) is not int or self.blocks < 1:
            raise _refused("blocks", self.blocks, "use a whole number >= 1")
        for name in ("alpha", "beta"):
            if type(getattr(self, name)) not in (int, float) or getattr(self, name) <= 0:
                raise _refused(name, getattr(self, name), "use a number > 0")
        if type(self.label_smoothing) not in (int, float) or not 0 <= self.label_smoothing < 0.5:
            raise _refused("label_smoothing", self.label_smoothing, "use a number >= 0 and < 0.5")
        if self.task == "preference" and not self.adapts:
            raise _refused("method", self.method, "with task preference, use lora or qlora")
        for name in ("oversample", "packing", "marks"):
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "use true or false")
        if self.packing and self.task in ("classify", "preference"):
            raise _refused("packing", self.packing, "use task instruct or text with it")
        if self.method == "qlora" and self.family == "gpt2":
            raise _refused("family", self.family, "use qwen3 or llama with method qlora")
        if self.oversample and self.class_weights != "none":
            raise _refused("class_weights", self.class_weights, "with oversample, use none")
        if unknown := set(self.facts) - set(FACTS):
            raise _refused("facts", min(unknown), f"allowed are {', '.join(FACTS)}")

    @property
    def adapts(self) -> bool:
        """True if adapters are trained, False if all weights are trained."""
        return self.method != "full"

    @classmethod
    def of(cls, scenario: Scenario) -> Request:
        """Return the request of `scenario`."""
        options: dict[str, Any] = dict(scenario.options)
        options.pop("network_seed", None)  # options of the simulation
        facts = options.pop("facts", ())
        if not isinstance(facts, list | tuple):
            raise _refused("facts", facts, f"use a list of {', '.join(FACTS)}")
        cuts = _cuts(options.pop("cuts", ()))
        return cls(**options, cuts=cuts, facts=tuple(map(str, facts)))


def _cuts(value: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the blocks of each worker, in each part of a run."""
    try:
        parts = tuple(tuple((first, stop) for first, stop in part) for part in value)
    except (TypeError, ValueError):
        parts = ((),)
    for part in parts:
        at, before = 0, None
        for own in part:
            if own == before:
                continue  # a copy of the worker before it
            first, stop = before = own
            if type(first) is not int or type(stop) is not int or first != at or stop <= first:
                raise _refused("cuts", value, f"{part} has no stage from block {at} on")
            at = stop
    if not all(parts):
        raise _refused("cuts", value, "use lists of [first, stop] for each worker")
    return parts


def _refused(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"options {name}={value!r}: {advice}", field=name)


LABELS = ("safe", "unsafe")
SHARE_UNSAFE = 0.25
BEGIN, END, PADDING, TURN = "<s>", "</s>", "<pad>", "<turn>"
SPECIAL = (PADDING, BEGIN, END, TURN)
_VOCABULARY = 192
_TOKENS_MAX = 128
_WORDS = ("list", "copy", "move", "show", "count", "sort", "find", "join", "pack", "send", "keep")
_MARKED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n{% endgeneration %}"
    "{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
_TEMPLATE = _MARKED_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# The layers that get adapters: of attention and of the multi-layer perceptron.
_TARGETS = {
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "llama": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Fixture:
    """A folder with a checkpoint, and the rows in `settings.data.train`, in the file's order."""

    settings: Settings
    rows: tuple[dict[str, Any], ...]


def make(folder: Path, scenario: Scenario, request: Request) -> Fixture:
    """Write checkpoint and rows to `folder`. Raises UsageError without the extra `finetune`."""
    require_libraries()
    draw = scenario.rng("data")
    rows = tuple(_rows(draw, scenario, request))
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = _tokenizer(rows, is_marked=request.marks)
    tokenizer.save_pretrained(folder / "model")
    _model(request, len(tokenizer), scenario).save_pretrained(folder / "model")
    is_classes = request.task == "classify"
    settings = Settings(
        model=folder / "model",
        task=request.task,
        method=request.method,
        recompute=request.recompute,
        output=folder / "out",
        seed=scenario.seed,
        data=Data(train=file, max_tokens=_TOKENS_MAX, packing=request.packing),
        classes=Classes(
            labels=LABELS if is_classes else (),
            weights=request.class_weights if is_classes else "none",
            oversample=request.oversample and is_classes,
        ),
        preference=Preference(beta=request.beta, label_smoothing=request.label_smoothing),
        lora=Lora(
            rank=request.rank,
            alpha=request.alpha,
            dropout=scenario.dropout,
            targets=_TARGETS[request.family],
        ),
    )
    return Fixture(settings=settings, rows=rows)


def teacher(folder: Path, fixture: Fixture, request: Request, scenario: Scenario) -> None:
    """Write a model like the model of `fixture` to `folder`: same tokenizer, different weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fixture.settings.model, local_files_only=True)
    tokenizer.save_pretrained(folder)
    other = scenario.with_(seed=scenario.seed + 1)
    _model(request, len(tokenizer), other).save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and warnings out of the report's standard error."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def require_libraries() -> None:
    """Raise UsageError, with the name of the extra, if a library is missing."""
    try:
        from entrenar_py.train.model.libraries import transformers
    except ImportError as error:
        raise UsageError(
            f"fine-tuning needs {error.name}; {package_data.extra_advice('finetune')}"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _rows(draw: np.random.Generator, scenario: Scenario, request: Request) -> list[dict[str, Any]]:
    """Return rows that become `scenario.num_samples` samples; each has a text of its own."""
    number = scenario.num_samples
    if request.task == "instruct":
        return [_chat(draw, place, request.marks) for place in range(number)]
    if request.task == "text":
        return [_text(draw, place) for place in range(number)]
    if request.task == "preference":
        return [_pair(draw, place) for place in range(number)]
    if request.oversample and number % 2:
        raise UsageError(f"num_samples={number} with oversample: use an even number")
    num_safe = number // 2 if request.oversample else number
    num_unsafe = max(1, round(SHARE_UNSAFE * num_safe))
    num_safe -= 0 if request.oversample else num_unsafe
    labels = [LABELS[0]] * num_safe + [LABELS[1]] * num_unsafe
    order = draw.permutation(len(labels))
    return [{**_text(draw, place), "label": labels[order[place]]} for place in range(len(labels))]


def _words(draw: np.random.Generator) -> str:
    return " ".join(str(word) for word in draw.choice(_WORDS, size=int(draw.integers(1, 6))))


def _text(draw: np.random.Generator, place: int) -> dict[str, Any]:
    return {"text": f"{place} {_words(draw)}"}


def _chat(draw: np.random.Generator, place: int, is_spaced: bool) -> dict[str, Any]:
    """Return a row with a chat: of two turns in every third row, else of one."""
    turns = []
    for number in range(2 if place % 3 == 2 else 1):
        turns.append({"role": "user", "content": f"{place} {number} {_words(draw)}"})
        said = _words(draw)
        if is_spaced:
            said = f"{'  ' * number}{said}\n    {_words(draw)}  "
        turns.append({"role": "assistant", "content": said})
    return {"messages": turns}


def _pair(draw: np.random.Generator, place: int) -> dict[str, Any]:
    """Return a row with a pair: of texts in every third row, else of chats.

    The sides differ, also in their lengths.
    """
    prompt, chosen = f"{place} {_words(draw)}", _words(draw)
    rejected = f"{_words(draw)} {chosen}"
    if place % 3 == 2:
        return {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def _tokenizer(rows: tuple[dict[str, Any], ...], *, is_marked: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [_WORDS[0] + "\n0123456789 user assistant", *map(json.dumps, rows)]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY, special_tokens=list(SPECIAL), show_progress=False
        ),
    )
    first = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, SPECIAL.index(BEGIN))]
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), first])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PADDING,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=_MARKED_TEMPLATE if is_marked else _TEMPLATE,
    )


def _model(request: Request, num_tokens: int, scenario: Scenario) -> Any:
    """Return a language model with random weights."""
    import transformers

    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tokens["initializer_range"] = 0.1  # so that attention is not nearly uniform
    if request.family == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=num_tokens,
            n_positions=_TOKENS_MAX,
            n_embd=32,
            n_layer=request.blocks,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **tokens,
        )
    else:
        kind = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[
            request.family
        ]
        config = kind(
            vocab_size=num_tokens,
            # Rows in NF4 are whole blocks of 64.
            hidden_size=64 if request.method == "qlora" else 32,
            intermediate_size=64 if request.method == "qlora" else 48,
            num_hidden_layers=request.blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=_TOKENS_MAX,
            tie_word_embeddings=request.family == "qwen3",
            **tokens,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(scenario.rng("checkpoint").integers(2**31)))
        return transformers.AutoModelForCausalLM.from_config(config)
