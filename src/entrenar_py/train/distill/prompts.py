"""The prompts for a teacher, the rows that its answers become, and the journal of the answers.

The journal is a file of JSON lines next to the rows. A line is appended when an answer arrives, so
a process that is killed loses no answer that it has received.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping, files, json_text
from entrenar_py.train.model import conversations, pairs, rows, samples
from entrenar_py.train.model.conversations import BadConversationError, Conversation
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.settings import CHATS, Data, Settings


@dataclass(frozen=True)
class Prompt:
    """A prompt and the place of its row: a conversation for `instruct`, a text for `text`.

    For `preference` it is either, as the row has it.
    """

    place: str
    asked: Conversation | str

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the prompt."""
        asked = self.asked
        told = asked if isinstance(asked, str) else [asked.messages, asked.tools]
        return blake3(dump(told, sort_keys=True).encode()).hexdigest(16)


@dataclass(frozen=True)
class Answer:
    """A teacher's answer. Its `outcome` is WHOLE, TRUNCATED or REFUSED; only WHOLE is learned.

    `calls` are its function calls, in OpenAI's form.
    """

    outcome: str
    content: str = ""
    calls: Sequence[Any] = ()


WHOLE, TRUNCATED, REFUSED = OUTCOMES = ("whole", "truncated", "refused")


@dataclass(frozen=True)
class Failed:
    """The reason why a prompt has no answer."""

    reason: str


Result = Answer | Failed


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts in the order of their rows.

    `repeated` is the number of rows with the prompt of an earlier row. `skipped` are the rows that
    can't be used.
    """

    distinct: Sequence[Prompt]
    repeated: int
    skipped: Sequence[BadRow]


def read(settings: Settings, path: Path) -> Prompts:
    """Return the prompts of the rows at `path`.

    Raises RowsError for rows that can't be used, unless `data.on_error` is `skip`, and UsageError
    if no row can be used.
    """
    distinct, skipped, num_rows = dict[str, Prompt](), list[BadRow](), 0
    for row in rows.read(path):
        prompt = row if isinstance(row, BadRow) else _prompt(row, settings)
        if isinstance(prompt, BadRow):
            skipped.append(prompt)
        else:
            num_rows += 1
            distinct.setdefault(prompt.digest, prompt)
    samples.require_usable(settings.data, f"distill.text.prompts={path}", skipped, num_rows)
    if not distinct:
        told = f"the first is {skipped[0]}" if skipped else "give one that has rows"
        raise UsageError(f"distill.text.prompts={path}: has no row that can be used; {told}")
    return Prompts(list(distinct.values()), num_rows - len(distinct), skipped)


def _prompt(row: Row, settings: Settings) -> Prompt | BadRow:
    """Return the prompt of a row, or why nothing could be learned from an answer to it."""
    prompt = of_row(row, settings)
    if isinstance(prompt, BadRow):
        return prompt
    asked = prompt.asked
    texts = asked if isinstance(asked, str) else [asked.messages, asked.tools]
    problem = samples.too_long(texts, settings.data.max_tokens)
    return BadRow(row.place, problem) if problem else prompt


def of_row(row: Row, settings: Settings) -> Prompt | BadRow:
    """Return the prompt of a row, or why it has none."""
    name = settings.data.text_field
    if settings.task in CHATS:
        try:
            if settings.task == "preference":
                return Prompt(row.place, _of_preference(row.fields, settings.data))
            return Prompt(row.place, conversations.prompt(row.fields, settings.data.messages_field))
        except BadConversationError as problem:
            return BadRow(row.place, escaping.shortened(escaping.exact(problem)))
    text = row.fields.get(name)
    if not isinstance(text, str) or not text.strip():
        lack = (
            f"{name}={text!r}: use a text that is not empty"
            if name in row.fields
            else (
                f"has no field {name!r}; it has {', '.join(row.fields) or 'none'}; data.text_field "
                "names another"
            )
        )
        return BadRow(row.place, escaping.shortened(escaping.exact(lack)))
    return Prompt(row.place, text)


def _of_preference(fields: Mapping[str, Any], data: Data) -> Conversation | str:
    """Return the prompt of a pair, or of a row without answers.

    Raises BadConversationError if it has none.
    """
    if all(fields.get(name) is not None for name in (pairs.CHOSEN, pairs.REJECTED)):
        pair = pairs.read(fields)
        if isinstance(pair, pairs.Chats):
            return Conversation(messages=pair.prompt, tools=pair.tools, learned=())
        text: Any = pair.prompt
    else:
        names = (data.messages_field, pairs.PROMPT, data.text_field)
        text = next((fields[name] for name in names if fields.get(name) is not None), None)
        if not isinstance(text, str):
            return conversations.prompt(fields, data.messages_field)
    if not text.strip():
        raise BadConversationError(f"its prompt is {text!r}; use a text that is not empty")
    return str(text)


def row_of(prompt: Prompt, answer: Answer, data: Data) -> dict[str, Any]:
    """Return the row from which `entrenar finetune` learns a whole answer."""
    question = prompt.asked
    if isinstance(question, str):
        return {data.text_field: question + answer.content}
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        turn["tool_calls"] = list(answer.calls)
    # Earlier answers are not from this teacher, so they are not learned.
    before = [
        {**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in question.messages
    ]
    row: dict[str, Any] = {data.messages_field: [*before, turn]}
    return row if question.tools is None else {**row, "tools": list(question.tools)}


def is_learnable(prompt: Prompt, answer: Answer, data: Data) -> bool:
    """Return whether `entrenar finetune` can read the answer's row.

    It can't if a tool call in the answer is malformed, for example.
    """
    if isinstance(prompt.asked, str):
        return True
    try:
        conversations.read(row_of(prompt, answer, data), data.messages_field)
    except BadConversationError:
        return False
    return True


def dump(value: Any, *, sort_keys: bool = False) -> str:
    """Return a value as JSON on one line; values without a JSON form, as dates, become text."""
    return json.dumps(value, sort_keys=sort_keys, default=str)


def originals(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of `data.train`.

    Raises RowsError for rows that can't be used, unless `data.on_error` is `skip`.
    """
    skipped, num_rows = list[BadRow](), 0
    for row in rows.read(settings.data.train):
        if isinstance(row, BadRow):
            skipped.append(row)
        else:
            num_rows += 1
            yield row.fields
    samples.require_usable(settings.data, f"data.train={settings.data.train}", skipped, num_rows)


