"""Reads rows of JSON and Parquet files, each with its place, and one problem for each bad row.

Files of rows come from anywhere. Every row becomes a Row that can be copied, shown and written as
JSON, or a BadRow: all readers pass their rows through one guard (`_checked`). Only damage to a
whole file ends the reading, with a UsageError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import json_text

_LINES, _LISTS, _TABLES = (".jsonl", ".ndjson"), (".json",), (".parquet",)
_PACKED = ".gz"  # the ending of a compressed file of lines or of a list
_KINDS = ".jsonl (or .ndjson), .json, either with .gz, or .parquet"
ROW_BYTES_MAX = 2**24  # bytes of a line, or of a row in other files
LIST_BYTES_MAX = 2**31  # bytes of a list, which is in memory as a whole
_BATCH_ROWS, _BATCH_BYTES = 1024, 2**26  # read at a time from a Parquet file
_SKIPPED_BYTES = 2**20  # read at a time from the rest of a line that is too long
_MARK = b"\xef\xbb\xbf"  # the byte order mark of UTF-8, with which some editors begin a file
_SHOWN_CHARS = 80
_PATTERN = "*?["
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of `file`. `number` counts from 1; in a JSONL file it is the line."""

    file: str
    number: int
    fields: Mapping[str, Any]

    @property
    def place(self) -> str:
        """`file:number`."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used: its place, and the problem.

    `num_tokens` is the number of its tokens if the problem is that it has too many, else None.
    """

    place: str
    problem: str
    num_tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


