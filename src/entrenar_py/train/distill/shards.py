"""Shards as Parquet files: which samples each one has, how it is written, and how it is checked."""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.distill import schema
from entrenar_py.train.distill.manifest import Entry, path_of
from entrenar_py.train.distill.schema import Facts
from entrenar_py.train.model.samples import Samples

GROUP_BYTES = 2**20  # of a row group's rows, at least, but for the last one of a file
COMPRESSION = "zstd"
_HASHED_BYTES = 2**22  # at a time
_COLUMNS = ("sample", "position", "target", "tokens", "log_probabilities", "rest")
_AGAIN = "make it again by `entrenar distill logits`, or copy it again"


@dataclass(frozen=True)
class Rows:
    """The teacher's rows of some samples, one after another.

    `sample`, `position` and `target` are int32 [m], `tokens` int32 [m, k], `log_probabilities`
    float16 or float32 [m, k], and `rest` float32 [m].
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
        """Return some consecutive rows, not copied."""
        return Rows(*(getattr(self, name)[rows] for name in _COLUMNS))

    def taken(self, rows: NDArray[np.int64]) -> Rows:
        """Return copies of `rows`, in their order."""
        return Rows(*(getattr(self, name)[rows] for name in _COLUMNS))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    return Rows(*(np.concatenate([getattr(one, name) for one in parts]) for name in _COLUMNS))


class Places:
    """Where each sample's rows are: in the order in which a run with `seed` first visits them.

    So its first epoch reads one shard after another, and can begin while later ones are made.
    """

    def __init__(self, samples: Samples, visit: Sequence[int], num_each: int) -> None:
        """`visit` has the number of each sample once; a shard has `num_each`."""
        self._samples = samples
        self.of_shards = [visit[n : n + num_each] for n in range(0, len(visit), num_each)]
        self._place = np.empty(len(visit), np.int64)
        self._place[list(visit)] = np.arange(len(visit))
        self._num_each = num_each
        self._starts = -1, np.zeros(0, np.int64)  # of the shard that was last asked for

    def shard_of(self, sample: int) -> int:
        """Return the number of the shard that has `sample`."""
        return int(self._place[sample]) // self._num_each

    def rows_of(self, shard: int) -> int:
        """Return the number of rows that the shard has."""
        return int(self._samples.num_targets[list(self.of_shards[shard])].sum())

    def starts(self, shard: int) -> NDArray[np.int64]:
        """Return where the rows of each of a shard's samples begin, and where the last ones end."""
        known, starts = self._starts
        if known != shard:
            counts = self._samples.num_targets[list(self.of_shards[shard])]
            starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            self._starts = shard, starts
        return starts

    def index_in(self, shard: int, sample: int) -> int:
        """Return which of the shard's samples `sample` is."""
        return int(self._place[sample]) - shard * self._num_each

    def positions(self, sample: int) -> NDArray[np.int64]:
        """Return the positions of a sample's rows: of each token before one to predict."""
        return np.flatnonzero(self._samples.is_target[self._samples.part(sample)]) - 1

    def targets(self, sample: int) -> NDArray[np.int32]:
        """Return the tokens that a sample's rows predict."""
        part = self._samples.part(sample)
        return self._samples.tokens[part][self._samples.is_target[part]].astype(np.int32)


def groups(facts: Facts, starts: NDArray[np.int64]) -> list[slice]:
    """Return the rows of each row group: whole samples, GROUP_BYTES or more together."""
    found, begin = list[slice](), 0
    least = max(1, GROUP_BYTES // row_bytes(facts))
    for end in map(int, starts[1:]):
        if end - begin >= least or end == int(starts[-1]):
            if end > begin:
                found.append(slice(begin, end))
            begin = end
    return found


def row_bytes(facts: Facts) -> int:
    """Return the bytes of a row in memory."""
    return 16 + facts.top_k * (4 + {"float16": 2, "float32": 4}[facts.stored])


class ShardWriter:
    """Writes a shard's file under another name, and moves it to its place when the disk has it.

    `add` takes rows one after another. Raises OSError if the file can't be written.
    """

    def __init__(self, folder: Path, facts: Facts, shard: int, starts: NDArray[np.int64]) -> None:
        self._facts, self._shard, self._path = facts, shard, path_of(folder, facts, shard)
        self._own = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        self._form = schema.columns(facts, shard)
        self._due = groups(facts, starts)
        self._held, self._num_rows = list[Rows](), 0
        self._writer = schema.arrow().parquet.ParquetWriter(
            self._own,
            self._form,
            compression=COMPRESSION,
            use_dictionary=False,
            write_statistics=False,
        )

    def add(self, rows: Rows) -> None:
        """Write the next rows, as soon as a group is whole."""
        self._held.append(rows)
        pa, self._num_rows = schema.arrow(), self._num_rows + len(rows)
        while self._due and self._due[0].stop <= self._num_rows:
            part = self._due.pop(0)
            held, size = joined(self._held), part.stop - part.start
            table = pa.Table.from_arrays(
                _arrays(self._form, held.part(slice(size))), schema=self._form
            )
            self._writer.write_table(table, row_group_size=size)
            self._held = [held.part(slice(size, None))]

    def finish(self) -> Entry:
        """Put the file in its place, and return its line of the list."""
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
        """Remove the file if it is not whole."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
        self._own.unlink(missing_ok=True)


def remove_unfinished(folder: Path, facts: Facts, shard: int) -> None:
    """Remove what killed processes left of a shard; only who has claimed it may."""
    for path in folder.glob(f".{path_of(folder, facts, shard).name}.*"):
        path.unlink(missing_ok=True)


def _arrays(form: Any, rows: Rows) -> list[Any]:
    pa = schema.arrow()

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
    # Not as a mapping: a file that shrinks meanwhile, on NFS say, would kill this process.
    with files.open_file(path) as file:
        while number := file.readinto(piece):
            hasher.update(piece[:number])
    return hasher.hexdigest(16)


def problem(folder: Path, facts: Facts, entry: Entry) -> str:
    """Return what is wrong with a listed shard's file; "" if it has the listed bytes."""
    path = path_of(folder, facts, entry.shard)
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path.name} has {size} bytes, and the list says {entry.bytes}"
        if digest_of(path) != entry.digest:
            return f"{path.name} is damaged: its digest is not that of the list"
    except FileNotFoundError:
        return f"{path.name} is listed, and not there"
    except OSError as error:
        return f"{path.name} can't be read ({error})"
    return ""


