"""The text of an answer that a model generated.

Only the tokens that end an answer are left out. A tokenizer's `skip_special_tokens` would remove
others, too, and leave what was between them: of `<|channel|>analysis<|message|>`, "analysis".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entrenar_py.train.model import model


def whole(tokens: Sequence[int], tokenizer: Any, ends: Sequence[int]) -> list[int]:
    """Return the `tokens` of an answer without the end and the padding after it."""
    left_out = {*ends, model.padding(tokenizer)}
    last = next((i for i, token in reversed([*enumerate(tokens, 1)]) if token not in left_out), 0)
    return list(tokens[:last])


def special(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the special tokens among `tokens`, each once."""
    marked = {number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    found = [one for one in dict.fromkeys(tokens) if one in marked | {*tokenizer.all_special_ids}]
    return list(map(str, tokenizer.convert_ids_to_tokens(found)))


def text(tokens: Sequence[int], tokenizer: Any, *, after: Sequence[int] = ()) -> str:
    """Return the text of the tokens of an answer, special tokens included.

    If the answer continues a text, `after` has that text's tokens.
    """
    hides = {"skip_special_tokens": not special(tokens, tokenizer)}
    answer = str(tokenizer.decode(tokens, **hides))
    if not after:
        return answer
    # Some tokenizers drop a space at the beginning of a text.
    both = str(tokenizer.decode([*after, *tokens], **hides))
    before = str(tokenizer.decode(after, **hides))
    return both.removeprefix(before) if both.startswith(before) else answer
