"""Reads pairs of a chosen and a rejected answer, and finds where their completions begin.

A row has `prompt`, `chosen` and `rejected`, as in TRL: all texts, or all lists of messages. Without
a prompt, or with a text next to lists of messages, the prompt is what both sides begin with. Two
texts after an instruction or a question, as `task: instruct` reads it, are answers in a chat. Both
sides are tokenised as a whole, together with the prompt. A side's completion begins at the first
token in which it differs from the prompt; of the two places, the earlier one counts for both sides.
So both sides have the same prompt, token by token, even if a token contains both the end of the
prompt and more text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from entrenar_py.train.model import conversations
from entrenar_py.train.model.conversations import BadConversationError, Message

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
# Fields with a part of the prompt in other formats of rows.
_PARTS = (
    *("instruction", "question", "query", "input", "context", "system", "system_prompt"),
    *("history", "messages", "conversations"),
)
_REPEATED_MIN = 20  # characters: an answer may begin with a shorter prompt, such as "Hello"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A pair of texts that follow a prompt, which may be empty.

    `is_given` is false if the prompt was found as what both begin with.
    """

    prompt: str
    chosen: str
    rejected: str
    is_given: bool = True

    @property
    def contents(self) -> list[Any]:
        """Everything that becomes a token."""
        return [self.prompt, self.chosen, self.rejected]


@dataclass(frozen=True, kw_only=True)
class Chats:
    """Two lists of messages that follow a prompt's messages, in the form of chat templates."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    rejected: Sequence[Message]
    tools: Sequence[Any] | None

    @property
    def contents(self) -> list[Any]:
        """Everything that becomes a token."""
        return [*self.prompt, *self.chosen, *self.rejected, *(self.tools or ())]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of both sides; each begins with the same `num_prompt` tokens of the prompt.

    `is_aligned` is false if the given prompt has other tokens alone than with the answers.
    """

    num_prompt: int
    chosen: Sequence[int]
    rejected: Sequence[int]
    is_aligned: bool


