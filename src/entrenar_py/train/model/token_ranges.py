"""Says which characters of a text each of its tokens stands for.

A tokenizer's own offsets leave out white space where its post-processor trims them, so that a token
of white space has an empty range, and what is learned by offsets loses its indentation. Ranges here
are those from before the post-processor, which adds nothing where no special tokens are asked for.
An added token may take the white space around it; that is no part of its range.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

Range: TypeAlias = tuple[int, int]  # of characters: from the first up to, not including, the second


class TokenRanges:
    """Tokenises texts by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._untrimmed: Any = None
        if self._has_offsets and _trims(tokenizer.backend_tokenizer.post_processor):
            self._untrimmed = copy.deepcopy(tokenizer.backend_tokenizer)
            self._untrimmed.post_processor = None
            self._untrimmed.no_truncation()
            self._untrimmed.no_padding()
        added = tokenizer.added_tokens_decoder
        self._own = {number: token.content for number, token in added.items()}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of `text` alone, to which none is added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def targets(self, text: str, parts: Sequence[Range]) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of `text`, and whether the last character of each is in one of `parts`.

        None if the tokenizer says too little of where its tokens are.
        """
        if not self._has_offsets:
            return self._by_beginnings(text, parts)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = list(found["input_ids"]), found["offset_mapping"]
        if self._untrimmed is not None:
            untrimmed = self._untrimmed.encode(text, add_special_tokens=False)
            if untrimmed.ids != tokens:
                return self._by_beginnings(text, parts)
            offsets = untrimmed.offsets
        pairs = zip(tokens, offsets, strict=True)
        ends = [self._end(text, number, *offset) for number, offset in pairs]
        return tokens, [any(begin < end <= last for begin, last in parts) for end in ends]

    def _end(self, text: str, number: int, first: int, last: int) -> int:
        """Return where a token ends, without the white space that an added token takes with it."""
        own = self._own.get(number)
        place = text.find(own, first, last) if own else -1
        return last if own is None or place < 0 else place + len(own)

    def _by_beginnings(
        self, text: str, parts: Sequence[Range]
    ) -> tuple[list[int], list[bool]] | None:
        """Find the tokens of parts by their number before each, for tokenizers without offsets.

        None if the text up to the beginning or the end of a part has other tokens.
        """
        tokens = self.tokens(text)
        is_target = [False] * len(tokens)
        for part in parts:
            before, after = (self.tokens(text[:place]) for place in part)
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                return None
            is_target[len(before) : len(after)] = [True] * (len(after) - len(before))
        return tokens, is_target


def _trims(post_processor: Any) -> bool:
    """Return whether offsets lose white space in `post_processor`, or in one within it."""
    return post_processor is not None and b'"trim_offsets":true' in post_processor.__getstate__()