def files(path: Path) -> list[Path]:
    """Return the files that `path` names: one file, or those that match it as a pattern, sorted.

    The name of an existing folder is not a pattern, whatever characters it has. Raises UsageError
    if there are no files, or for a file of another format.
    """
    try:
        paths = _files(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    for file in paths:
        if not _kind(file):
            raise UsageError(f"data {file}: use a file with a name that ends with {_KINDS}")
    return paths


def _files(path: Path) -> list[Path]:
    paths = [path]
    if not path.exists() and any(sign in str(path) for sign in _PATTERN):
        folder = next((one for one in path.parents if one.is_dir()), Path())
        paths = sorted(folder.glob(str(path.relative_to(folder))))
        if not paths:
            raise UsageError(f"data {path}: no file fits the pattern; give another one")
    if path.is_dir():
        raise UsageError(f"data {path}: is a folder; name its files, such as {path / '*.jsonl'}")
    return paths


def _unreadable(path: Path, error: Exception) -> UsageError:
    told = getattr(error, "strerror", None) or error
    return UsageError(f"data {path}: can't be read ({told}); give a file that can be read")


def read(path: Path) -> Iterator[Row | BadRow]:
    """Yield the rows of the file or the files at `path`, in order, without blank lines.

    Raises UsageError if a file can't be read, or has another format.
    """
    readers = {
        **dict.fromkeys((*_LINES, *_LISTS), _of_json),
        **dict.fromkeys(_TABLES, _of_parquet),
    }
    for file in files(path):
        try:
            yield from readers[_kind(file)](file)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(file, error) from error


def _kind(path: Path) -> str:
    name = path.name.lower()
    ends = (*_LINES, *_LISTS)
    if name.endswith(_PACKED) and name.removesuffix(_PACKED).endswith(ends):
        name = name.removesuffix(_PACKED)
    return next((end for end in (*ends, *_TABLES) if name.endswith(end)), "")


def _opened(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(_PACKED):
        return cast("IO[bytes]", gzip.open(path))
    return path.open("rb")


def _of_json(path: Path) -> Iterator[Row | BadRow]:
    """Yield one object for each line, or the objects of one list, whatever the name's ending."""
    with _opened(path) as file:
        first = next((line for line in map(_unmarked, _lines(file)) if line.strip()), b"{}")
    if first.lstrip().startswith(b"["):
        yield from _of_list(path)
        return
    if _kind(path) in _LISTS and isinstance(bad := _row(path, 1, first), BadRow):
        told = f"its first line {bad.problem}"
        raise UsageError(f"data {path}: use a list of objects, or one object per line; {told}")
    with _opened(path) as file:
        for number, line in enumerate(map(_unmarked, _lines(file)), 1):
            if line.strip():
                yield _row(path, number, line)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines. Of a line that is too long, yield only a beginning that exceeds the limit."""
    while line := file.readline(ROW_BYTES_MAX + 1):
        yield line
        if len(line) > ROW_BYTES_MAX:
            while line and not line.endswith(b"\n"):
                line = file.readline(_SKIPPED_BYTES)


def _of_list(path: Path) -> Iterator[Row | BadRow]:
    """Yield the objects of a list, one after another. A bad one doesn't affect the others."""
    with _opened(path) as file:
        content = file.read(LIST_BYTES_MAX + 1)
    number = 0
    try:
        if len(content) > LIST_BYTES_MAX:
            raise ValueError(f"more than {LIST_BYTES_MAX} bytes; use one object per line")
        text = _unmarked(content).decode()
        del content
        at = json_text.skip_space(text, text.index("[") + 1)
        while number or text[at : at + 1] != "]":
            number += 1
            row, at = _element(path, number, text, at)
            yield row
            at = json_text.skip_space(text, at)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = json_text.skip_space(text, at + 1)
        if (end := json_text.skip_space(text, at + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except ValueError as error:
        raise UsageError(
            f"data {path}: begins as a list, and is not JSON at row {number} ({error}); fix it"
        ) from error


def _element(path: Path, number: int, text: str, at: int) -> tuple[Row | BadRow, int]:
    """Return the row of a list that begins at `at`, and where it ends.

    Raises JSONDecodeError for bad syntax, since it hides where the next row begins.
    """
    try:
        fields, end = json_text.load_at(text, at, names_once=True)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return BadRow(f"{path}:{number}", f"can't be read ({error})"), json_text.end_of(text, at)
    return _checked(path, number, lambda: _of_size(fields, end - at)), end


def _of_size(row: T, num_bytes: int) -> T:
    if num_bytes > ROW_BYTES_MAX:
        raise ValueError(f"has {num_bytes} bytes or more; at most {ROW_BYTES_MAX} are read")
    return row


def _unmarked(line: bytes) -> bytes:
    """Return a line without a byte order mark. Joined files may have one inside."""
    return line.removeprefix(_MARK)


def _row(path: Path, number: int, line: bytes) -> Row | BadRow:
    def read() -> object:
        text = line.rstrip()
        return json_text.load(_of_size(text, len(text)), names_once=True)

    return _checked(path, number, read)


def _checked(path: Path, number: int, read: Callable[[], object]) -> Row | BadRow:
    """Return the row with the fields that `read` returns; a BadRow if it raises ValueError.

    All readers use this guard: a row that passes it is flat enough to be copied, and its texts are
    valid Unicode.
    """
    try:
        fields = read()
        json_text.require_flat(fields)
        json_text.require_texts(fields)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except ValueError as error:
        problem = str(error) if str(error).startswith("has ") else f"can't be read ({error})"
    else:
        if isinstance(fields, dict):
            return Row(str(path), number, fields)
        problem = f"is a {type(fields).__name__}; use an object ({{...}})"
    return BadRow(f"{path}:{number}", problem)


@dataclass(frozen=True)
class _Unreadable:
    """A value of a Parquet file that Python can't represent. It does no harm in unused fields."""

    problem: str

    def __repr__(self) -> str:
        return f"(can't be read: {self.problem})"


def _of_parquet(path: Path) -> Iterator[Row | BadRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(
            f"data {path}: a Parquet file needs pyarrow; {package_data.extra_advice('finetune')}"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = _names(path, file.schema_arrow.names)
            for batch in file.iter_batches(_batch_rows(file.metadata)):
                is_large = batch.nbytes > ROW_BYTES_MAX
                columns = [_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    fields = dict(zip(names, values, strict=True))
                    yield _checked(path, number, partial(_of_values, fields, is_large=is_large))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data {path}: the name of a column is not UTF-8 ({error.reason}); write the file again"
        ) from error
    except ArrowException as error:
        raise UsageError(
            f"data {path}: not a Parquet file, or a damaged one, after row {number} ({error})"
        ) from error


def _names(path: Path, names: list[str]) -> list[str]:
    name, times = Counter(names).most_common(1)[0] if names else ("", 1)
    if times > 1:
        raise UsageError(f"data {path}: {times} columns are called {name!r}; rename all but one")
    return names


def _batch_rows(metadata: Any) -> int:
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    most = max((one.total_byte_size // max(one.num_rows, 1) for one in groups), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(most, 1)))


def _values(column: Any) -> list[Any]:
    try:
        return cast("list[Any]", column.to_pylist())
    except _CONVERSIONS:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except _CONVERSIONS as error:
        return _Unreadable(str(error))


# What pyarrow raises for single values: texts that are not UTF-8, times that Python can't represent
# or in unknown time zones (KeyError), objects that have a name twice, deep lists.
_CONVERSIONS = (ValueError, OverflowError, KeyError, RecursionError)


def _of_values(fields: dict[str, Any], *, is_large: bool) -> dict[str, Any]:
    """Return a row of columns. Null columns are absent from it.

    A union of datasets fills with null what one of them lacks. `is_large` says that the row may
    exceed ROW_BYTES_MAX.
    """
    json_text.require_flat(fields)
    if is_large:
        _of_size(fields, json_text.num_chars(fields))
    return cast("dict[str, Any]", _given(fields))


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_given(one) for one in value]
    return value
