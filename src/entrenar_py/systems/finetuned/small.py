"""A small checkpoint in Hugging Face's format and rows to learn, drawn from a scenario's seed.

Its tokenizer adds a first token to texts by itself, and its chat template writes that token too.
Its offsets leave out white space. Its padding token is not its end token, and rows have unequal
lengths. If its chat template marks what the assistant says, answers have two lines, and white space
before, between and after them.
"""

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

from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.finetuned.asked import Asked
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings

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
class Made:
    """A folder with a checkpoint, and the rows in `settings.data.train`, in the file's order."""

    settings: Settings
    rows: tuple[dict[str, Any], ...]


def make(folder: Path, scenario: Scenario, asked: Asked) -> Made:
    """Write checkpoint and rows to `folder`. Raises UsageError without the extra `finetune`."""
    require_libraries()
    draw = scenario.rng("data")
    rows = tuple(_rows(draw, scenario, asked))
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = _tokenizer(rows, is_marked=asked.marks)
    tokenizer.save_pretrained(folder / "model")
    _model(asked, len(tokenizer), scenario).save_pretrained(folder / "model")
    is_classes = asked.task == "classify"
    settings = Settings(
        model=folder / "model",
        task=asked.task,
        method=asked.method,
        recompute=asked.recompute,
        output=folder / "out",
        seed=scenario.seed,
        data=Data(train=file, max_tokens=_TOKENS_MAX, packing=asked.packing),
        classes=Classes(
            labels=LABELS if is_classes else (),
            weights=asked.class_weights if is_classes else "none",
            oversample=asked.oversample and is_classes,
        ),
        lora=Lora(
            rank=asked.rank,
            alpha=asked.alpha,
            dropout=scenario.dropout,
            targets=_TARGETS[asked.family],
        ),
    )
    return Made(settings=settings, rows=rows)


def teacher(folder: Path, made: Made, asked: Asked, scenario: Scenario) -> None:
    """Write a model like that of `made`, with other weights and its tokenizer, to `folder`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.settings.model, local_files_only=True)
    tokenizer.save_pretrained(folder)
    other = scenario.with_(seed=scenario.seed + 1)
    _model(asked, len(tokenizer), other).save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the libraries write on standard error, bars and warnings, from the report's."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def require_libraries() -> None:
    """Raise UsageError, with the name of the extra, if a library is missing."""
    try:
        import peft  # noqa: F401
        import transformers
    except ImportError as error:
        raise UsageError(
            f"fine-tuning needs {error.name}; {shipped.extra_advice('finetune')}"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _rows(draw: np.random.Generator, scenario: Scenario, asked: Asked) -> list[dict[str, Any]]:
    """Return rows that become `scenario.num_samples` samples; each has a text of its own."""
    number = scenario.num_samples
    if asked.task == "instruct":
        return [_chat(draw, place, asked.marks) for place in range(number)]
    if asked.task == "text":
        return [_text(draw, place) for place in range(number)]
    if asked.oversample and number % 2:
        raise UsageError(f"num_samples={number} with oversample: use an even number")
    num_safe = number // 2 if asked.oversample else number
    num_unsafe = max(1, round(SHARE_UNSAFE * num_safe))
    num_safe -= 0 if asked.oversample else num_unsafe
    labels = [LABELS[0]] * num_safe + [LABELS[1]] * num_unsafe
    order = draw.permutation(len(labels))
    return [{**_text(draw, place), "label": labels[order[place]]} for place in range(len(labels))]


def _words(draw: np.random.Generator) -> str:
    return " ".join(str(word) for word in draw.choice(_WORDS, size=int(draw.integers(1, 6))))


def _text(draw: np.random.Generator, place: int) -> dict[str, Any]:
    return {"text": f"{place} {_words(draw)}"}


def _chat(draw: np.random.Generator, place: int, is_spaced: bool) -> dict[str, Any]:
    """Return a row of one turn, or for each third row of two."""
    turns = []
    for number in range(2 if place % 3 == 2 else 1):
        turns.append({"role": "user", "content": f"{place} {number} {_words(draw)}"})
        said = _words(draw)
        if is_spaced:
            said = f"{'  ' * number}{said}\n    {_words(draw)}  "
        turns.append({"role": "assistant", "content": said})
    return {"messages": turns}


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


def _model(asked: Asked, num_tokens: int, scenario: Scenario) -> Any:
    """Return a language model with random weights."""
    import transformers

    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tokens["initializer_range"] = 0.1  # so that attention is not nearly uniform
    if asked.family == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=num_tokens,
            n_positions=_TOKENS_MAX,
            n_embd=32,
            n_layer=asked.blocks,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **tokens,
        )
    else:
        kind = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[asked.family]
        config = kind(
            vocab_size=num_tokens,
            # Rows in NF4 are whole blocks of 64.
            hidden_size=64 if asked.method == "qlora" else 32,
            intermediate_size=64 if asked.method == "qlora" else 48,
            num_hidden_layers=asked.blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=_TOKENS_MAX,
            tie_word_embeddings=asked.family == "qwen3",
            **tokens,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(scenario.rng("checkpoint").integers(2**31)))
        return transformers.AutoModelForCausalLM.from_config(config)
