"""Shards as Parquet files: writing, checking, reading by a student, and their status.

A student needs the rows of its samples in a different order than the shards have them, often while
later shards are still being produced. So `TeacherRows` opens a file when its first row is needed,
waits for one that isn't listed yet, and keeps the most recently used decoded row groups.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.shared import wording
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files, json_text, printing
from entrenar_py.train.distill import manifest
from entrenar_py.train.distill.manifest import Entry, Facts, Listed, Lists, path_of
from entrenar_py.train.model.samples import Samples

GROUP_BYTES = 2**20  # the least size of a row group, except for the last one of a file
COMPRESSION = "zstd"
_HASHED_BYTES = 2**22  # bytes hashed at a time
_COLUMNS = ("sample", "position", "target", "tokens", "log_probabilities", "rest")
_AGAIN = "make it again by `entrenar distill logits`, or copy it again"


@dataclass(frozen=True)
class Rows:
    """The teacher's rows of some samples, one after another.

    `sample`, `position` and `target` are int32 [m], `tokens` is int32 [m, k], `log_probabilities`
    is float16 or float32 [m, k], and `rest` is float32 [m].
    """

    sample: NDArray[np.int32]
    position: NDArray[np.int32]
    target: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_probabilities: NDArray[Any]
    rest: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in _COLUMNS)

    def part(self, rows: slice) -> Rows:
        """Return some consecutive rows as views."""
        return Rows(*(getattr(self, name)[rows] for name in _COLUMNS))

    def taken(self, rows: NDArray[np.int64]) -> Rows:
        """Return copies of `rows`, in the order of these indices."""
        return Rows(*(getattr(self, name)[rows] for name in _COLUMNS))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    return Rows(*(np.concatenate([getattr(one, name) for one in parts]) for name in _COLUMNS))


class Places:
    """The shard and the rows of each sample. Samples are in the order of the run's first epoch.

    So the first epoch reads one shard after another, and can begin while later shards are produced.
    """

    def __init__(self, samples: Samples, visit: Sequence[int], num_each: int) -> None:
        """`visit` has the number of each sample, in order; a shard has `num_each` samples."""
        self._samples = samples
        self.of_shards = [visit[n : n + num_each] for n in range(0, len(visit), num_each)]
        self._place = np.empty(len(visit), np.int64)
        self._place[list(visit)] = np.arange(len(visit))
        self._num_each = num_each
        self._starts = -1, np.zeros(0, np.int64)  # the result of the last call of `starts`

    def shard_of(self, sample: int) -> int:
        """Return the number of the shard that has `sample`."""
        return int(self._place[sample]) // self._num_each

    def rows_of(self, shard: int) -> int:
        """Return the number of rows in the shard."""
        return int(self._samples.num_targets[list(self.of_shards[shard])].sum())

    def starts(self, shard: int) -> NDArray[np.int64]:
        """Return the first row of each of a shard's samples, and at the end the number of rows."""
        known, starts = self._starts
        if known != shard:
            counts = self._samples.num_targets[list(self.of_shards[shard])]
            starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            self._starts = shard, starts
        return starts

    def index_in(self, shard: int, sample: int) -> int:
        """Return the index of `sample` among the samples of its shard."""
        return int(self._place[sample]) - shard * self._num_each

    def positions(self, sample: int) -> NDArray[np.int64]:
        """Return the positions of a sample's rows: those just before a token to predict."""
        return np.flatnonzero(self._samples.is_target[self._samples.part(sample)]) - 1

    def targets(self, sample: int) -> NDArray[np.int32]:
        """Return the tokens that a sample's rows predict."""
        part = self._samples.part(sample)
        return self._samples.tokens[part][self._samples.is_target[part]].astype(np.int32)