def read(fields: Mapping[str, Any]) -> Texts | Chats:
    """Return the pair of a row. Raises BadConversationError for a row without one."""
    conversations.require_text_only(fields)
    has = [name for name, value in fields.items() if value is not None]
    for name in (CHOSEN, REJECTED):
        if name not in has:
            raise BadConversationError(
                f"has no field {name!r}; it has {', '.join(has) or 'none'}; use {PROMPT}, {CHOSEN} "
                f"and {REJECTED}: texts, or lists of messages"
            )
    chosen, rejected, prompt = fields[CHOSEN], fields[REJECTED], fields.get(PROMPT)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_texts(fields, prompt, chosen, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_chats(fields, prompt, chosen, rejected)
    raise BadConversationError(
        f"{CHOSEN} is a {type(chosen).__name__} and {REJECTED} a {type(rejected).__name__}; use "
        "two texts, or two lists of messages"
    )


def _of_texts(
    fields: Mapping[str, Any], prompt: object, chosen: str, rejected: str
) -> Texts | Chats:
    pair = _plain(prompt, chosen, rejected)
    left_out = _left_out(fields, pair.prompt)
    if conversations.tools(fields) is not None:
        left_out.append("tools")
    if not left_out:
        if pair.is_given:
            _require_once(pair.prompt, chosen, rejected)
        return pair
    before = conversations.before(fields, CHOSEN) if prompt is None else []
    if before:
        sides = {
            name: [{"role": "assistant", "content": text}]
            for name, text in ((CHOSEN, chosen), (REJECTED, rejected))
        }
        chats = _of_chats({**fields, **sides}, before, sides[CHOSEN], sides[REJECTED])
        said = "\n".join(message["content"] for message in chats.prompt)
        left_out = _left_out(fields, said)
        if not left_out:
            _require_once(before[-1]["content"], chosen, rejected)
            return chats
    names = " and ".join(left_out)
    raise BadConversationError(
        f"has {names}, which would be no part of the prompt; use {PROMPT}, {CHOSEN} and {REJECTED} "
        f"as lists of messages that contain it, without a field {names}"
    )


def _plain(prompt: object, chosen: str, rejected: str) -> Texts:
    is_given = prompt is not None
    if prompt is None:
        place = _differ_at(chosen, rejected)
        place -= chosen[place - 1 : place] == " "  # a space belongs to the word after it
        prompt, chosen, rejected = chosen[:place], chosen[place:], rejected[place:]
    if not isinstance(prompt, str):
        raise BadConversationError(
            f"{PROMPT} is a {type(prompt).__name__}; use a text, as they are"
        )
    for name, text in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not text.strip():
            raise BadConversationError(f"{name}={text!r}: use a text that is not empty")
    return Texts(prompt=prompt, chosen=chosen, rejected=rejected, is_given=is_given)


def _left_out(fields: Mapping[str, Any], prompt: str) -> list[str]:
    """Return the names of fields with a part of a prompt that `prompt` lacks."""
    return [name for name in _PARTS if not _is_in(fields.get(name), _words(prompt))]


def _is_in(value: Any, prompt: str) -> bool:
    """Return whether `prompt` contains all texts in `value`, which may be messages."""
    if isinstance(value, Mapping):
        if value.get("role", value.get("from")) in ("assistant", "gpt"):
            return True  # it may be the chosen answer
        value = value.get("content", value.get("value"))
    if isinstance(value, list):
        return all(_is_in(one, prompt) for one in value)
    return not isinstance(value, str) or _words(value) in prompt


def _words(text: str) -> str:
    return " ".join(text.split())


def _require_once(prompt: str, chosen: str, rejected: str) -> None:
    """Raise BadConversationError if both sides repeat the prompt, which would be there twice."""
    start = prompt.strip()
    both = all(side.lstrip().startswith(start) for side in (chosen, rejected))
    if len(start) >= _REPEATED_MIN and both:
        raise BadConversationError(
            f"{CHOSEN} and {REJECTED} begin with the prompt, which would be there twice; leave it "
            f"out of both, or leave out {PROMPT}"
        )


def _of_chats(
    fields: Mapping[str, Any], prompt: object, chosen: list[Any], rejected: list[Any]
) -> Chats:
    conversations.require_usual_template(fields)
    sides = {name: _messages(name, fields[name]) for name in (CHOSEN, REJECTED)}
    if isinstance(prompt, list):
        before = _messages(PROMPT, prompt)
    else:
        # Some rows repeat the question as a text next to the messages that begin with it.
        place = _differ_at(sides[CHOSEN], sides[REJECTED])
        before = sides[CHOSEN][:place]
        sides = {name: messages[place:] for name, messages in sides.items()}
    if not before:
        raise BadConversationError(
            f"{CHOSEN} and {REJECTED} begin with different messages, so no prompt; give {PROMPT}, "
            "a list of messages"
        )
    for name, messages in sides.items():
        last = messages[-1] if messages else None
        if last is None or last["role"] != "assistant":
            raise BadConversationError(f"{name} does not end with a message of the assistant")
        if not ((last["content"] or "").strip() or last.get("tool_calls")):
            raise BadConversationError(f"{name}: its last message is empty")
    return Chats(
        prompt=[*conversations.system(fields, before), *before],
        chosen=sides[CHOSEN],
        rejected=sides[REJECTED],
        tools=conversations.tools(fields),
    )


def _messages(name: str, values: list[Any]) -> list[Message]:
    messages = [conversations.message(name, number, one) for number, one in enumerate(values, 1)]
    if name != PROMPT and not all(is_learned for _, is_learned in messages):
        raise BadConversationError(
            f"{name} has a message with a weight of 0, but an answer is trained on as a whole; "
            "leave the weight out"
        )
    return [message for message, _ in messages]


def _differ_at(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix, minus one if it is a whole sequence."""
    both = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (a, b) in both if a != b), max(shorter - 1, 0))


def of_texts(pair: Texts, tokenise: Callable[[str], list[int]], end: int | None) -> Encoded:
    """Return the tokens of a pair of texts. A side that doesn't end with the token `end` gets it.

    `tokenise` adds nothing at the end.
    """
    chosen, rejected = (
        tokens if end is None or tokens[-1:] == [end] else [*tokens, end]
        for tokens in (tokenise(pair.prompt + side) for side in (pair.chosen, pair.rejected))
    )
    both = encoded(tokenise(pair.prompt) if pair.prompt else [], chosen, rejected)
    return both if pair.is_given else replace(both, is_aligned=True)


def encoded(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> Encoded:
    """Return the tokens of both sides, and how many first tokens both share with the prompt."""
    shared = min(_num_shared(prompt, chosen), _num_shared(prompt, rejected))
    is_aligned = shared == len(prompt)
    return Encoded(num_prompt=shared, chosen=chosen, rejected=rejected, is_aligned=is_aligned)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    both = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in both if a != b), min(len(one), len(other)))


def require_different(pair: Encoded) -> None:
    """Raise BadConversationError if both sides are equal, or one has no token to predict."""
    if list(pair.chosen) == list(pair.rejected):
        raise BadConversationError(
            f"{CHOSEN} and {REJECTED} are equal, so neither is preferred; leave such rows out"
        )
    for name, tokens in ((CHOSEN, pair.chosen), (REJECTED, pair.rejected)):
        if len(tokens) <= max(pair.num_prompt, 1):
            raise BadConversationError(f"{name} has no token after the prompt")
