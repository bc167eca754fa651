"""Rules C-HP-001 to 010: hyper-parameters that rarely do what was meant.

Each rule checks the settings, and facts about model and rows. It reports what is unusual, and what
to use instead. `docs/hyper-parameters.md` has the reason and the source of each limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.wording import counted
from entrenar_py.train.model import model_folder, rendering
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import CHATS, Settings

# The highest learning rates of adapters, by the model's number of parameters. For full fine-tuning
# they are a tenth. QLoRA's paper uses 2e-4 for models up to 13 billion parameters, and 1e-4 for
# larger models.
_RATES = ((10**8, 1e-2), (10**9, 5e-3), (20 * 10**9, 1e-3), (math.inf, 5e-4))
_RATE_MIN = 1e-6
_FULL = 0.1  # the learning rate of full fine-tuning, relative to the adapters' rate
# The highest rate for pairs, relative to the adapters' rate. TRL and the alignment handbook use
# 5e-6 for models of 0.5 and 7 billion parameters.
_OF_PAIRS = 0.02
_BATCH_MAX = 128
_STEPS_MIN = 10
_ALPHA_SHARES = (0.25, 8.0)  # bounds of alpha / rank: QLoRA's value, and LoRA's for GPT-2
_LONGEST = 0.99
_SLACK = 2.0  # the highest ratio of the longest row to the 99th percentile
_ROUNDED = 8
_SKIPPED_MAX = 0.01
_WARMUP_MAX = 0.2
_CLIPS = (0.05, 10.0)
_DECAY_MAX = {"adapters": 0.1, "full": 0.3}
_RARE = 0.1
_SEEN_MAX = 40

Level = Literal["warning", "error"]


@dataclass(frozen=True)
class Remark:
    """A broken rule, at the key that breaks it. With the level `error`, training is impossible.

    The functions of rules leave `rule` empty: the table RULES has the names.
    """

    key: str
    message: str
    level: Level = "warning"
    rule: str = ""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Facts about the rows to train on. Only `num_samples` counts the copies of rarer rows.

    `lengths` has the number of tokens of each row, including the `num_skipped` rows that are too
    long. `class_counts` has the number of rows of each class. `unlearned_ends` is None if some row
    has an end token as a target; otherwise it has the end tokens. `have_date` says whether the chat
    template writes the day.
    """

    lengths: tuple[int, ...]
    num_skipped: int
    class_counts: tuple[int, ...]
    num_samples: int
    unlearned_ends: tuple[str, ...] | None = None
    have_date: bool = True


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that rules check. If a fact is None, the rules that need it report nothing."""

    settings: Settings
    num_parameters: int | None = None
    rows: Rows | None = None

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run; None if the rows are not known."""
        if self.rows is None:
            return None
        return self.settings.training.num_steps(self.rows.num_samples)


def rows_of(prepared: Prepared) -> Rows:
    """Return the facts about rows that were read."""
    train, counts = prepared.train, prepared.class_counts
    too_long = [bad.num_tokens for bad in train.skipped if bad.num_tokens]
    lengths = train.lengths.tolist()[: sum(counts) or None]  # copies come last
    if prepared.validation is not None and prepared.settings.data.validation is None:
        lengths += prepared.validation.lengths.tolist()  # from the same file
    return Rows(
        lengths=(*lengths, *too_long),
        num_skipped=len(too_long),
        class_counts=counts,
        num_samples=len(train),
        unlearned_ends=_unlearned_ends(prepared),
        have_date=prepared.settings.task in CHATS and rendering.has_clock(prepared.tokenizer),
    )


def _unlearned_ends(prepared: Prepared) -> tuple[str, ...] | None:
    """Return the tokens that end an answer if none of them is a target in any row, else None."""
    samples, tokenizer = prepared.train, prepared.tokenizer
    if prepared.settings.task == "classify":
        return None
    ends = {tokenizer.eos_token_id, *_generation_ends(prepared.settings.model)} - {None}
    if np.isin(samples.tokens[samples.is_target], sorted(ends)).any():
        return None
    return tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(ends))))


def _generation_ends(folder: Path) -> list[int]:
    try:
        named = model_folder.record(folder / "generation_config.json", str(folder))["eos_token_id"]
    except (UsageError, LookupError):
        return []  # generation reads it again, and reports the problem
    return [one for one in (named if isinstance(named, list) else [named]) if type(one) is int]


def remarks(facts: Facts) -> list[Remark]:
    """Return the remarks of all rules, in the order of the rules."""
    return [replace(found, rule=name) for name, rule in RULES.items() for found in rule(facts)]


