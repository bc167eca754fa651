"""Produces the shards of a teacher, each one once, together with other processes."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self, cast

import numpy as np

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files
from entrenar_py.train.distill import manifest, shards, student, teacher
from entrenar_py.train.distill.manifest import Claims, Entry, Facts, Lists, Writer
from entrenar_py.train.distill.shards import Places, ShardWriter
from entrenar_py.train.distill.teacher import Batch, Kept, Teacher
from entrenar_py.train.model import model, model_folder
from entrenar_py.train.model.preparation import Prepared

LOOK_EVERY_S = 1.0  # between checks of what other processes have produced
PIECE_BYTES = 2**25  # bytes of rows that are computed, then written, at a time
WAITING_MAX = 2  # pieces that may wait to be written, each in memory

Part = tuple[int, int]  # the number of a part, counted from 1, and the number of parts


@dataclass(frozen=True, kw_only=True)
class Made:
    """A shard that this process produced: its numbers of rows and tokens, and the seconds taken."""

    shard: int
    rows: int
    tokens: int
    seconds: float


@dataclass
class Progress:
    """The progress of the command.

    `rows_done` and `shards_done` include the work of other processes. `rows_left` counts only this
    process's part. `state` is running, stopped or completed.
    """

    facts: Facts
    rows_done: int = 0
    shards_done: int = 0
    rows_left: int = 0
    state: str = "running"
    made: list[Made] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """The seconds since this process began."""
        return time.monotonic() - self.began_s

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of this process, over all its shards."""
        return sum(one.tokens for one in self.made) / self.seconds if self.made else 0.0

    @property
    def left_s(self) -> float | None:
        """The estimated seconds until this process has finished its part; at first None."""
        own = sum(one.rows for one in self.made)
        return self.rows_left * self.seconds / own if own else None


Listener = Callable[[Progress], None]


