"""Rows of JSONL and Parquet, and the places of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.errors import UsageError
from entrenar_py.tuning import rows
from entrenar_py.tuning.rows import BadRow, Row


def test_rows_have_their_lines_as_places(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\r\n')
    assert list(rows.read(path)) == [
        Row(str(path), 1, {"a": 1}),
        Row(str(path), 3, {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": 1', "is not JSON (Expecting ',' delimiter at column 8)"),
        (b"[1]", "is a list; use an object ({...})"),
        (b'"text"', "is a str; use an object ({...})"),
        (b'{"a": "\xff"}', "is not UTF-8 (invalid start byte at byte 7)"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
    ids=["cut off", "a list", "a text", "Latin-1", "deep"],
)
def test_a_bad_row_is_told_and_the_next_one_read(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b'\n{"a": 2}\n')
    bad, good = rows.read(path)
    assert bad == BadRow(f"{path}:1", problem)
    assert isinstance(good, Row)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [1, None]}), path)
    assert [row.fields for row in rows.read(path) if isinstance(row, Row)] == [
        {"text": "a", "label": 1},
        {"text": "b", "label": None},
    ]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="not a Parquet file, or a damaged one, after row 0"):
        list(rows.read(path))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.csv", "use a file whose name ends with .jsonl or .parquet"),
        ("none.jsonl", r"can't be read \(No such file or directory\)"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        list(rows.read(tmp_path / name))