def groups(facts: Facts, starts: NDArray[np.int64]) -> list[slice]:
    """Return the rows of each row group: whole samples with a total of GROUP_BYTES or more."""
    slices, begin = list[slice](), 0
    least = max(1, GROUP_BYTES // row_bytes(facts))
    for end in map(int, starts[1:]):
        if end - begin >= least or end == int(starts[-1]):
            if end > begin:
                slices.append(slice(begin, end))
            begin = end
    return slices


def row_bytes(facts: Facts) -> int:
    """Return the bytes of a row in memory."""
    return 16 + facts.top_k * (4 + {"float16": 2, "float32": 4}[facts.stored])


class ShardWriter:
    """Writes a shard's file under a temporary name, and moves it into place once it is on the disk.

    `add` takes consecutive rows. Raises OSError if the file can't be written.
    """

    def __init__(self, folder: Path, facts: Facts, shard: int, starts: NDArray[np.int64]) -> None:
        self._facts, self._shard, self._path = facts, shard, path_of(folder, facts, shard)
        self._own = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        self._form = manifest.columns(facts, shard)
        self._due = groups(facts, starts)
        self._held, self._num_rows = list[Rows](), 0
        self._writer = manifest.arrow().parquet.ParquetWriter(
            self._own,
            self._form,
            compression=COMPRESSION,
            use_dictionary=False,
            write_statistics=False,
        )

    def add(self, rows: Rows) -> None:
        """Append rows. A row group is written as soon as it is complete."""
        self._held.append(rows)
        pa, self._num_rows = manifest.arrow(), self._num_rows + len(rows)
        while self._due and self._due[0].stop <= self._num_rows:
            part = self._due.pop(0)
            rows, size = joined(self._held), part.stop - part.start
            table = pa.Table.from_arrays(
                _arrays(self._form, rows.part(slice(size))), schema=self._form
            )
            self._writer.write_table(table, row_group_size=size)
            self._held = [rows.part(slice(size, None))]

    def finish(self) -> Entry:
        """Put the file in its place, and return its entry for the list."""
        assert not self._due, "all rows were added"
        self._writer.close()
        with self._own.open("rb") as file:
            os.fsync(file.fileno())
        entry = Entry(
            shard=self._shard,
            rows=self._num_rows,
            bytes=self._own.stat().st_size,
            digest=digest_of(self._own),
        )
        self._own.replace(self._path)
        return entry

    def close(self) -> None:
        """Remove the temporary file if it was not finished."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
        self._own.unlink(missing_ok=True)


def remove_unfinished(folder: Path, facts: Facts, shard: int) -> None:
    """Remove temporary files of a shard that killed processes left.

    Only the process that claimed the shard may call this.
    """
    for path in folder.glob(f".{path_of(folder, facts, shard).name}.*"):
        path.unlink(missing_ok=True)


def _arrays(form: Any, rows: Rows) -> list[Any]:
    pa = manifest.arrow()

    def lists(name: str) -> Any:
        kind = form.field(name).type
        flat = pa.array(np.ascontiguousarray(getattr(rows, name)).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)

    return [
        pa.array(rows.sample),
        pa.array(rows.position),
        pa.array(rows.target),
        lists("tokens"),
        lists("log_probabilities"),
        pa.array(rows.rest),
    ]


def digest_of(path: Path) -> str:
    """Return the BLAKE3 digest of a file, 32 hex digits."""
    hasher, piece = blake3(max_threads=blake3.AUTO), memoryview(bytearray(_HASHED_BYTES))
    # Not memory-mapped: if the file shrank meanwhile (on NFS, say), that would kill this process.
    with files.open_file(path) as file:
        while number := file.readinto(piece):
            hasher.update(piece[:number])
    return hasher.hexdigest(16)


class Problem(NamedTuple):
    """Why a shard can't be read: the `kind` of the error, and what its message says."""

    kind: str
    text: str


def problem(folder: Path, facts: Facts, entry: Entry) -> Problem | None:
    """Return what is wrong with a listed shard's file; None if it has the listed bytes."""
    path = path_of(folder, facts, entry.shard)
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            text = f"{path.name} has {size} bytes, but {entry.bytes} in the list"
            return Problem("size", text)
        if digest_of(path) != entry.digest:
            text = f"{path.name} is damaged: its digest is not the one in the list"
            return Problem("digest", text)
    except FileNotFoundError:
        return Problem("missing", f"{path.name} is listed, but missing")
    except OSError as error:
        return Problem("", f"{path.name} can't be read ({error})")
    return None


class File:
    """An open shard, read by row groups."""

    def __init__(self, folder: Path, facts: Facts, shard: int, starts: NDArray[np.int64]) -> None:
        """Raises UsageError if the file is not this shard."""
        self.path = path_of(folder, facts, shard)
        self._groups, self._facts = groups(facts, starts), facts
        pa = manifest.arrow()
        try:
            self._file = pa.parquet.ParquetFile(self.path, memory_map=False)
        except (OSError, pa.ArrowException) as error:
            told = " ".join(str(error).split())
            raise UsageError(f"{self.path}: it is not a Parquet file ({told}); {_AGAIN}") from error
        self._require(manifest.columns(facts, shard))

    def _require(self, form: Any) -> None:
        """Raise UsageError unless columns, metadata and row groups of the file are as expected."""
        schema = self._file.schema_arrow
        for field in form:
            if field.name not in schema.names:
                raise UsageError(f"{self.path}: column {field.name} is missing; {_AGAIN}")
            if not schema.field(field.name).type.equals(field.type):
                raise UsageError(
                    f"{self.path}: column {field.name} has type {schema.field(field.name).type}, "
                    f"and not {field.type}; {_AGAIN}"
                )
        metadata, wanted = _told(schema.metadata), _told(form.metadata)
        # The digest over all facts comes last, since it says only that something differs.
        for name, value in sorted(wanted.items(), key=lambda item: item[0] == "facts"):
            if metadata.get(name) != value:
                raise UsageError(
                    f"{self.path}: it belongs to a different folder or run: {name} is "
                    f"{metadata.get(name)!r}, and {value!r} in the folder's list; {_AGAIN}",
                    kind="facts",
                )
        here = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        due = [part.stop - part.start for part in self._groups]
        if here != due:
            raise UsageError(
                f"{self.path}: it has {sum(here)} rows in {len(here)} groups, expected "
                f"{sum(due)} in {len(due)}; {_AGAIN}"
            )

    def group_of(self, row: int) -> int:
        """Return the number of the group that has `row`."""
        return bisect.bisect_right(self._groups, row, key=lambda part: part.stop)

    def first_of(self, group: int) -> int:
        """Return the first row of a group."""
        return int(self._groups[group].start)

    def read(self, group: int) -> Rows:
        """Return the rows of a group. Raises UsageError if they can't be decoded or used."""
        pa = manifest.arrow()
        try:
            table = self._file.read_row_group(group, columns=list(_COLUMNS), use_threads=False)
            rows = rows_of(table, self._facts.top_k)
        except (OSError, ValueError, pa.ArrowException) as error:
            told = " ".join(str(error).split())
            raise UsageError(
                f"{self.path}: group {group} can't be read ({told}); {_AGAIN}"
            ) from error
        self._require_distributions(rows, self.first_of(group))
        return rows

    def _require_distributions(self, rows: Rows, first: int) -> None:
        """Raise UsageError for a row that no softmax gives; `first` is the first row's number."""
        found = not_distributions(rows)
        if found is not None:
            index, problem = found
            raise UsageError(
                f"{self.path}: row {first + index} (sample {rows.sample[index]}, position "
                f"{rows.position[index]}) is not a distribution: {problem}; {_AGAIN}"
            )


def not_distributions(rows: Rows) -> tuple[int, str] | None:
    """Return the index of the first row that is not a distribution, and why; None if all are.

    From such a row a student would learn NaN, or probabilities that differ from the teacher's.
    """
    logs = np.concatenate([rows.log_probabilities, rows.rest[:, None]], 1, dtype=np.float64)
    ordered = np.sort(rows.tokens, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        masses = np.exp(logs)
        total = masses.sum(1)
        rounding = EXPLAINED + _stored_error(rows) * np.nan_to_num(masses * -logs).sum(1)
        bad = (ordered[:, 1:] == ordered[:, :-1]).any(1) | ~(np.abs(total - 1) <= rounding)
    if not bad.any():
        return None
    row = int(np.argmax(bad))
    [doubled] = np.nonzero(ordered[row, 1:] == ordered[row, :-1])
    if len(doubled):
        return row, f"token {ordered[row, doubled[0]]} is in it twice"
    return row, f"its probabilities and the rest add up to {total[row]:.6g}"


# How far float32 rounding may move the sum of a row's probabilities from 1. A teacher subtracts
# logs that are as large as its logits. At 2^16, each of three roundings is off by up to half an
# ulp, 2^-8.
EXPLAINED = 3 * 2.0**-8


def _stored_error(rows: Rows) -> float:
    return float(np.finfo(rows.log_probabilities.dtype).eps) / 2


def rows_of(table: Any, top_k: int) -> Rows:
    """Return a table's rows as arrays."""

    def flat(name: str) -> Any:
        return table.column(name).combine_chunks()

    def lists(name: str) -> Any:
        column = flat(name)
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), top_k)

    return Rows(
        flat("sample").to_numpy(zero_copy_only=False),
        flat("position").to_numpy(zero_copy_only=False),
        flat("target").to_numpy(zero_copy_only=False),
        lists("tokens"),
        lists("log_probabilities"),
        flat("rest").to_numpy(zero_copy_only=False),
    )