class Stage:
    """The command `entrenar distill logits` in one process."""

    def __init__(self, prepared: Prepared, name: str, part: Part | None = None) -> None:
        """Check the settings, without reading weights; `name` is the backend.

        Raises UsageError for settings that can't be used.
        """
        section = student.of(prepared)
        self.device = teacher.device_of(name)
        self.prepared, self.folder, self._part = prepared, section.shards, part
        self._settings = teacher.settings_of(prepared.settings, section)
        require_tokenizer(prepared, self._settings.model)
        model_folder.require_checkpoint(self._settings.model)
        config = model_folder.configuration(self._settings)
        vocabulary = student.vocabulary_of(config)
        if section.top_k > vocabulary:
            raise UsageError(
                f"distill.top_k={section.top_k}: the teacher's vocabulary has {vocabulary} tokens; "
                "use that many, or fewer"
            )
        self._lists = Lists(self.folder)
        self._longest = int(np.diff(prepared.train.starts).max())
        self.facts, self.places = _facts(
            prepared, vocabulary, model_folder.digest(self._settings.model)
        )

    def run(self, listen: Listener, stopping: threading.Event) -> bool:
        """Produce all shards of this process's part; return False if `stopping` was set first.

        Waits for shards that other processes are producing, and produces them here if those
        processes die. Raises SystemFailure if a file can't be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with closing(Claims(self.folder)) as claims:
                writer = Writer(self.folder, self.facts, self._part, claims)
                return self._make_all(claims, writer, listen, stopping)
        except OSError as error:
            name = f"{Path(error.filename).name}: " if error.filename else ""
            told = files.problem(error, self.folder)
            problem = f"shards can't be written ({name}{told})"
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            advice = "make room" if is_full else "give a folder that can be written to"
            raise SystemFailure(
                f"distill.logits={self.folder}: {problem}; {advice}, and start it again: it "
                "continues with the first missing shard"
            ) from error

    def _make_all(
        self, claims: Claims, writer: Writer, listen: Listener, stopping: threading.Event
    ) -> bool:
        progress, loaded = Progress(self.facts), cast("Teacher | None", None)
        checked: dict[int, Entry] = {}  # shards with files that were checked
        with _Writing(writer) as writing:

            def left() -> list[int]:
                for made, entry in writing.finished():
                    progress.made.append(made)
                    checked[entry.shard] = entry
                    claims.give_up(entry.shard)
                return self._left(checked, progress)

            while not stopping.is_set():
                due = left()
                listen(progress)
                if not due:
                    break
                free = [shard for shard in due if shard not in writing.shards]
                mine = next((shard for shard in free if claims.take(shard)), None)
                if mine is None:  # all are being written here, or produced by others
                    if not writing.settle():
                        stopping.wait(LOOK_EVERY_S)
                    continue
                # Another process may have produced it just before the claim.
                if mine in left():
                    loaded = loaded or self._teacher()
                    shards.remove_unfinished(self.folder, self.facts, mine)
                    self._make(loaded, mine, writing, stopping)
                if mine not in writing.shards:
                    claims.give_up(mine)
            writing.settle()
            is_complete = not left()  # according to the lists, once all has been written
        progress.state = "completed" if is_complete else "stopped"
        listen(progress)
        return is_complete

    def _left(self, checked: dict[int, Entry], progress: Progress) -> list[int]:
        """Return the missing or damaged shards of this part; updates the counts in `progress`."""
        listed = self._lists.read()
        there = {} if listed is None else listed.shards
        for shard, entry in there.items():
            if checked.get(shard) == entry:
                continue
            checked.pop(shard, None)
            if not shards.problem(self.folder, self.facts, entry):
                checked[shard] = entry
        progress.shards_done = len(checked)
        progress.rows_done = sum(entry.rows for entry in checked.values())
        every = range(self.facts.num_shards)
        if self._part is not None:
            number, num_parts = self._part
            every = range(number - 1, self.facts.num_shards, num_parts)
        left = [shard for shard in every if shard not in checked]
        progress.rows_left = sum(self.facts.rows[shard] for shard in left)
        return left

    def _teacher(self) -> Teacher:
        """Return the teacher. Raises UsageError if it can't take the rows."""
        section, prepared = student.of(self.prepared), self.prepared
        known = manifest.num_tokens(prepared.tokenizer)
        loaded = teacher.load(self._settings, section, self.device, known=known)
        tokens = [prepared.pad_token, int(prepared.train.tokens.max())]
        folder, limit = self._settings.model, model_folder.longest(loaded.module)
        model_folder.require_tokens(loaded.module, tokens, folder=folder)
        if limit is not None and self._longest > limit:
            raise UsageError(
                f"distill.teacher={folder}: it takes rows of {limit} tokens at most "
                "(max_position_embeddings in config.json), and data.train has one with "
                f"{self._longest}; use data.max_tokens <= {limit}"
            )
        return loaded

    def _make(
        self, loaded: Teacher, shard: int, writing: _Writing, stopping: threading.Event
    ) -> None:
        """Compute a shard while its earlier pieces are written; abandon it if `stopping` is set."""
        file = ShardWriter(self.folder, self.facts, shard, self.places.starts(shard))
        began_s, tokens = time.monotonic(), 0
        writing.begin(shard, file)
        for ids in self._pieces(shard):
            parts = list[tuple[Batch, Kept]]()
            for batch in self._batches(ids):
                if stopping.is_set():
                    writing.leave(shard)
                    return
                parts.append((batch, loaded.kept(batch.tokens, batch.places)))
                tokens += batch.num_tokens
            writing.submit(partial(_write, file, parts, ids))
        writing.end(shard, tokens, began_s)

    def _pieces(self, shard: int) -> Iterator[list[int]]:
        """Yield a shard's samples in pieces that end once their rows have PIECE_BYTES."""
        piece, num_bytes = list[int](), 0
        for sample in self.places.of_shards[shard]:
            piece.append(sample)
            num_bytes += len(self.places.positions(sample)) * shards.row_bytes(self.facts)
            if num_bytes >= PIECE_BYTES:
                yield piece
                piece, num_bytes = [], 0
        if piece:
            yield piece

    def _batches(self, ids: Sequence[int]) -> Iterator[Batch]:
        train, pad = self.prepared.train, self.prepared.pad_token
        for chosen in teacher.batches(train, ids, self.facts.batch_tokens):
            yield Batch(train, self.places, chosen, pad, self._longest)


