"""Reads rows of JSON and Parquet files, each with its place, and one problem for each bad row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from entrenar_py.errors import UsageError

_LINES, _LISTS, _TABLES = (".jsonl", ".ndjson"), (".json",), (".parquet",)
_PACKED = ".gz"  # after one of the first two
_KINDS = ".jsonl (or .ndjson), .json, either with .gz, or .parquet"
_BATCH_ROWS = 1024
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put before a file
_SHOWN_CHARS = 80
_PATTERN = "*?["


@dataclass(frozen=True)
class Row:
    """A row of `file`, counted from 1; of a JSONL file that is its line."""

    file: str
    number: int
    fields: Mapping[str, Any]

    @property
    def place(self) -> str:
        """`file:number`."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used: its place, and why."""

    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


def files(path: Path) -> list[Path]:
    """Return the files that `path` names: one, or those that fit it as a pattern, by name.

    Folders that are there are no patterns, whatever signs their names have.

    Raises UsageError if there are none, or for one that holds no rows.
    """
    try:
        found = _files(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    for file in found:
        if not _kind(file):
            raise UsageError(f"data {file}: use a file whose name ends with {_KINDS}")
    return found


def _files(path: Path) -> list[Path]:
    found = [path]
    if not path.exists() and any(sign in str(path) for sign in _PATTERN):
        folder = next((one for one in path.parents if one.is_dir()), Path())
        found = sorted(folder.glob(str(path.relative_to(folder))))
        if not found:
            raise UsageError(f"data {path}: no file fits the pattern; give another one")
    if path.is_dir():
        raise UsageError(f"data {path}: is a folder; name its files, such as {path / '*.jsonl'}")
    return found


def _unreadable(path: Path, error: Exception) -> UsageError:
    told = getattr(error, "strerror", None) or error
    return UsageError(f"data {path}: can't be read ({told}); give a file that can be read")


def read(path: Path) -> Iterator[Row | BadRow]:
    """Yield the rows of the file or the files at `path`, in order. Blank lines are no rows.

    Raises UsageError if a file can't be read, or is of another kind.
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
    """Return the end of the file's name that says how to read it; "" for a file of no rows."""
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
    """Yield objects, each in its line; or those of one list, whatever the file's name ends with."""
    with _opened(path) as file:
        first = next((line for line in map(_unmarked, file) if line.strip()), b"{}")
    if first.lstrip().startswith(b"["):
        yield from _of_list(path)
        return
    if _kind(path) in _LISTS and isinstance(bad := _row(path, 1, first), BadRow):
        told = f"its first line {bad.problem}"
        raise UsageError(f"data {path}: use a list of objects, or an object a line; {told}")
    yield from _of_lines(path)


def _of_lines(path: Path) -> Iterator[Row | BadRow]:
    with _opened(path) as file:
        for number, line in enumerate(map(_unmarked, file), 1):
            if line.strip():
                yield _row(path, number, line)


def _of_list(path: Path) -> Iterator[Row | BadRow]:
    with _opened(path) as file:
        content = file.read()
    try:
        rows = json.loads(_unmarked(content).decode())
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(
            f"data {path}: begins as a list, and is not JSON ({told}); mend it"
        ) from error
    for number, fields in enumerate(rows, 1):
        yield _checked(path, number, fields)


def _unmarked(line: bytes) -> bytes:
    """Return a line without the mark that it has where a file begins, or once began."""
    return line.removeprefix(_MARK)


def _row(path: Path, number: int, line: bytes) -> Row | BadRow:
    place = f"{path}:{number}"
    try:
        fields = json.loads(line.decode().rstrip())
    except UnicodeDecodeError as error:
        return BadRow(place, f"is not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return BadRow(
            place, f"is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        )
    except ValueError as error:  # a number of too many digits
        return BadRow(place, f"can't be read ({error})")
    except RecursionError:
        return BadRow(place, "is nested too deeply")
    return _checked(path, number, fields)


def _checked(path: Path, number: int, fields: object) -> Row | BadRow:
    """Return the row of an object whose texts are Unicode."""
    place = f"{path}:{number}"
    if not isinstance(fields, dict):
        return BadRow(place, f"is a {type(fields).__name__}; use an object ({{...}})")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("unicode_escape").decode()
        return BadRow(place, f"has half of a character ({half[:_SHOWN_CHARS]})")
    return Row(str(path), number, fields)


@dataclass(frozen=True)
class _Unreadable:
    """A value of a Parquet file that Python has none for. No harm in fields that are not used."""

    problem: str

    def __repr__(self) -> str:
        return f"(can't be read: {self.problem})"


def _of_parquet(path: Path) -> Iterator[Row | BadRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(
            f"data {path}: a Parquet file needs pyarrow; pip install 'entrenar-py[finetune]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                columns = [_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    fields = zip(batch.schema.names, values, strict=True)
                    yield Row(str(path), number, {name: _given(one) for name, one in fields})
    except ArrowException as error:
        raise UsageError(
            f"data {path}: not a Parquet file, or a damaged one, after row {number} ({error})"
        ) from error


def _values(column: Any) -> list[Any]:
    """Return the values of a column; of some times, or of text that is not UTF-8, what is wrong."""
    try:
        return cast("list[Any]", column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return _Unreadable(str(error))


def _given(value: Any) -> Any:
    """Return a value without the fields that objects in it lack, which Arrow fills with null."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_given(one) for one in value]
    return value
