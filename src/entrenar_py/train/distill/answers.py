"""Asks a teacher for missing answers, and writes the rows that `entrenar finetune` learns from."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.distill import endpoint, prompts
from entrenar_py.train.distill.endpoint import Endpoint
from entrenar_py.train.distill.prompts import (
    REFUSED,
    TRUNCATED,
    WHOLE,
    Answer,
    Failed,
    Journal,
    Prompt,
    Prompts,
    Result,
    journal_of,
)
from entrenar_py.train.distill.teacher import Generation
from entrenar_py.train.model import preparation, rows
from entrenar_py.train.model.settings import Completions, Distillation, Settings

_VERSION = 1  # the version of the list of facts that an answer depends on
LEAST_TEMPERATURE = 1e-3  # the least one above 0; below it, logits overflow
_ENDS = (".jsonl", ".ndjson")


class Source(Protocol):
    """An endpoint or a checkpoint that answers prompts."""

    @property
    def identity(self) -> list[str]:
        """Texts that identify the source: a source with different texts may answer differently."""
        ...

    @property
    def day(self) -> str | None:
        """The day that chat templates receive; None if the source has no template with a clock."""
        ...

    def answers(
        self, prompts: Sequence[Prompt], stopping: threading.Event
    ) -> Generator[tuple[Prompt, Result], None, None]:
        """Yield prompts with their answers until `stopping` is set."""
        ...


@dataclass
class Progress:
    """The progress of the requests: `before` prompts already had an answer when they began."""

    total: int
    before: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[Prompt, Failed]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """The number of prompts that have an answer."""
        return self.outcomes.total()

    @property
    def per_s(self) -> float:
        """The number of answers and failures per second since the requests began."""
        made = self.done - self.before + len(self.failed)
        return made / max(time.monotonic() - self.began_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """The estimated seconds until every prompt is done; None before the first result."""
        left = self.total - self.done - len(self.failed)
        return left / self.per_s if self.per_s else None


@dataclass(frozen=True, kw_only=True)
class Written:
    """Counts of the written rows.

    `lacking` is by how many rows the originals fall short of the configured mix.
    """

    synthetic: int
    original: int
    lacking: int
    duplicates: int


class Asking:
    """The command `entrenar distill text`."""

    def __init__(
        self, settings: Settings, section: Distillation, *, url: str | None, backend: str | None
    ) -> None:
        """Read all rows; send nothing. `url` replaces the endpoint and the teacher of `section`.

        Raises UsageError for settings or rows that can't be used.
        """
        if section.text is None:
            raise UsageError(
                "distill.text is missing: the section names the prompts, and the rows to write"
            )
        self._settings, self.text = settings, section.text
        _require_output(settings, self.text)
        self.source = _source(settings, section, self.text, url=url, backend=backend)
        self.prompts: Prompts = prompts.read(settings, self.text.prompts)
        self._originals = list[str]()
        if self.text.synthetic_share < 1:
            self._originals = [prompts.dump(one) for one in prompts.originals(settings)]
        self.journal = Journal(
            self.text.rows, self._digest(), self.text.new_tokens, day=self.source.day
        )

    def _digest(self) -> str:
        """Return 32 hex digits over all that an answer depends on, except its prompt and length."""
        text, settings = self.text, self._settings
        facts = [
            _VERSION,
            self.source.identity,
            settings.task,
            text.temperature,
            settings.seed if text.temperature else None,
        ]
        return blake3(prompts.dump(facts).encode()).hexdigest(16)

    def run(self, listen: Callable[[Progress], None], stopping: threading.Event) -> Progress:
        """Request an answer for every prompt that has none, until `stopping` is set.

        Calls `listen` with the progress after each result. Raises UsageError for an error that
        every prompt would meet, and SystemFailure if the journal can't be written.
        """
        distinct = self.prompts.distinct
        known = [self.journal.answer(prompt) for prompt in distinct]
        due = [prompt for prompt, one in zip(distinct, known, strict=True) if one is None]
        progress = Progress(len(distinct), len(distinct) - len(due))
        progress.outcomes.update(one.outcome for one in known if one is not None)
        listen(progress)
        with closing(self.source.answers(due, stopping)) as pairs:
            for prompt, result in pairs:
                outcome = self._checked(prompt, result)
                if isinstance(outcome, Answer):
                    self.journal.add(prompt, outcome)
                    progress.outcomes[outcome.outcome] += 1
                else:
                    progress.failed.append((prompt, outcome))
                listen(progress)
        return progress

    def _checked(self, prompt: Prompt, result: Result) -> Result:
        if not isinstance(result, Answer) or result.outcome != WHOLE:
            return result
        if prompts.is_learnable(prompt, result, self._settings.data):
            return result
        return Failed("the answer has calls of functions that can't be read")

    def write(self) -> Written:
        """Write all rows at once: answers in the order of the prompts, then original rows.

        Writes nothing if no answer is whole. Raises SystemFailure if the file can't be written.
        """
        lines, num_whole = dict[str, None](), 0
        for prompt in self.prompts.distinct:
            answer = self.journal.answer(prompt)
            if answer is not None and answer.outcome == WHOLE:
                num_whole += 1
                row = prompts.row_of(prompt, answer, self._settings.data)
                lines.setdefault(prompts.dump(row))
        num_synthetic, share = len(lines), self.text.synthetic_share
        wanted = round(num_synthetic * (1 - share) / share)
        others = [line for line in self._originals if line not in lines]
        draw = preparation.seeds(self._settings.seed).rng("distill.text")
        chosen = sorted(draw.permutation(len(others))[:wanted].tolist())
        if num_synthetic:
            _write(self.text.rows, [*lines, *(others[index] for index in chosen)])
        return Written(
            synthetic=num_synthetic,
            original=len(chosen),
            lacking=wanted - len(chosen),
            duplicates=num_whole - num_synthetic,
        )


def counts(progress: Progress) -> tuple[int, int, int]:
    """Return the numbers of whole, truncated and refused answers."""
    whole, truncated, refused = (progress.outcomes[one] for one in (WHOLE, TRUNCATED, REFUSED))
    return whole, truncated, refused


def _source(
    settings: Settings,
    section: Distillation,
    text: Completions,
    *,
    url: str | None,
    backend: str | None,
) -> Source:
    """Return the source of the answers. Raises UsageError unless exactly one is named."""
    place = url or text.endpoint
    if place is None and section.teacher is None:
        raise UsageError(
            "distill.text has neither an endpoint nor a teacher: give distill.text.endpoint (or "
            "--endpoint), the base URL of a server, or distill.teacher, a checkpoint's folder"
        )
    if place is None:
        return Generation(settings, section, text, backend or "cpu")
    if url is None and section.teacher is not None:
        raise UsageError(
            f"distill.text.endpoint={text.endpoint} with "
            f"distill.teacher={section.teacher}: only one of the two may answer; leave "
            "one out"
        )
    if backend is not None:
        raise UsageError(
            f"--backend={backend} with the endpoint {place}: nothing is computed here; "
            "leave one of them out"
        )
    return Endpoint(text, endpoint.address(place), seed=settings.seed)


def _require_output(settings: Settings, text: Completions) -> None:
    """Raise UsageError for a temperature that is too low, or a file that can't be used for rows.

    The name must end as `finetune` requires, and no configured input may include the file. A file
    that exists must have this command's journal next to it.
    """
    if not text.rows.name.lower().endswith(_ENDS):
        raise UsageError(
            f"distill.text.rows={text.rows}: JSON lines are written; use a name that ends with "
            f"{' or '.join(_ENDS)}"
        )
    if 0 < text.temperature < LEAST_TEMPERATURE:
        raise UsageError(
            f"distill.text.temperature={text.temperature:g}: use 0, which takes the most likely "
            f"token, or at least {LEAST_TEMPERATURE:g}"
        )
    read = {
        "data.train": settings.data.train,
        "data.validation": settings.data.validation,
        "distill.text.prompts": text.prompts,
    }
    for key, path in read.items():
        if path is not None and _fits(text.rows, path):
            raise UsageError(
                f"distill.text.rows={text.rows}: {key}={path} would read this file, too; give it "
                "another name or folder"
            )
    if text.rows.exists() and not journal_of(text.rows).exists():
        raise UsageError(
            f"distill.text.rows={text.rows}: it exists, and has no journal next to it "
            f"({journal_of(text.rows).name}), so this command did not write it; give another name, "
            "or remove it"
        )


def _fits(file: Path, pattern: Path) -> bool:
    """Return whether `pattern`, a path or a pattern, matches `file` now or once it exists."""
    own = Path(os.path.realpath(file))
    if file.exists() and any(sign in pattern.name for sign in "*?["):
        return own in {Path(os.path.realpath(path)) for path in rows.files(pattern)}
    if own == Path(os.path.realpath(pattern)):
        return True
    places = (own, Path(os.path.abspath(file)))  # noqa: PTH100  (links stay as they are)
    return any(place.match(os.path.abspath(pattern)) for place in places)  # noqa: PTH100


def _write(path: Path, lines: Sequence[str]) -> None:
    """Write a file completely or not at all."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        try:
            with own.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            own.replace(path)
        except OSError:
            own.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SystemFailure(
            f"distill.text.rows={path}: can't be written ({error.strerror or error}); make room or "
            "give access, and start it again: no answer is lost"
        ) from error