class _Writing:
    """Writes pieces of shards in a background thread with a queue.

    The context manager ends the thread.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "shards")
        self._pending: deque[Future[tuple[Made, Entry] | None]] = deque()
        self._finished: list[tuple[Made, Entry]] = []
        self._files: dict[int, ShardWriter] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    @property
    def shards(self) -> Collection[int]:
        return self._files.keys()

    def begin(self, shard: int, file: ShardWriter) -> None:
        self._files[shard] = file

    def submit(self, write: Callable[[], None]) -> None:
        """Let the thread write a piece.

        If the queue is full, waits for the oldest entry, and raises the exception of its writing,
        if any.
        """
        while len(self._pending) >= WAITING_MAX:
            self._take()
        self._pending.append(self._thread.submit(write))

    def end(self, shard: int, tokens: int, began_s: float) -> None:
        """Once a shard's pieces are written, move its file into place and add it to the list."""
        file = self._files[shard]

        def finish() -> tuple[Made, Entry]:
            entry = self._writer.add(file.finish())
            seconds = time.monotonic() - began_s
            return Made(shard=shard, rows=entry.rows, tokens=tokens, seconds=seconds), entry

        # `finish` holds no rows, so the limit of waiting pieces doesn't apply.
        self._pending.append(self._thread.submit(finish))

    def finished(self) -> list[tuple[Made, Entry]]:
        while self._pending and self._pending[0].done():
            self._take()
        finished, self._finished = self._finished, []
        for _, entry in finished:
            del self._files[entry.shard]
        return finished

    def leave(self, shard: int) -> None:
        self.settle()
        self._files.pop(shard).close()

    def settle(self) -> bool:
        """Wait until all is written; return whether anything was pending."""
        was_busy = bool(self._pending)
        while self._pending:
            self._take()
        return was_busy

    def _take(self) -> None:
        made = self._pending.popleft().result()
        if made is not None:
            self._finished.append(made)


def _write(file: ShardWriter, parts: Sequence[tuple[Batch, Kept]], ids: Sequence[int]) -> None:
    file.add(teacher.in_order([batch.rows(kept) for batch, kept in parts], ids))


def require_tokenizer(prepared: Prepared, folder: Path) -> None:
    """Raise UsageError unless the teacher in `folder` has the same tokens as the student."""
    theirs = manifest.vocabulary_digest(model.tokenizer(prepared.settings, folder))
    own = manifest.vocabulary_digest(prepared.tokenizer)
    if theirs != own:
        raise UsageError(
            f"distill.teacher={folder}: its tokenizer ({theirs}) is not the student's ({own}, "
            f"{prepared.settings.model}): their tokens are not the same; use "
            "`entrenar distill text`, which learns from the teacher's answers"
        )


def _facts(prepared: Prepared, vocabulary: int, digest: str) -> tuple[Facts, Places]:
    """Return the facts of the configured shards, and the places of their rows."""
    section = student.of(prepared)
    places = student.places(prepared.train, prepared.settings.seed, section.shard_samples)
    every = range(len(places.of_shards))
    facts = Facts(
        teacher=digest,
        tokenizer=manifest.vocabulary_digest(prepared.tokenizer),
        data=prepared.train.digest,
        vocabulary=vocabulary,
        top_k=section.top_k,
        stored=section.stored,
        precision=section.precision,
        seed=prepared.settings.seed,
        batch_tokens=section.batch_tokens,
        samples=tuple(len(places.of_shards[shard]) for shard in every),
        rows=tuple(places.rows_of(shard) for shard in every),
        day=prepared.day,
    )
    return facts, places
