"""Answers become texts: only the tokens that end them are left out."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.train.model import decoding
from tests import extras

extras.require("tokenizers", "transformers")
SPECIAL = ["<pad>", "<bos>", "<end>", "<channel>", "<message>"]
WORDS = ["analysis", "hm", "ans", "\u2581ans", "\u2581hm", "<call>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One with Metaspace, as of Llama 2: a text's first space is dropped."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *WORDS]
    rules = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "<pad>"))
    rules.decoder = decoders.Metaspace()
    rules.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    rules.add_tokens([AddedToken("<call>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=rules, eos_token="<end>", pad_token="<pad>", bos_token="<bos>"
    )


def ids(tokenizer: Any, names: str) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(names.split()))


@pytest.mark.parametrize(
    ("names", "text", "special"),
    [
        ("hm \u2581ans <end>", "hm ans", []),
        ("hm \u2581ans", "hm ans", []),
        ("hm <end> <pad> <pad>", "hm", []),
        ("<call> hm <end>", "<call>hm", []),
        ("<end>", "", []),
        (
            "<channel> analysis <message> hm <channel> ans <end>",
            "<channel>analysis<message>hm<channel>ans",
            ["<channel>", "<message>"],
        ),
    ],
)
def test_an_answer_lacks_only_its_end(
    names: str, text: str, special: list[str], tokenizer: Any
) -> None:
    tokens = decoding.whole(ids(tokenizer, names), tokenizer, [tokenizer.eos_token_id])
    assert decoding.text(tokens, tokenizer) == text
    assert decoding.special(tokens, tokenizer) == special


@pytest.mark.parametrize(
    ("names", "text"),
    [("\u2581ans", " ans"), ("ans", "ans"), ("\u2581ans <message>", " ans<message>")],
)
def test_what_continues_a_text_keeps_its_first_space(names: str, text: str, tokenizer: Any) -> None:
    before = ids(tokenizer, "<bos> \u2581hm")
    assert decoding.text(ids(tokenizer, names), tokenizer, after=before) == text
