"""Rows of pairs: the forms that are read, where completions begin, and rows that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import RowsError, UsageError
from entrenar_py.train.finetune import foresight
from entrenar_py.train.model import model, pairs, preparation, samples
from entrenar_py.train.model.conversations import BadConversationError
from entrenar_py.train.model.rows import Row
from entrenar_py.train.model.samples import Samples
from tests.train.model.test_samples import load, settings

ASKED = [{"role": "user", "content": "list"}]
GOOD = [{"role": "assistant", "content": "ls -la"}]
BAD = [{"role": "assistant", "content": "rm -rf /"}]


def sides(small: Path, found: Samples) -> list[tuple[str, str]]:
    """Return of each side its whole text, and what is predicted of it."""
    tokenizer = model.tokenizer(settings(small, small, "text"))
    parts = [found.rows.part(row) for row in range(len(found.rows))]
    return [
        (
            tokenizer.decode(found.tokens[part]),
            tokenizer.decode(found.tokens[part][found.is_target[part]]),
        )
        for part in parts
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
        {"prompt": "list", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD], "score": 9.5},
    ],
    ids=["prompt", "shared beginning", "prompt twice"],
)
def test_a_completion_begins_after_the_generation_prompt(
    small: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    """The end token is predicted, and so is what the template writes after it, as in TRL."""
    found = load(small, tmp_path, "preference", [row])
    before = "<|start|>user\nlist<|end|>\n<|start|>assistant\n"
    assert sides(small, found) == [
        (f"{before}ls -la<|end|>\n", "ls -la<|end|>\n"),
        (f"{before}rm -rf /<|end|>\n", "rm -rf /<|end|>\n"),
    ]
    assert len(found) == 1
    assert found.are_pairs
    assert found.num_targets.tolist() == [int(found.is_target.sum())]


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        (("do: ", "ls -la", "rm -rf /"), "do: ", "ls -la<|end|>", "rm -rf /<|end|>"),
        (("do: ", "ls<|end|>", "rm"), "do: ", "ls<|end|>", "rm<|end|>"),
        ((None, "do: ls -la", "do: rm -rf"), "do:", " ls -la<|end|>", " rm -rf<|end|>"),
        ((None, "do: ls", "do: ls -la"), "do: l", "s<|end|>", "s -la<|end|>"),
    ],
    ids=["plain", "ended", "shared beginning", "one begins the other"],
)
def test_texts_get_the_end_token_once(
    small: Path,
    tmp_path: Path,
    row: tuple[str | None, str, str],
    prompt: str,
    chosen: str,
    rejected: str,
) -> None:
    fields = dict(zip(("prompt", "chosen", "rejected"), row, strict=True))
    found = load(small, tmp_path, "preference", [fields])
    (first, good), (second, bad) = sides(small, found)
    assert (first, second) == (prompt + chosen, prompt + rejected)
    assert good.endswith(chosen)
    assert bad.endswith(rejected)


def test_an_end_token_that_the_tokenizer_adds_as_well_is_there_once(
    small: Path, tmp_path: Path
) -> None:
    """It ends the answers, and not the prompt, which has no other tokens alone."""
    from tokenizers.processors import TemplateProcessing

    chosen = settings(small, tmp_path / "rows.jsonl", "preference")
    row = {"prompt": "do:", "chosen": " ls", "rejected": " rm<|end|>"}
    chosen.data.train.write_text(json.dumps(row), "utf-8")
    tokenizer = model.tokenizer(chosen)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    found = samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path / "cache")
    assert sides(small, found) == [
        ("do: ls<|end|>", " ls<|end|>"),
        ("do: rm<|end|>", " rm<|end|>"),
    ]
    assert not found.num_unaligned


def test_a_token_over_the_end_of_the_prompt_counts_for_both_sides() -> None:
    """The tokens of the prompt are the same ones on both sides, whichever merges with it."""
    tokens = {"a b": [1, 2], "a bc": [1, 3], "a b d": [1, 2, 4]}
    pair = pairs.Texts(prompt="a b", chosen="c", rejected=" d")
    found = pairs.of_texts(pair, tokens.__getitem__, 9)
    assert (found.num_prompt, found.chosen, found.rejected) == (1, [1, 3, 9], [1, 2, 4, 9])
    assert not found.is_aligned
    assert pairs.of_texts(replace(pair, is_given=False), tokens.__getitem__, 9).is_aligned
    assert pairs.encoded([1, 2], [1, 2, 3], [1, 2, 4]).is_aligned


def test_prompts_with_other_tokens_alone_are_counted_and_told_once(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from the cache, and for both parts of one file."""
    good = {"prompt": "do:", "chosen": " ls -la", "rejected": " rm"}
    rows = [good, {"prompt": "sud", "chosen": "o rm", "rejected": "o ls"}]
    rows += [{"chosen": "sudo rm", "rejected": "sudo ls"}]
    for _ in range(2):
        found = load(small, tmp_path, "preference", rows)
        assert (len(found), found.num_unaligned) == (3, 1)
    chosen = settings(small, tmp_path / "rows.jsonl", "preference", validation_share=0.4)
    foresight.say_rows(preparation.prepare(chosen, tmp_path / "cache"))
    assert capsys.readouterr().err.count("in 1 pair, the prompt alone has different tokens") == 1