JOURNAL_END = ".journal"  # is appended to the name of the rows


class Journal:
    """The answers in the journal of the rows at `rows`, to which only this process may append.

    If templates receive a `day`, it is written with each answer. `others` counts the lines with
    other settings, `damaged` the lines that can't be read. The prompts of both count as unanswered.
    """

    def __init__(
        self, rows: Path, settings: str, new_tokens: int, *, day: str | None = None
    ) -> None:
        """Open or create the journal, for answers of at most `new_tokens` tokens.

        `settings` is the digest of all else that an answer depends on. Raises UsageError if the
        journal can't be written, or if another process has it open.
        """
        self.path, self._settings = journal_of(rows), settings
        self._new_tokens, self._day = new_tokens, day
        self.others = self.damaged = 0
        self._answers = dict[str, Answer]()
        try:
            rows.parent.mkdir(parents=True, exist_ok=True)
            if rows.is_dir():
                raise IsADirectoryError(0, "is a folder")
            self._file = files.open_to_write(self.path, flags=os.O_APPEND)
        except OSError as error:
            raise UsageError(
                f"distill.text.rows={rows}: can't be written ({error.strerror or error}); give a "
                "file in a folder that you may write to"
            ) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{self.path}: another process is writing answers to it; wait for its end, or give "
                "distill.text.rows another name"
            ) from error
        except OSError as error:
            raise UsageError(
                f"{self.path}: its file system supports no locks ({error.strerror}); put "
                "distill.text.rows on another file system"
            ) from error

    def _read(self) -> None:
        """Read all complete lines, and cut off a partial one, which a killed writer left."""
        end = 0
        try:
            with files.open_file(self.path) as file:
                for line in files.lines(file):
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    self._add(line)
            os.ftruncate(self._file, end)
        except OSError as error:
            raise UsageError(
                f"{self.path}: can't be read ({error.strerror or error}); give access to it, or "
                "give distill.text.rows another name"
            ) from error

    def _add(self, line: bytes) -> None:
        try:
            record = json_text.load(line)
        except ValueError:
            record = None
        match record:
            case {
                "settings": str(settings),
                "new_tokens": int(most),
                "prompt": str(prompt),
                "outcome": str(outcome),
                "content": str(content),
                "calls": list(calls),
            } if outcome in OUTCOMES:
                if settings != self._settings:
                    self.others += 1
                elif self._holds(outcome, most):
                    self._answers.setdefault(prompt, Answer(outcome, content, calls))
            case _:
                self.damaged += 1

    def _holds(self, outcome: str, most: int) -> bool:
        """Return whether an outcome under the limit of `most` tokens holds under this run's limit.

        A whole answer stays the same with a higher limit, and a truncated one with a lower limit.
        """
        return most >= self._new_tokens if outcome == TRUNCATED else most <= self._new_tokens

    def answer(self, prompt: Prompt) -> Answer | None:
        """Return the answer to `prompt`, None if there is none."""
        return self._answers.get(prompt.digest)

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Append an answer. Raises SystemFailure if it can't be written."""
        record: Mapping[str, Any] = {
            "settings": self._settings,
            "new_tokens": self._new_tokens,
            "prompt": prompt.digest,
            "outcome": answer.outcome,
            "content": answer.content,
            "calls": list(answer.calls),
            **({} if self._day is None else {"day": self._day}),
        }
        left = memoryview(f"{dump(record)}\n".encode())
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise SystemFailure(
                f"{self.path}: can't be written ({error.strerror or error}); make room, and "
                "start it again: it sends only the prompts without an answer"
            ) from error
        self._answers[prompt.digest] = answer

    def close(self) -> None:
        """Flush the journal to the disk and release it. Raises SystemFailure if that fails."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise SystemFailure(
                f"{self.path}: can't be written ({error.strerror or error}); make room, and "
                "start it again: it sends only the prompts without an answer"
            ) from error
        finally:
            os.close(self._file)


def journal_of(rows: Path) -> Path:
    """Return the path of the journal of the rows at `rows`."""
    return rows.with_name(f"{rows.name}{JOURNAL_END}")


def day_of(journal: Path) -> str | None:
    """Return the first day noted in a journal; None if there is none.

    Answers of an endpoint, which may come first, have none.
    """
    try:
        with files.open_file(journal) as file:
            for line in files.lines(file):
                with contextlib.suppress(ValueError):  # a damaged line
                    record = json_text.load(line)
                    if isinstance(record, dict) and isinstance(record.get("day"), str):
                        return str(record["day"])
    except OSError:
        pass  # opening the journal to write reports what is wrong with it
    return None
