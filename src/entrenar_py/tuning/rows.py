"""Reads rows of JSONL and Parquet files, each with its place, and one problem for each bad row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.errors import UsageError

SUFFIXES = (".jsonl", ".parquet")
_BATCH_ROWS = 1024


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


def read(path: Path) -> Iterator[Row | BadRow]:
    """Yield the rows of the file at `path`, in order. Blank lines of JSONL are no rows.

    Raises UsageError if the file can't be read, or is of another kind.
    """
    readers = {".jsonl": _of_jsonl, ".parquet": _of_parquet}
    if path.suffix not in readers:
        raise UsageError(f"data {path}: use a file whose name ends with {' or '.join(SUFFIXES)}")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise UsageError(
            f"data {path}: can't be read ({error.strerror or error}); give a file that can be read"
        ) from error


def _of_jsonl(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(path, number, line)


def _row(path: Path, number: int, line: bytes) -> Row | BadRow:
    place = f"{path}:{number}"
    try:
        fields = json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        return BadRow(place, f"is not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return BadRow(place, f"is not JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return BadRow(place, "is nested too deeply")
    if not isinstance(fields, dict):
        return BadRow(place, f"is a {type(fields).__name__}; use an object ({{...}})")
    return Row(str(path), number, fields)


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
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, fields)
    except ArrowException as error:
        raise UsageError(
            f"data {path}: not a Parquet file, or a damaged one, after row {number} ({error})"
        ) from error