SIDES = {"chosen": "ls -la", "rejected": "rm -rf /"}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "do this", "input": "list"}, ["do this\n\nlist"]),
        ({"question": "list", "system": "be brief", "id": 7}, ["be brief", "list"]),
        ({"query": "again", "history": [["list", "ls"]]}, ["list", "ls", "again"]),
        ({"question": "list", "messages": [*ASKED, *GOOD], "source": "web"}, ["list"]),
    ],
)
def test_texts_after_a_question_are_answers_in_a_chat(
    row: dict[str, Any], asked: list[str]
) -> None:
    """The question is read as for `instruct`, and the answers' common beginning is no prompt."""
    pair = pairs.read({**row, **SIDES})
    assert isinstance(pair, pairs.Chats)
    assert [message["content"] for message in pair.prompt] == asked
    assert (pair.chosen, pair.rejected) == (GOOD, BAD)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Be brief.\nQ: list", "system": "Be  brief.", "question": "list", "score": 1.5},
        {"prompt": "list", "system": "", "tools": "[]", "history": [], "context": None},
        {"prompt": "list", "messages": [*ASKED, *GOOD], "model": "m"},
        {"prompt": "ls", "source": "web", "id": "x"},
        {"prompt": ""},
    ],
)
def test_texts_stay_texts_beside_other_fields(row: dict[str, Any]) -> None:
    """Such as a part of the prompt that is also a field of its own."""
    pair = pairs.read({**row, **SIDES})
    assert isinstance(pair, pairs.Texts)
    assert (pair.prompt, pair.is_given) == (row["prompt"], True)


def test_a_question_in_what_both_sides_begin_with_is_there_once() -> None:
    pair = pairs.read({"question": "list", "chosen": "Q: list A: ls", "rejected": "Q: list A: rm"})
    assert isinstance(pair, pairs.Texts)
    assert (pair.prompt, pair.chosen) == ("Q: list A:", " ls")


