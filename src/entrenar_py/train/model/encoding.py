"""Turns rows into tokens and what is to be learned of them, by task.

`text` predicts every token but the first. `instruct` predicts the tokens of the assistant's turns
alone. `classify` predicts the class of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, json_text
from entrenar_py.train.model import conversations
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError
from entrenar_py.train.model.rendering import EndlessTemplateError
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.settings import Settings

# A text with more characters a token than this has too many tokens, and is not tokenised to learn
# how many: that takes 400 bytes of memory for each of its own. No language comes near it. Short
# texts are left to the tokenizer, whatever they are made of.
CHARS_PER_TOKEN_MAX = 64
SHORT_CHARS = 2**16
NO_LABEL = -1
_ENDLESS_MAX = 10  # rows whose template does not end; each takes a second or more
_LONG = "has "  # how the problem of a row begins that has too many tokens


@dataclass(frozen=True)
class Sample:
    """A row's tokens. `is_target` holds for each whether it is predicted from those before it.

    `label` is the number of its class, NO_LABEL if there are no classes.
    """

    tokens: Sequence[int]
    is_target: Sequence[bool]
    label: int = NO_LABEL


def length_of(bad: BadRow) -> int | None:
    """Return the number of tokens of a row that is too long; None for another problem."""
    number = bad.problem.removeprefix(_LONG).partition(" tokens; ")[0]
    return int(number) if bad.problem.startswith(_LONG) and number.isdigit() else None


def too_long(value: Any, max_tokens: int) -> str:
    """Return why the texts in `value` must have more than `max_tokens` tokens; "" if they need not.

    `value` is a text, or lists and mappings of texts that are not nested deeply.
    """
    num_chars = json_text.num_chars(value)
    if num_chars <= max(SHORT_CHARS, CHARS_PER_TOKEN_MAX * max_tokens):
        return ""
    return (
        f"has {num_chars} characters, too many for data.max_tokens={max_tokens} "
        f"({CHARS_PER_TOKEN_MAX} a token)"
    )


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer adds.

    A text that was rendered from a chat begins with the first token (BOS) already, and gets no
    other one.
    """
    tokens = list(tokenizer(text)["input_ids"])
    first = tokenizer.bos_token_id
    is_twice = first is not None and tokens[:2] == [first, first]
    return tokens[1:] if is_twice and text.startswith(tokenizer.bos_token) else tokens


class _BadValueError(ValueError):
    """A row's value that can't be used, and what to use."""


class Encoder:
    """Encodes rows by a run's settings and the tokenizer of its checkpoint."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        """Raises UsageError if the tokenizer has no chat template, which `instruct` needs."""
        self._settings, self._tokenizer = settings, tokenizer
        self._encode: Callable[[Mapping[str, Any]], Sample] = {
            "classify": self._classified,
            "instruct": self._instructed,
            "text": self._plain,
        }[settings.task]
        if settings.task == "instruct" and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"model={settings.model}: its tokenizer has no chat template, which task: instruct "
                "needs; use the checkpoint of a chat model, or task: text"
            )
        self._num_endless = 0

    @cached_property
    def _chats(self) -> ChatEncoder:
        """Made for the first chat: it may copy the tokenizer, which no other task needs."""
        return ChatEncoder(self._tokenizer, self._settings.data.date)

    def encode(self, row: Row) -> Sample | BadRow:
        """Return the sample of a row, or why it can't be used.

        Raises UsageError when the chat template has taken too many steps for too many rows.
        """
        try:
            sample = self._encode(row.fields)
        except EndlessTemplateError as problem:
            self._num_endless += 1
            if self._num_endless == _ENDLESS_MAX:
                raise UsageError(
                    f"model={self._settings.model}: {problem}; so for {_ENDLESS_MAX} rows, the "
                    f"last at {row.place}"
                ) from problem
            return BadRow(row.place, str(problem))
        except RecursionError:
            return BadRow(row.place, "is nested too deeply")
        except (_BadValueError, BadConversationError) as problem:
            return BadRow(row.place, escaping.shortened(escaping.exact(problem)))
        most = self._settings.data.max_tokens
        if len(sample.tokens) > most:
            return BadRow(
                row.place, f"{_LONG}{len(sample.tokens)} tokens; data.max_tokens allows {most}"
            )
        return sample

    def _plain(self, fields: Mapping[str, Any]) -> Sample:
        tokens = self._tokens(self._text(fields))
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1] != end:
            tokens = [*tokens, end]
        if len(tokens) < 2:
            raise _BadValueError("has one token, and nothing to predict")
        return Sample(tokens, [False, *[True] * (len(tokens) - 1)])

    def _classified(self, fields: Mapping[str, Any]) -> Sample:
        name, labels = self._settings.data.label_field, self._settings.classes.labels
        tokens = self._tokens(self._text(fields))
        label = _name_of(self._field(fields, name))
        if label not in labels:
            told = f"classes.labels has {', '.join(labels)}{_hint(label, len(labels))}"
            raise _BadValueError(f"{name}={fields[name]!r}: {told}")
        return Sample(tokens, [False] * len(tokens), labels.index(label))

    def _instructed(self, fields: Mapping[str, Any]) -> Sample:
        conversation = conversations.read(fields, self._settings.data.messages_field)
        self._require_short([conversation.messages, conversation.tools])
        tokens, is_target = self._chats.encode(conversation)
        is_target = [False, *is_target[1:]]  # nothing stands before the first to predict it from
        if not any(is_target):
            raise _BadValueError("has one token, and nothing to predict")
        return Sample(tokens, is_target)

    def _text(self, fields: Mapping[str, Any]) -> str:
        name = self._settings.data.text_field
        text = self._field(fields, name)
        if not isinstance(text, str) or not text.strip():
            raise _BadValueError(f"{name}={text!r}: use a text that is not empty")
        return text

    def _field(self, fields: Mapping[str, Any], name: str) -> Any:
        if name not in fields:
            raise _BadValueError(
                f"has no field {name!r}; it has {', '.join(fields) or 'none'}; data.text_field and "
                "data.label_field name others"
            )
        return fields[name]

    def _require_short(self, value: Any) -> None:
        if problem := too_long(value, self._settings.data.max_tokens):
            raise _BadValueError(problem)

    def _tokens(self, text: str) -> list[int]:
        self._require_short(text)
        tokens = tokens_of(self._tokenizer, text)
        if not tokens:
            raise _BadValueError("has no token")
        return tokens


def _name_of(label: object) -> str:
    """Return a label as configurations write it: 1 for 1.0, which a column with gaps has."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label) if isinstance(label, str | int | float) else ""


def _hint(label: str, num_labels: int) -> str:
    """Return what to say about a label that is none of `num_labels` others."""
    if label in ("false", "true"):
        return "; a truth value is a name, not a place: say labels: [false, true]"
    places = [str(place) for place in range(num_labels)]
    if label in places:
        return f"; a number is a name, not a place: say labels: [{', '.join(places)}]"
    return ""