def _told(metadata: Any) -> dict[str, Any]:
    try:
        record = json_text.load((metadata or {})[manifest.METADATA_KEY])
    except (KeyError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


ARRIVAL_LOOK_EVERY_S = 0.5
TELL_AFTER_S = 10.0
HELD_BYTES = 2**28  # the most bytes of decoded row groups in memory
OPEN_MAX = 256  # the most open files

Say = Callable[[str], None]


def facts_of(
    folder: Path, *, patience_s: float, ended: threading.Event, say: Say = printing.say
) -> Facts:
    """Return the facts of the shards in `folder`; waits until a first list exists.

    Raises UsageError if there is none after `patience_s` seconds, or if a list can't be read, and
    SystemFailure once `ended` is set.
    """
    begin, is_told = time.monotonic(), False
    lists = Lists(folder)
    while (listed := lists.read()) is None:
        waited = time.monotonic() - begin
        if waited >= patience_s:
            raise UsageError(
                f"distill.logits={folder}: there are no shards ({manifest.PATTERN} is "
                "missing); make them by `entrenar distill logits`, or give the folder in "
                "which they will arrive"
            )
        if not is_told:
            say(f"waits for the first list of shards in {folder}")
            is_told = True
        _wait_on(ended, folder, min(ARRIVAL_LOOK_EVERY_S, patience_s - waited))
    return listed.facts


def _wait_on(ended: threading.Event, folder: Path, seconds: float) -> None:
    if ended.wait(seconds):
        raise SystemFailure(f"distill.logits={folder}: the wait for a shard was ended")


class TeacherRows:
    """Reads the teacher's rows of any samples, and waits for shards that are still missing.

    Not safe for use by several threads.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        places: Places,
        *,
        num_tokens: int,
        patience_s: float,
        ended: threading.Event,
        say: Say = printing.say,
    ) -> None:
        """Waits up to `patience_s` seconds for a shard that is missing or not complete.

        All tokens are below `num_tokens`. Once `ended` is set, no call waits any longer.
        """
        self.facts = facts
        self._folder, self._places = folder, places
        self._num_tokens, self.patience_s, self._say = num_tokens, patience_s, say
        self._ended = ended
        self._lists, self._listed = Lists(folder), Listed(facts, {})
        self._files: OrderedDict[int, File] = OrderedDict()
        # Shards with digests that were compared, and the states of their files at that time: a
        # run with a new order in each epoch opens the same file many times.
        self._seen: dict[int, tuple[Entry, tuple[int, ...] | None]] = {}
        self._held: OrderedDict[tuple[int, int], Rows] = OrderedDict()  # key: shard and group
        self._held_bytes = 0

    def rows(self, samples: Sequence[int]) -> Rows:
        """Return the rows of `samples`, one sample after another.

        Raises SystemFailure if a shard doesn't arrive in time, or if its rows belong to other
        samples.
        """
        return joined([self._rows(int(sample)) for sample in samples])

    def interrupt(self) -> None:
        """End a wait in another thread, which then raises SystemFailure."""
        self._ended.set()

    def require(self, samples: Sequence[int]) -> None:
        """Wait until the shards of all `samples` exist. Raises SystemFailure as `rows` does."""
        for shard in sorted({self._places.shard_of(int(one)) for one in samples}):
            self._file(shard)

    def _rows(self, sample: int) -> Rows:
        shard = self._places.shard_of(sample)
        starts = self._places.starts(shard)
        index = self._places.index_in(shard, sample)
        begin, end = int(starts[index]), int(starts[index + 1])
        file = self._file(shard)
        group = file.group_of(begin)
        first = file.first_of(group)
        rows = self._group(file, shard, group).part(slice(begin - first, end - first))
        positions, targets = self._places.positions(sample), self._places.targets(sample)
        if not (rows.sample == sample).all() or not np.array_equal(rows.position, positions):
            raise SystemFailure(
                f"{file.path}: rows {begin} to {end - 1} do not belong to sample {sample} at "
                f"positions {_shown(positions)}, but to {_shown(np.unique(rows.sample))} at "
                f"{_shown(rows.position)}; make the shard again by `entrenar distill logits`",
                kind="samples",
            )
        if not np.array_equal(rows.target, targets):
            raise SystemFailure(
                f"{file.path}: rows {begin} to {end - 1} predict {_shown(rows.target)}, and "
                f"sample {sample} has {_shown(targets)} there; make the shard again by `entrenar "
                "distill logits`"
            )
        if rows.tokens.min() < 0 or rows.tokens.max() >= self._num_tokens:
            wrong = rows.tokens[(rows.tokens < 0) | (rows.tokens >= self._num_tokens)]
            raise SystemFailure(
                f"{file.path}: sample {sample} has token {wrong[0]}, but teacher and "
                f"student have only {self._num_tokens} tokens; make the shard again by "
                "`entrenar distill logits`"
            )
        return rows

    def _group(self, file: File, shard: int, group: int) -> Rows:
        key = shard, group
        if key not in self._held:
            try:
                rows = file.read(group)
            except UsageError as error:
                raise SystemFailure(str(error), kind=error.kind) from error
            self._held[key] = rows
            self._held_bytes += rows.num_bytes
            while self._held_bytes > HELD_BYTES and len(self._held) > 1:
                _, old = self._held.popitem(last=False)
                self._held_bytes -= old.num_bytes
        self._held.move_to_end(key)
        return self._held[key]

    def _file(self, shard: int) -> File:
        if shard not in self._files:
            self._wait(shard)
            try:
                file = File(self._folder, self.facts, shard, self._places.starts(shard))
            except UsageError as error:
                raise SystemFailure(str(error), kind=error.kind) from error
            self._files[shard] = file
            while len(self._files) > OPEN_MAX:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _wait(self, shard: int) -> None:
        """Wait until the shard is listed and its file has the listed bytes."""
        begin, last = time.monotonic(), None
        while problem := self._lacks(shard):
            waited = time.monotonic() - begin
            if waited >= self.patience_s:
                raise SystemFailure(
                    f"distill.logits={self._folder}: {problem.text} (waited {waited:.0f} s); make "
                    "it by `entrenar distill logits`, or copy it, and resume",
                    kind=problem.kind,
                )
            if problem != last and waited >= min(TELL_AFTER_S, self.patience_s / 2):
                self._say(f"waits for shard {shard}: {problem.text}")
                last = problem
            _wait_on(self._ended, self._folder, min(ARRIVAL_LOOK_EVERY_S, self.patience_s - waited))

    def _lacks(self, shard: int) -> Problem | None:
        """Return why a shard can't be read yet; None if it can."""
        if shard not in self._listed.shards:
            try:
                listed = self._lists.read()
            except UsageError as error:
                raise SystemFailure(str(error), kind=error.kind) from error
            if listed is not None and listed.facts != self.facts:
                raise SystemFailure(
                    f"distill.logits={self._folder}: its shards have changed since the run "
                    "began; give the run its own folder"
                )
            self._listed = listed or self._listed
        entry = self._listed.shards.get(shard)
        if entry is None:
            return Problem("", f"shard {shard} of {self.facts.num_shards} is missing")
        state = _state(manifest.path_of(self._folder, self.facts, shard))
        if state is not None and self._seen.get(shard) == (entry, state):
            return None
        lack = problem(self._folder, self.facts, entry)
        if lack:  # the list is read again: the shard may have been produced again
            self._listed = Listed(self.facts, {})
        else:
            self._seen[shard] = entry, state
        return lack


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _shown(numbers: np.ndarray) -> str:
    told = ", ".join(map(str, numbers[:4].tolist()))
    return f"{told}, ..." if len(numbers) > 4 else told


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a folder's shards.

    `damaged` maps shards to what is wrong, `making` maps shards to the process that produces them.
    `rows` and `num_bytes` count complete shards only.
    """

    facts: Facts
    rows: int
    num_bytes: int
    missing: tuple[int, ...]
    damaged: dict[int, str]
    making: dict[int, int]

    @property
    def is_whole(self) -> bool:
        """True if every shard exists and is undamaged."""
        return not self.missing and not self.damaged

    def lines(self) -> Iterator[str]:
        """Yield the status as lines of text."""
        facts = self.facts
        yield f"teacher {facts.teacher}, tokenizer {facts.tokenizer}, rows {facts.data}"
        yield (
            f"{facts.top_k} of {facts.vocabulary} tokens at each position, log-probabilities in "
            f"{facts.stored}, weights in {facts.precision}"
        )
        there = facts.num_shards - len(self.missing) - len(self.damaged)
        yield (
            f"{there} of {facts.num_shards} shards, {self.rows:,} of {sum(facts.rows):,} rows, "
            f"{self.num_bytes:,} bytes"
        )
        if self.making:
            yield f"being made: {wording.named('shard', self.making)}"
        if self.missing:
            yield f"missing: {wording.named('shard', self.missing)}"
        for shard, why in self.damaged.items():
            yield f"damaged: shard {shard}: {why}"
        yield (
            "all rows are complete" if self.is_whole else "continue with `entrenar distill logits`"
        )

    def record(self) -> dict[str, Any]:
        """Return the status in a form that JSON can hold."""
        return {
            "facts": self.facts.to_dict(),
            "rows": self.rows,
            "bytes": self.num_bytes,
            "missing": list(self.missing),
            "damaged": {str(shard): why for shard, why in self.damaged.items()},
            "making": {str(shard): process for shard, process in self.making.items()},
            "is_whole": self.is_whole,
        }


def status(folder: Path) -> Status:
    """Return the status of `folder`; reads every shard. Raises UsageError if it has no list."""
    listed = manifest.read(folder)
    if listed is None:
        raise UsageError(
            f"{folder}: there are no shards ({manifest.PATTERN} is missing); give the folder that "
            "`entrenar distill logits` writes"
        )
    facts = listed.facts
    absent = {n for n in listed.shards if not manifest.path_of(folder, facts, n).exists()}
    damaged = {
        shard: why.text
        for shard, entry in sorted(listed.shards.items())
        if shard not in absent and (why := problem(folder, facts, entry))
    }
    there = listed.shards.keys() - damaged.keys() - absent
    making = manifest.being_made(folder, facts.num_shards)
    whole = [listed.shards[shard] for shard in there]
    return Status(
        facts=facts,
        rows=sum(entry.rows for entry in whole),
        num_bytes=sum(entry.bytes for entry in whole),
        missing=tuple(sorted({*listed.missing, *absent})),
        damaged=damaged,
        making={shard: process for shard, process in making.items() if shard not in there},
    )
