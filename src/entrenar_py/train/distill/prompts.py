"""The prompts that a teacher is to answer, and the rows that its answers become."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.shared.errors import RowsError, UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.wording import counted
from entrenar_py.train.model import conversations, encoding, rows, samples
from entrenar_py.train.model.conversations import BadConversationError, Conversation
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.settings import Data, Settings


@dataclass(frozen=True)
class Prompt:
    """A prompt and the place of its row: a conversation for `instruct`, a text for `text`."""

    place: str
    asked: Conversation | str

    @cached_property
    def digest(self) -> str:
        """32 hex digits over what is asked."""
        asked = self.asked
        told = asked if isinstance(asked, str) else [asked.messages, asked.tools]
        return blake3(dump(told, sort_keys=True).encode()).hexdigest(16)


@dataclass(frozen=True)
class Answer:
    """A teacher's answer. Its `outcome` is WHOLE, TRUNCATED or REFUSED; only the first is learned.

    `calls` are the functions that it calls, in OpenAI's form.
    """

    outcome: str
    content: str = ""
    calls: Sequence[Any] = ()


WHOLE, TRUNCATED, REFUSED = OUTCOMES = ("whole", "truncated", "refused")


@dataclass(frozen=True)
class Failed:
    """Why a prompt has no answer."""

    reason: str


Result = Answer | Failed


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts in the order of their rows.

    `repeated` is the number of rows that ask what an earlier one does; `skipped` can't be used.
    """

    distinct: Sequence[Prompt]
    repeated: int
    skipped: Sequence[BadRow]


def read(settings: Settings, path: Path) -> Prompts:
    """Return the prompts of the rows at `path`.

    Raises RowsError for rows that can't be used, unless `data.on_error` is `skip`, and UsageError
    if no row can be used.
    """
    found, skipped, num_rows = dict[str, Prompt](), list[BadRow](), 0
    for row in rows.read(path):
        prompt = row if isinstance(row, BadRow) else _prompt(row, settings)
        if isinstance(prompt, BadRow):
            skipped.append(prompt)
        else:
            num_rows += 1
            found.setdefault(prompt.digest, prompt)
    require(settings.data, f"distill.text.prompts={path}", skipped, num_rows)
    if not found:
        told = f"the first is {skipped[0]}" if skipped else "give one that has rows"
        raise UsageError(f"distill.text.prompts={path}: has no row that can be used; {told}")
    return Prompts(list(found.values()), num_rows - len(found), skipped)


def require(data: Data, where: str, skipped: Sequence[BadRow], num_good: int) -> None:
    """Raise RowsError if there are rows that can't be used, unless they are to be skipped."""
    if skipped and data.on_error == "stop":
        told = f"{len(skipped)} of {counted(len(skipped) + num_good, 'row')} can't be used"
        lines = [f"{where}: {told}; mend them, or set data.on_error: skip"]
        raise RowsError("\n".join([*lines, *samples.listed(skipped)]))


def _prompt(row: Row, settings: Settings) -> Prompt | BadRow:
    """Return the prompt of a row, unless nothing could be learned with it."""
    prompt = _of_row(row, settings)
    if isinstance(prompt, BadRow):
        return prompt
    asked = prompt.asked
    texts = asked if isinstance(asked, str) else [asked.messages, asked.tools]
    problem = encoding.too_long(texts, settings.data.max_tokens)
    return BadRow(row.place, problem) if problem else prompt


def _of_row(row: Row, settings: Settings) -> Prompt | BadRow:
    name = settings.data.text_field
    if settings.task == "instruct":
        try:
            return Prompt(row.place, conversations.prompt(row.fields, settings.data.messages_field))
        except BadConversationError as problem:
            return BadRow(row.place, escaping.shortened(escaping.exact(problem)))
    text = row.fields.get(name)
    if not isinstance(text, str) or not text.strip():
        told = (
            f"{name}={text!r}: use a text that is not empty"
            if name in row.fields
            else (
                f"has no field {name!r}; it has {', '.join(row.fields) or 'none'}; data.text_field "
                "names another"
            )
        )
        return BadRow(row.place, escaping.shortened(escaping.exact(told)))
    return Prompt(row.place, text)


def row_of(prompt: Prompt, answer: Answer, data: Data) -> dict[str, Any]:
    """Return the row that `entrenar finetune` learns a whole answer from."""
    asked = prompt.asked
    if isinstance(asked, str):
        return {data.text_field: asked + answer.content}
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        turn["tool_calls"] = list(answer.calls)
    # Earlier answers were not this teacher's, and are not learned.
    before = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in asked.messages]
    row: dict[str, Any] = {data.messages_field: [*before, turn]}
    return row if asked.tools is None else {**row, "tools": list(asked.tools)}


def is_learnable(prompt: Prompt, answer: Answer, data: Data) -> bool:
    """Return whether `entrenar finetune` can read the answer's row: calls may be damaged."""
    if isinstance(prompt.asked, str):
        return True
    try:
        conversations.read(row_of(prompt, answer, data), data.messages_field)
    except BadConversationError:
        return False
    return True


def dump(value: Any, *, sort_keys: bool = False) -> str:
    """Return a value as JSON on one line; what JSON has no form for, as a date, becomes text."""
    return json.dumps(value, sort_keys=sort_keys, default=str)


def originals(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of `data.train`; raises as `read` does."""
    skipped, num_rows = list[BadRow](), 0
    for row in rows.read(settings.data.train):
        if isinstance(row, BadRow):
            skipped.append(row)
        else:
            num_rows += 1
            yield row.fields
    require(settings.data, f"data.train={settings.data.train}", skipped, num_rows)
