"""Renders conversations by a tokenizer's chat template, and finds which tokens are learned.

A template's own marks say which, if it has any (`{% generation %}`). Else an assistant's turn
begins where the generation prompt ends. A template may write earlier turns in another way once
later ones follow, as those that leave out earlier thoughts do: the whole conversation is rendered
once then, and the turns are found in that text.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.tuning.conversations import BadConversationError, Conversation, Message

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = "</think>"  # where a thought ends
# Two texts in place of a turn. Neither begins or ends like the other, so what the conversation has
# in common with both lies around the turn.
_OTHERS = ("\u00a7 other", "\u00b6 another \u00a4")


def encode(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether each is to be predicted.

    Raises BadConversationError if the template refuses it, or where a turn begins can't be found.
    """
    try:
        return _encode(tokenizer, conversation)
    except BadConversationError:
        if not any("tool_calls" in message for message in conversation.messages):
            raise
        as_texts = replace(conversation, messages=_with_texts(conversation.messages))
        with contextlib.suppress(BadConversationError):
            return _encode(tokenizer, as_texts)
        raise


def _encode(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[bool]]:
    rendering = Rendering(tokenizer, conversation)
    rendering.require_kept()
    roles = [message["role"] for message in conversation.messages]
    learns_all = len(conversation.learned) == roles.count("assistant")
    if learns_all and _MARKS.search(tokenizer.get_chat_template(None, conversation.tools)):
        found = rendering.marked()
    else:
        found = rendering.by_prefixes() or rendering.by_text()
    if not any(found[1]):
        raise BadConversationError("the chat template leaves out all that the assistant says")
    return found


def _with_texts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as JSON, as some templates need them."""
    changed = copy.deepcopy(list(messages))
    for call in (call for message in changed for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed


def _name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a function that may be called; "" if it has none."""
    function = tool["function"]
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _bare(text: str) -> str:
    return "".join(text.split())


def _shared(one: str, other: str) -> int:
    """Return the number of characters at which both texts begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class Rendering:
    """A conversation, rendered in several ways."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        self.tokenizer, self._conversation = tokenizer, conversation
        self._messages = list(conversation.messages)

    def require_kept(self) -> None:
        """Require that the template writes all it is given, but for earlier turns' thoughts."""
        conversation, text = self._conversation, _bare(self.text(self._messages))
        for name in map(_name_of, conversation.tools or ()):
            if _bare(name) not in text:
                raise BadConversationError(
                    f"the chat template leaves out the tool {name!r}; take tools out of the row, "
                    "or use the checkpoint of a model that calls functions"
                )
        for number, message in enumerate(conversation.messages, 1):
            if message["role"] in ("system", "user") or number == len(self._messages):
                thought = message.get("reasoning_content") if number == len(self._messages) else ""
                said = f"{message['content'] or ''}{_THOUGHT}{thought or ''}"
                parts = said.replace("<think>", _THOUGHT).split(_THOUGHT)
                if not all(_bare(part) in text for part in parts):
                    raise BadConversationError(
                        f"the chat template leaves out a part of message {number} "
                        f"({message['role']}); take it out of the row, or use another template"
                    )
            for call in message.get("tool_calls", ()):
                if _bare(call["function"]["name"]) not in text:
                    raise BadConversationError(
                        f"the chat template leaves out the call in message {number}; use the "
                        "checkpoint of a model that calls functions"
                    )

    def marked(self) -> tuple[list[int], list[bool]]:
        """Learn what the template marks."""
        found = self._apply(
            self._messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [mark == 1 for mark in found["assistant_masks"]]

    def by_prefixes(self) -> tuple[list[int], list[bool]] | None:
        """Learn each turn beyond what is rendered before it; None if that is not its beginning."""
        tokens, is_target = list[int](), list[bool]()
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            if not index:  # no template writes a prompt of no messages
                return None
            before = self.tokens(self._messages[:index], add_generation_prompt=True)
            after = self.tokens(self._messages[: index + 1])
            if before[: len(tokens)] != tokens or after[: len(before)] != before:
                return None
            is_learned = index in self._conversation.learned
            is_target += [False] * (len(before) - len(tokens))
            is_target += [is_learned] * (len(after) - len(before))
            tokens = after
        return tokens, is_target

    def by_text(self) -> tuple[list[int], list[bool]]:
        """Learn each turn from where the whole text differs without it, up to its end token."""
        text = self.text(self._messages)
        parts = [self._part(text, index) for index in self._conversation.learned]
        found = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=bool(getattr(self.tokenizer, "is_fast", False)),
        )
        if "offset_mapping" not in found:
            raise BadConversationError(
                "the chat template writes earlier turns in another way once a later one follows, "
                "and this tokenizer does not say where its tokens are; use one turn a row"
            )
        is_target = [
            any(begin < last and first < last <= end for begin, end in parts)
            for first, last in found["offset_mapping"]
        ]
        return list(found["input_ids"]), is_target

    def _part(self, text: str, index: int) -> tuple[int, int]:
        """Return where the turn of message `index` begins and ends in the whole `text`."""
        begin, rest = self._around(self._messages, index, text)
        if index:
            prompt = self.text(self._messages[:index], add_generation_prompt=True)
            begin = len(prompt) if text.startswith(prompt) else begin
        end = len(text) - rest
        return begin, end + self._closing(text[end:], self._messages[: index + 1])

    def _closing(self, rest: str, so_far: Sequence[Message]) -> int:
        """Return how many characters at the beginning of `rest` close the last turn of `so_far`.

        That is what closes it where it is the last of all. A template may close earlier turns by
        another token, or refuse a conversation that ends there: one special token closes it then.
        """
        try:
            rendered = self.text(so_far)
            _, length = self._around(so_far, len(so_far) - 1, rendered)
        except BadConversationError:
            return self._special(rest)
        closing = rendered[len(rendered) - length :]
        shared = _shared(rest, closing)
        return self._special(rest) if shared < self._special(closing) else shared

    def _special(self, text: str) -> int:
        """Return the length of the special token that `text` begins with, 0 without one."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = [token.content for token in added if token.special]
        return max((len(name) for name in names if text.startswith(name)), default=0)

    def _around(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Return how many characters of `text` come before and after the message `index`."""
        before, after = len(text), len(text)
        for other in _OTHERS:
            replaced = [*messages[:index], {"role": "assistant", "content": other}]
            changed = self.text([*replaced, *messages[index + 1 :]])
            before = min(before, _shared(text, changed))
            after = min(after, _shared(text[::-1], changed[::-1]))
        return before, after

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """Return messages as the template writes them."""
        return str(self._apply(messages, tokenize=False, **options))

    def tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of messages as the template writes them."""
        return list(self._apply(messages, tokenize=True, return_dict=False, **options))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=self._conversation.tools, **options
            )
        except Exception as error:  # templates raise what they like
            raise BadConversationError(f"the chat template refuses it: {error}") from error
