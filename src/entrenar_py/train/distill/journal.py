"""The answers that a teacher has given: JSON lines beside the rows, each by what was asked how.

A line is appended when an answer comes, so a process that is killed loses none that it has got.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.distill.prompts import OUTCOMES, TRUNCATED, Answer, Prompt, dump

END = ".journal"  # of its name, after that of the rows


class Journal:
    """The answers in the journal of the rows at `rows`, which this process alone may append to.

    A `day` that templates are told is written with each answer.
    `others` counts the lines of other settings, `damaged` those that are none. The prompts of both
    count as not asked.
    """

    def __init__(
        self, rows: Path, settings: str, new_tokens: int, *, day: str | None = None
    ) -> None:
        """Open it, or begin it, for answers of at most `new_tokens` tokens.

        `settings` is the digest of all else that an answer depends on. Raises UsageError if it
        can't be written, or if another process has it open.
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
                f"{self.path}: its file system gives no locks ({error.strerror}); give "
                "distill.text.rows a place on another one"
            ) from error

    def _read(self) -> None:
        """Read all whole lines, and cut off a part of one, whose writer was killed."""
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
        """Return whether an outcome with at most `most` tokens is that of this limit, too.

        A whole answer stays the same with a higher limit, and a truncated one with a lower one.
        """
        return most >= self._new_tokens if outcome == TRUNCATED else most <= self._new_tokens

    def answer(self, prompt: Prompt) -> Answer | None:
        """Return the answer to `prompt`, if there is one."""
        return self._answers.get(prompt.digest)

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Keep an answer. Raises SystemFailure if it can't be written."""
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
                f"{self.path}: can't be written ({error.strerror or error}); make room, and start "
                "it again: it asks what has no answer yet"
            ) from error
        self._answers[prompt.digest] = answer

    def close(self) -> None:
        """Let the disk have it, and others open it. Raises SystemFailure if the disk can't."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise SystemFailure(
                f"{self.path}: can't be written ({error.strerror or error}); make room, and start "
                "it again: it asks what has no answer yet"
            ) from error
        finally:
            os.close(self._file)


def journal_of(rows: Path) -> Path:
    """Return the path of the journal of the rows at `rows`."""
    return rows.with_name(f"{rows.name}{END}")


def day_of(journal: Path) -> str | None:
    """Return the day that the first answer in a journal was given with, if it says one."""
    try:
        with files.open_file(journal) as file:
            record = json_text.load(next(iter(files.lines(file)), b""))
    except (OSError, ValueError):
        return None  # whoever opens it to write tells what is wrong with it
    day = record.get("day") if isinstance(record, dict) else None
    return day if isinstance(day, str) else None
