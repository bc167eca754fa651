"""Each rule on hyper-parameters alone: what it warns of, and what it lets pass."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.train.model import hyper_parameters, model
from entrenar_py.train.model.hyper_parameters import RULES, Facts, Remark, Rows
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import load
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings, Training

USUAL = Settings(
    model=Path("model"), task="text", output=Path("out"), data=Data(train=Path("rows.jsonl"))
)
MANY = Rows(lengths=(40,) * 990 + (60,) * 10, num_skipped=0, class_counts=(), num_samples=1000)


def judged(rule: str, settings: Settings = USUAL, **facts: Any) -> list[Remark]:
    """Return what one rule says."""
    usual: dict[str, Any] = {"num_parameters": 4 * 10**9, "rows": MANY}
    return [*RULES[rule](Facts(settings=settings, **(usual | facts)))]


def training(**changes: Any) -> Settings:
    return replace(USUAL, training=Training(**changes))


def classified(counts: tuple[int, ...], **changes: Any) -> tuple[Settings, Rows]:
    """Return settings and rows of a classifier; `changes` are of its classes and its training."""
    own = {key: changes.pop(key) for key in ("weights", "oversample") if key in changes}
    settings = replace(
        USUAL,
        task="classify",
        classes=Classes(labels=tuple("abc"[: len(counts)]), **own),
        training=Training(**changes),
    )
    return settings, replace(MANY, class_counts=counts)


def test_usual_settings_raise_nothing() -> None:
    """The defaults, for a model of 4 billion parameters and rows of many lengths."""
    assert (
        hyper_parameters.remarks(Facts(settings=USUAL, num_parameters=4 * 10**9, rows=MANY)) == []
    )


def test_rules_that_lack_their_facts_say_nothing() -> None:
    assert hyper_parameters.remarks(Facts(settings=USUAL)) == []


# Of the papers and of PEFT's examples: rank, alpha, rate, batch, warm-up, clip, size of the model.
PUBLISHED = {
    "QLoRA, 7 billion": (64, 16, 2e-4, 16, 0.0, 0.3, 7e9),
    "QLoRA, 65 billion": (64, 16, 1e-4, 64, 0.0, 0.3, 65e9),
    "LoRA, GPT-2 medium": (4, 32, 2e-4, 8, 0.1, 1.0, 355e6),
    "Alpaca-LoRA": (8, 16, 3e-4, 128, 0.05, 1.0, 7e9),
    "PEFT's quick tour": (8, 32, 1e-3, 32, 0.0, 1.0, 1.2e9),
    "PEFT's image classification": (16, 16, 5e-3, 128, 0.0, 1.0, 86e6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_raise_nothing(name: str) -> None:
    rank, alpha, rate, batch, warmup, clip, size = PUBLISHED[name]
    settings = replace(
        USUAL,
        lora=Lora(rank=rank, alpha=alpha),
        training=Training(
            learning_rate=rate, batch_size=batch, warmup_share=warmup, clip_norm=clip, epochs=3
        ),
    )
    assert (
        hyper_parameters.remarks(Facts(settings=settings, num_parameters=int(size), rows=MANY))
        == []
    )


@pytest.mark.parametrize(
    ("rate", "size", "method", "told"),
    [
        (1e-2, 50 * 10**6, "lora", ""),
        (1e-2, 10**8, "lora", "of 100 million parameters: it may diverge; use 0.005 or less"),
        (1e-3, 4 * 10**9, "qlora", ""),
        (2e-3, 4 * 10**9, "qlora", "of 4 billion parameters: it may diverge; use 0.001 or less"),
        (1e-3, 70 * 10**9, "lora", "it may diverge; use 0.0005 or less"),
        (1e-4, 4 * 10**9, "full", ""),
        (2e-4, 4 * 10**9, "full", "for all weights of a model of 4 billion parameters"),
        (1e-7, 4 * 10**9, "lora", "it hardly learns; use 1e-06 or more"),
        (2e-7, 4 * 10**9, "full", ""),
    ],
)
def test_the_rate_follows_the_size(rate: float, size: int, method: str, told: str) -> None:
    settings = replace(training(learning_rate=rate), method=method)
    found = judged("C-HP-001", settings, num_parameters=size)
    assert bool(found) == bool(told)
    assert all(told in one.message for one in found)


@pytest.mark.parametrize(
    ("rate", "size", "told"),
    [
        (5e-6, 4 * 10**9, ""),  # TRL's
        (2e-5, 4 * 10**9, ""),  # of docs/finetuning.md
        (2e-4, 4 * 10**9, "for task: preference, and adapters of .*; use 2e-05 or less"),
        (2e-4, 6 * 10**8, "use 0.0001 or less"),
        (5e-7, 4 * 10**9, "use 1e-06 or more"),
    ],
)
def test_pairs_need_a_smaller_rate_than_the_default(rate: float, size: int, told: str) -> None:
    settings = replace(training(learning_rate=rate), task="preference")
    found = [one.message for one in judged("C-HP-001", settings, num_parameters=size)]
    assert [bool(re.search(told, message)) for message in found] == [True] * bool(told)


def test_large_batches_of_adapters() -> None:
    [found] = judged("C-HP-002", training(batch_size=256, epochs=10))
    assert "batch_size=256: adapters lose more than full fine-tuning" in found.message
    assert judged("C-HP-002", replace(training(batch_size=256, epochs=10), method="full")) == []


def test_few_steps() -> None:
    [found] = judged("C-HP-002", training(batch_size=128))
    assert "1,000 rows in 1 epoch make 8 steps" in found.message
    assert judged("C-HP-002", training(batch_size=128, epochs=2)) == []
    assert judged("C-HP-002", training(batch_size=128, epochs=2, max_steps=3)) == []
    steps = [Training(batch_size=8, epochs=2, max_steps=most).num_steps(20) for most in (3, 9)]
    assert steps == [3, 6], "the smaller number counts"


@pytest.mark.parametrize(
    ("rank", "alpha", "warned"),
    [(16, 32, False), (64, 16, False), (4, 32, False), (64, 2, True), (4, 64, True)],
)
def test_alpha_is_near_twice_the_rank(rank: int, alpha: float, *, warned: bool) -> None:
    settings = replace(USUAL, lora=Lora(rank=rank, alpha=alpha))
    found = judged("C-HP-003", settings)
    assert bool(found) == warned
    assert all(f"use alpha: {2 * rank} (twice the rank)" in one.message for one in found)
    assert judged("C-HP-003", replace(settings, method="full")) == []
    assert judged("C-HP-003", replace(settings, lora=replace(settings.lora, rslora=True))) == []


def test_rows_left_out_for_their_length() -> None:
    rows = replace(MANY, lengths=(40,) * 95 + (900,) * 5, num_skipped=5)
    [found] = judged("C-HP-004", rows=rows)
    assert "max_tokens=512 leaves out 5.0% of the rows" in found.message
    assert "use 904" in found.message


def test_one_long_row() -> None:
    rows = replace(MANY, lengths=(40,) * 999 + (500,))
    [found] = judged("C-HP-004", rows=rows)
    assert "max_tokens=512 allows the row of 500 tokens" in found.message
    assert "use 40 with on_error: skip" in found.message
    assert judged("C-HP-004", rows=replace(MANY, lengths=(40,) * 999 + (80,))) == []


@pytest.mark.parametrize(
    ("share", "method", "told"),
    [
        (0.0, "lora", ""),
        (0.0, "full", "warmup_share=0 with all weights trained"),
        (0.03, "full", ""),
        (0.2, "lora", ""),
        (0.3, "lora", "the rate rises for 30% of the steps"),
    ],
)
def test_warm_up(share: float, method: str, told: str) -> None:
    found = judged("C-HP-005", replace(training(warmup_share=share), method=method))
    assert bool(found) == bool(told)
    assert all(told in one.message for one in found)


@pytest.mark.parametrize(
    ("clip", "told"),
    [
        (None, "clip_norm=null: one bad batch can undo"),
        (0.01, "clip_norm=0.01 clips nearly every step; use 0.05 to 10"),
        (0.3, ""),
        (10.0, ""),
        (100.0, "clip_norm=100 clips no step but a broken one; use 0.05 to 10"),
    ],
)
def test_clipping(clip: float | None, told: str) -> None:
    found = judged("C-HP-006", training(clip_norm=clip))
    assert bool(found) == bool(told)
    assert all(told in one.message for one in found)


@pytest.mark.parametrize(
    ("decay", "method", "level"),
    [
        (0.1, "lora", ""),
        (0.2, "lora", "warning"),
        (0.2, "full", ""),
        (0.5, "full", "warning"),
        (5000.0, "lora", "error"),  # times the rate of 2e-4 that is 1
        (4999.0, "lora", "warning"),
    ],
)
def test_weight_decay(decay: float, method: str, level: str) -> None:
    found = judged("C-HP-007", replace(training(weight_decay=decay), method=method))
    assert [one.level for one in found] == ([level] if level else [])


def test_a_rare_class_without_weight() -> None:
    settings, rows = classified((935, 65))
    [found] = judged("C-HP-008", settings, rows=rows)
    assert found.key == "classes.weights"
    assert "6.5% of the rows are 'b', and a model that never predicts it is right in 93.5%" in (
        found.message
    )
    for fair in ({"weights": "sqrt_inverse"}, {"oversample": True}):
        settings, rows = classified((935, 65), **fair)
        assert judged("C-HP-008", settings, rows=rows) == []


def test_a_class_without_a_row() -> None:
    settings, rows = classified((935, 0))
    [found] = judged("C-HP-008", settings, rows=rows)
    assert found.key == "classes.labels"
    assert found.message.startswith("labels has 'b', but no row to train on has this class")


def test_a_rare_class_that_is_seen_too_often() -> None:
    settings, rows = classified((935, 65), oversample=True, epochs=3)
    [found] = judged("C-HP-008", settings, rows=rows)
    assert found.key == "training.epochs"
    assert "each of 65 rows of 'b' is seen 43 times, and memorised; use epochs: 2" in (
        found.message
    )
    settings, rows = classified((990, 10), oversample=True)
    [found] = judged("C-HP-008", settings, rows=rows)
    assert "or weights instead of oversample" in found.message
    settings, rows = classified((500, 500), epochs=100)
    assert judged("C-HP-008", settings, rows=rows) == []


@pytest.mark.parametrize(
    ("end", "named", "is_told"),
    [("<|end|>", None, False), ("<|pad|>", None, True), ("<|pad|>", "<|end|>", False)],
)
def test_some_row_teaches_to_end_an_answer(
    small: Path, tmp_path: Path, end: str, named: str | None, is_told: bool
) -> None:
    """By the tokenizer's end token, or by one of those of generation_config.json."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (small / "model" / file).exists():
            shutil.copy(small / "model" / file, tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"instruction": "list", "output": "ls"}), encoding="utf-8"
    )
    settings = replace(
        USUAL, model=tmp_path, task="instruct", data=Data(train=tmp_path / "rows.jsonl")
    )
    tokenizer = model.tokenizer(settings)
    tokenizer.eos_token = end
    if named is not None:
        ends = {"eos_token_id": [0, tokenizer.convert_tokens_to_ids(named)]}
        (tmp_path / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    samples = load(settings, settings.data.train, tokenizer, cache=tmp_path / "cache")
    prepared = Prepared(
        settings=settings, tokenizer=tokenizer, train=samples, validation=None, class_weights=()
    )
    found = judged("C-HP-009", settings, rows=hyper_parameters.rows_of(prepared))
    assert [one.message.partition(",")[0] for one in found] == [
        "no row teaches to end an answer by <|pad|>"
    ] * is_told


@pytest.mark.parametrize(
    ("most", "told"),
    [(62, None), (63, None), (64, "use epochs: 2"), (200, "use epochs: 4 to reach max_steps")],
)
def test_more_steps_than_the_epochs_have(most: int, told: str | None) -> None:
    """TRL's `max_steps` goes on beyond the epochs."""
    remarks = judged("C-HP-010", training(max_steps=most))
    assert [one.key for one in remarks] == ([] if told is None else ["training.max_steps"])
    assert all(told is not None and told in one.message for one in remarks)


def test_a_date_that_no_template_asks_for() -> None:
    dated = replace(USUAL, data=replace(USUAL.data, date="2026-11-28"))
    assert judged("C-HP-010", dated) == []
    (remark,) = judged("C-HP-010", dated, rows=replace(MANY, have_date=False))
    assert remark.key == "data.date"
    assert judged("C-HP-010", rows=replace(MANY, have_date=False)) == []