def _rate(facts: Facts) -> Iterator[Remark]:
    """C-HP-001: the learning rate suits the size of the model."""
    rate = facts.settings.training.learning_rate
    if facts.num_parameters is None:
        return
    number = facts.num_parameters
    share = 1.0 if facts.settings.adapts else _FULL
    most = share * next(rate for size, rate in _RATES if number < size)
    kind = "adapters" if facts.settings.adapts else "all weights"
    if facts.settings.task == "preference":
        most, kind = _OF_PAIRS * most, f"task: preference, and {kind}"
    subject = f"learning_rate={rate:g} for {kind} of a model of {_amount(number)} parameters"
    if rate > most:
        yield Remark(
            "training.learning_rate",
            f"{subject}: it may diverge; use {most:g} or less",
        )
    elif rate < share * _RATE_MIN:
        least = share * _RATE_MIN
        yield Remark(
            "training.learning_rate",
            f"{subject}: it hardly learns; use {least:g} or more",
        )


def _batch(facts: Facts) -> Iterator[Remark]:
    """C-HP-002: the batch of all workers together is not too large, and leaves enough steps."""
    size = facts.settings.training.batch_size
    if facts.settings.adapts and size > _BATCH_MAX:
        yield Remark(
            "training.batch_size",
            f"batch_size={size}: adapters lose more than full fine-tuning in large "
            f"batches; use {_BATCH_MAX} rows or fewer",
        )
    steps, most = facts.num_steps, facts.settings.training.max_steps
    if steps is not None and steps < _STEPS_MIN and steps != most and facts.rows is not None:
        yield Remark(
            "training.batch_size",
            f"batch_size={size}: {counted(facts.rows.num_samples, 'row')} in "
            f"{counted(facts.settings.training.epochs, 'epoch')} make {counted(steps, 'step')}; "
            "use fewer rows a step, or more epochs",
        )


def _alpha(facts: Facts) -> Iterator[Remark]:
    """C-HP-003: alpha is twice the rank, or near it."""
    lora = facts.settings.lora
    share = lora.alpha / lora.rank
    least, most = _ALPHA_SHARES
    if facts.settings.adapts and not lora.rslora and not least <= share <= most:
        yield Remark(
            "lora.alpha",
            f"alpha={lora.alpha:g} with rank={lora.rank}: an adapter's output is "
            f"multiplied by {share:.3g}; use alpha: {2 * lora.rank} (twice the rank), or "
            f"{least * lora.rank:g} to {most * lora.rank:g}",
        )


def _length(facts: Facts) -> Iterator[Remark]:
    """C-HP-004: the longest row that is used is near the 99th percentile."""
    if facts.rows is None or not facts.rows.lengths:
        return
    most, rows = facts.settings.data.max_tokens, facts.rows
    usual = math.ceil(np.quantile(rows.lengths, _LONGEST, method="higher") / _ROUNDED) * _ROUNDED
    share = rows.num_skipped / len(rows.lengths)
    longest = max((one for one in rows.lengths if one <= most), default=0)
    usually = (
        f"the 99th percentile of the rows' lengths is {usual} tokens (a multiple of {_ROUNDED})"
    )
    if share > _SKIPPED_MAX:
        yield Remark(
            "data.max_tokens",
            f"max_tokens={most} leaves out {share:.1%} of the rows: {usually}; use {usual}",
        )
    elif longest > _SLACK * usual:
        yield Remark(
            "data.max_tokens",
            f"max_tokens={most} allows the row of {longest} tokens, for which memory "
            f"must suffice: {usually}; use {usual} with on_error: skip",
        )


def _warmup(facts: Facts) -> Iterator[Remark]:
    """C-HP-005: some warm-up if all weights are trained, and never for a large part of the run."""
    share = facts.settings.training.warmup_share
    if share > _WARMUP_MAX:
        yield Remark(
            "training.warmup_share",
            f"warmup_share={share:g}: the rate rises for {share:.0%} of the steps; use "
            f"0.03 to {_WARMUP_MAX:g}",
        )
    elif not share and not facts.settings.adapts:
        yield Remark(
            "training.warmup_share",
            "warmup_share=0 with all weights trained: AdamW's first steps use moments "
            "of few gradients; use 0.03 to 0.1",
        )