class File:
    """An open shard, read by row groups."""

    def __init__(self, folder: Path, facts: Facts, shard: int, starts: NDArray[np.int64]) -> None:
        """Raises UsageError for a file that is no such shard."""
        self.path = path_of(folder, facts, shard)
        self._groups, self._facts = groups(facts, starts), facts
        pa = schema.arrow()
        try:
            self._file = pa.parquet.ParquetFile(self.path, memory_map=False)
        except (OSError, pa.ArrowException) as error:
            told = " ".join(str(error).split())
            raise UsageError(f"{self.path}: it is no Parquet file ({told}); {_AGAIN}") from error
        self._require(schema.columns(facts, shard))

    def _require(self, form: Any) -> None:
        """Raise UsageError unless the file has the columns and the metadata of its place."""
        found = self._file.schema_arrow
        for field in form:
            if field.name not in found.names:
                raise UsageError(f"{self.path}: column {field.name} is missing; {_AGAIN}")
            if not found.field(field.name).type.equals(field.type):
                raise UsageError(
                    f"{self.path}: column {field.name} has type {found.field(field.name).type}, "
                    f"and not {field.type}; {_AGAIN}"
                )
        told, wanted = _told(found.metadata), _told(form.metadata)
        # The digest over all facts comes last: it says only that something differs.
        for name, value in sorted(wanted.items(), key=lambda item: item[0] == "facts"):
            if told.get(name) != value:
                raise UsageError(
                    f"{self.path}: it is another folder's or another run's: {name} is "
                    f"{told.get(name)!r}, and {value!r} in the folder's list; {_AGAIN}"
                )
        here = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        due = [part.stop - part.start for part in self._groups]
        if here != due:
            raise UsageError(
                f"{self.path}: it has {sum(here)} rows in {len(here)} groups, and {sum(due)} in "
                f"{len(due)} are due; {_AGAIN}"
            )

    def group_of(self, row: int) -> int:
        """Return the number of the group that has `row`."""
        return bisect.bisect_right(self._groups, row, key=lambda part: part.stop)

    def first_of(self, group: int) -> int:
        """Return the first row of a group."""
        return int(self._groups[group].start)

    def read(self, group: int) -> Rows:
        """Return the rows of a group. Raises UsageError for one that can't be decoded."""
        pa = schema.arrow()
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
        """Raise UsageError for a row that no softmax has, the first of which is row `first`."""
        found = not_distributions(rows)
        if found is not None:
            index, problem = found
            raise UsageError(
                f"{self.path}: row {first + index} (sample {rows.sample[index]}, position "
                f"{rows.position[index]}) is no distribution: {problem}; {_AGAIN}"
            )


def not_distributions(rows: Rows) -> tuple[int, str] | None:
    """Return the index of the first row that is no distribution, and why; None if all are.

    A student would learn NaN from one, or other shares than a teacher has.
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


# What float32 explains of the sum of a row's probabilities: a teacher subtracts logs that are as
# large as its logits. Those of 2^16 are half an ulp off, 2^-8, each of the three times that they
# are rounded.
EXPLAINED = 3 * 2.0**-8


def _stored_error(rows: Rows) -> float:
    """Return the relative error of a log-probability in the format that a shard has."""
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
        found = json_text.load((metadata or {})[schema.KEY])
    except (KeyError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