LONG = "List all files that are in this folder."
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "do", "chosen": "ls"}, "has no field 'rejected'; it has prompt, chosen"),
    ({"prompt": "do", "rejected": "rm"}, "has no field 'chosen'"),
    ({"prompt": "do", "chosen": "ls", "rejected": None}, "has no field 'rejected'"),
    ({"prompt": "do", "chosen": "ls", "rejected": "ls"}, "are equal, so neither is preferred"),
    ({"prompt": ASKED, "chosen": GOOD, "rejected": GOOD}, "are equal, so neither is preferred"),
    ({"prompt": "do", "chosen": "ls", "rejected": " "}, "use a text that is not empty"),
    ({"prompt": "do", "chosen": GOOD, "rejected": "rm"}, "chosen is a list and rejected a str"),
    ({"prompt": ASKED, "chosen": "ls", "rejected": "rm"}, "prompt is a list; use a text"),
    ({"prompt": ASKED, "chosen": GOOD, "rejected": ASKED}, "rejected does not end with a message"),
    ({"prompt": ASKED, "chosen": GOOD, "rejected": []}, "rejected does not end with a message"),
    ({"chosen": GOOD, "rejected": BAD}, "begin with different messages, so no prompt"),
    (
        {"prompt": ASKED, "chosen": GOOD, "rejected": [{**BAD[0], "content": ""}]},
        "rejected: its last message is empty",
    ),
    (
        {"prompt": ASKED, "chosen": [{**GOOD[0], "weight": 0}], "rejected": BAD},
        "chosen has a message with a weight of 0",
    ),
    ({"prompt": "do", "chosen": "ls", "rejected": "rm", "images": ["x"]}, "only text is learned"),
    (
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD, "chat_template_kwargs": {"thinks": 0}},
        "has chat_template_kwargs={'thinks': 0}, but templates get no arguments",
    ),
    ({"prompt": "do", "chosen": "ls", "rejected": "rm " * 90}, "tokens; data.max_tokens allows 64"),
    ({"system": "be brief", "input": "list", **SIDES}, "has input and system, which would be no"),
    ({"prompt": "list", "system": "be brief", **SIDES}, "has system, which would be no part"),
    ({"prompt": "list", "history": [["a", "b"]], **SIDES}, "has history, which would be no part"),
    ({"prompt": "list", "tools": [{"name": "ls"}], **SIDES}, "has tools, which would be no part"),
    ({"messages": ASKED, **SIDES}, "has messages, which would be no part of the prompt"),
    (
        {"prompt": LONG, "chosen": f"{LONG} ls", "rejected": f"{LONG} rm"},
        "chosen and rejected begin with the prompt, which would be there twice",
    ),
]


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS, ids=[words for _, words in BAD_ROWS])
def test_a_row_that_is_no_pair_is_told(
    small: Path, tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    """It ends the run with its place, or is counted and listed."""
    good = {"prompt": "do", "chosen": "ls", "rejected": "rm"}
    with pytest.raises(RowsError, match=r"1 of 2 rows can't be used") as raised:
        load(small, tmp_path, "preference", [good, row], max_tokens=64)
    assert problem in str(raised.value)
    assert "rows.jsonl:2: " in str(raised.value)
    found = load(small, tmp_path, "preference", [good, row], max_tokens=64, on_error="skip")
    (skipped,) = found.skipped
    assert (len(found), skipped.problem.count(problem)) == (1, 1)


def test_the_longer_side_must_fit(small: Path, tmp_path: Path) -> None:
    row = {"prompt": "do", "chosen": "ls", "rejected": "rm " * 90}
    found = load(small, tmp_path, "preference", [row], max_tokens=512)
    assert found.longest == found.lengths[0] == found.rows.length(1) < found.length(0)
    (bad,) = load(
        *(small, tmp_path, "preference", [row, {**row, "rejected": "rm"}]),
        max_tokens=found.longest - 1,
        on_error="skip",
    ).skipped
    assert bad.num_tokens == found.longest


def test_messages_need_a_template(small: Path, tmp_path: Path) -> None:
    chosen = settings(small, tmp_path / "rows.jsonl", "preference")
    tokenizer = model.tokenizer(chosen)
    tokenizer.chat_template = None
    encoder = samples.Encoder(chosen, tokenizer)
    row = Row("x", 1, {"prompt": ASKED, "chosen": GOOD, "rejected": BAD})
    assert "no chat template; use texts" in str(encoder.encode(row))
    texts = Row("x", 1, {"prompt": "do", "chosen": "ls", "rejected": "rm"})
    assert isinstance(encoder.encode(texts), samples.Sample)


def test_a_system_text_and_tools_go_before_both_sides(small: Path, tmp_path: Path) -> None:
    row = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD, "system": "be careful"}
    found = load(small, tmp_path, "preference", [row])
    assert all(
        text.startswith("<|start|>system\nbe careful<|end|>\n<|start|>user\nlist")
        for text, _ in sides(small, found)
    )


def rows(number: int) -> list[dict[str, str]]:
    return [
        {"prompt": f"{n} ", "chosen": "ls" * (n + 1), "rejected": "rm -r"} for n in range(number)
    ]


def test_pairs_are_kept_and_chosen_as_a_whole(small: Path, tmp_path: Path) -> None:
    """A file of kept pairs is read again with its cuts, and a choice takes both sides."""
    first, again = (load(small, tmp_path, "preference", rows(5)) for _ in range(2))
    assert first.digest == again.digest
    assert np.array_equal(first.cuts, again.cuts)
    picked = first.chosen([3, 1])
    assert sides(small, picked) == [
        one for n in (3, 1) for one in sides(small, first)[2 * n : 2 * n + 2]
    ]
    assert picked.digest != first.digest


@given(st.lists(st.integers(-2, 40), min_size=0, max_size=4))
def test_cuts_from_a_file_are_checked(cuts: Sequence[int]) -> None:
    """A side without a token, or without one to predict, is not accepted."""
    found = Samples(
        tokens=np.arange(12, dtype=np.int32),
        is_target=np.tile([False, True, True], 4),
        starts=np.array([0, 6, 12], np.int64),
        labels=np.full(2, -1, np.int32),
        cuts=np.array(cuts, np.int32),
    )
    fits = len(cuts) in (0, 2) and all(2 <= cut <= 5 for cut in cuts)
    assert found.is_consistent == fits


def test_a_pair_needs_both_sides() -> None:
    with pytest.raises(BadConversationError, match="has no field 'chosen'; it has none"):
        pairs.read({})


def test_no_row_is_a_usage_error(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no row that can be used"):
        load(small, tmp_path, "preference", [{"prompt": "x"}], on_error="skip")