def _clip(facts: Facts) -> Iterator[Remark]:
    """C-HP-006: the gradient's norm is clipped, but not in every step."""
    clip = facts.settings.training.clip_norm
    least, most = _CLIPS
    if clip is None:
        yield Remark(
            "training.clip_norm",
            "clip_norm=null: one bad batch can undo the training; use 0.3 to 1",
        )
    elif not least <= clip <= most:
        what = "clips no step but a broken one" if clip > most else "clips nearly every step"
        yield Remark(
            "training.clip_norm",
            f"clip_norm={clip:g} {what}; use {least:g} to {most:g}",
        )


def _decay(facts: Facts) -> Iterator[Remark]:
    """C-HP-007: weight decay is small, and never changes a weight's sign."""
    training = facts.settings.training
    decay = training.weight_decay
    most = _DECAY_MAX["adapters" if facts.settings.adapts else "full"]
    if decay * training.learning_rate >= 1:
        yield Remark(
            "training.weight_decay",
            f"weight_decay={decay:g} with learning_rate={training.learning_rate:g}: a "
            f"step would decay every weight to zero; use {most:g} or less",
            level="error",
        )
    elif decay > most:
        yield Remark(
            "training.weight_decay",
            f"weight_decay={decay:g} pulls trained weights back to zero; use {most:g} or less",
        )


def _imbalance(facts: Facts) -> Iterator[Remark]:
    """C-HP-008: a rare class is learned, and its few rows are not memorised."""
    rows, settings = facts.rows, facts.settings
    if rows is None or not rows.class_counts:
        return
    counts, labels = rows.class_counts, settings.classes.labels
    if not all(counts):
        yield Remark(
            "classes.labels",
            f"labels has {labels[counts.index(0)]!r}, but no row to train on has this "
            "class, so it will never be predicted; leave it out, or add rows",
        )
        return
    rarest = int(np.argmin(counts))
    share, name = counts[rarest] / sum(counts), labels[rarest]
    copies = max(counts) / counts[rarest] if settings.classes.oversample else 1.0
    training = settings.training
    epochs = training.num_steps(rows.num_samples) / -(-rows.num_samples // training.batch_size)
    seen = epochs * copies
    if settings.classes.weights == "none" and not settings.classes.oversample and share < _RARE:
        yield Remark(
            "classes.weights",
            f"weights=none: {share:.1%} of the rows are {name!r}, and a model that "
            f"never predicts it is right in {1 - share:.1%}; use sqrt_inverse, or "
            "oversample: true",
        )
    if share < _RARE and seen > _SEEN_MAX:
        fewer = max(1, int(_SEEN_MAX / copies))
        yield Remark(
            "training.epochs",
            f"epochs={settings.training.epochs}: each of {counts[rarest]} rows of {name!r} is "
            f"seen {seen:.0f} times, and memorised; use epochs: {fewer}"
            + (", or weights instead of oversample" if copies > _SEEN_MAX else ""),
        )


def _ending(facts: Facts) -> Iterator[Remark]:
    """C-HP-009: at least one row teaches the model to end an answer."""
    if facts.rows is None or facts.rows.unlearned_ends is None:
        return
    ends = " or ".join(facts.rows.unlearned_ends)
    lack = f"no row teaches to end an answer by {ends}" if ends else "no token ends an answer"
    yield Remark(
        "task",
        f"{lack}, so the model may never stop; use a chat template that ends the "
        "assistant's turns by the tokenizer's eos_token, or by one of generation_config.json",
    )


def _unused(facts: Facts) -> Iterator[Remark]:
    """C-HP-010: the end of the run and the day of its conversations are read."""
    training, steps = facts.settings.training, facts.num_steps
    if facts.rows is None or steps is None:
        return
    if training.max_steps is not None and training.max_steps > steps:
        each = -(-facts.rows.num_samples // training.batch_size)
        yield Remark(
            "training.max_steps",
            f"max_steps={training.max_steps} with epochs={training.epochs}: the run ends after "
            f"{counted(steps, 'step')}, the end of its epochs; use epochs: "
            f"{-(-training.max_steps // each)} to reach max_steps, or leave it out",
        )
    if facts.settings.data.date is not None and not facts.rows.have_date:
        yield Remark(
            "data.date",
            f"date={facts.settings.data.date}: no chat template asks for it here; leave it out",
        )


RULES: dict[str, Callable[[Facts], Iterator[Remark]]] = {
    "C-HP-001": _rate,
    "C-HP-002": _batch,
    "C-HP-003": _alpha,
    "C-HP-004": _length,
    "C-HP-005": _warmup,
    "C-HP-006": _clip,
    "C-HP-007": _decay,
    "C-HP-008": _imbalance,
    "C-HP-009": _ending,
    "C-HP-010": _unused,
}


def _amount(number: int) -> str:
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:,}"
