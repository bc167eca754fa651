"""Rows of JSONL and Parquet, and the places of bad ones."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import rows
from entrenar_py.train.model.rows import BadRow, Row


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
        (b"[" * 100_000, "can't be read (nested more than 64 levels deep)"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "can't be read (nested more than 64 levels deep)"),
        (b'{"a": 1, "b": 2, "a": 1}', "can't be read ('a' appears 2 times)"),
        (b'{"a": %s}' % (b"9" * 5000), "can't be read (Exceeds the limit (4300 digits) for "),
        (b'{"a": "\\ud83d"}', "has half of a character (\\ud83d)"),
        (b'{"a": "\0"}', "is not JSON (Invalid control character at column 8)"),
        ('{"a": 1}'.encode("utf-16-le"), "is not JSON (Expecting property name enclosed in double"),
        (b'{"a": "\xed\xa0\xbd"}', "is not UTF-8 (invalid continuation byte at byte 7)"),
    ],
    ids=[
        *("cut off", "a list", "a text", "Latin-1", "brackets", "deep", "a name twice"),
        *("digits", "half a pair"),
        *("a control character", "UTF-16", "half a pair as bytes"),
    ],
)
def test_a_bad_row_is_told_and_the_next_one_read(tmp_path: Path, line: bytes, problem: str) -> None:
    content = b'{"a": 1}\n' + line + b'\n{"a": 2}\n'
    (tmp_path / "rows.jsonl").write_bytes(content)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    for path in (tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"):
        _, bad, good = rows.read(path)
        assert isinstance(bad, BadRow)
        assert bad.place == f"{path}:2"
        assert bad.problem.startswith(problem)
        assert isinstance(good, Row)


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (b"[1]", "is a list; use an object ({...})"),
        (
            b'{"a": %s}' % (b"[" * 10**5 + b"]" * 10**5),
            "can't be read (nested more than 64 levels ",
        ),
        (b'{"a": {"b": %s}}' % (b"[" * 65 + b"]" * 65), "can't be read (nested more than 64 "),
        (b'{"a": %s, "]": "}"}' % (b"9" * 5000), "can't be read (Exceeds the limit (4300 digits)"),
        (b'{"a": "\\ud83d"}', "has half of a character (\\ud83d)"),
        (b'{"a": 1, "a": 1}', "can't be read ('a' appears 2 times)"),
    ],
    ids=["a list", "brackets", "deep", "digits", "half a pair", "a name twice"],
)
def test_a_bad_row_of_a_list_is_told_and_the_next_one_read(
    tmp_path: Path, element: bytes, problem: str
) -> None:
    """A list has its bad rows as lines have them: each alone, with its number."""
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n' + element + b' , {"a": 2}]\n')
    _, bad, good = rows.read(path)
    assert isinstance(bad, BadRow)
    assert bad.place == f"{path}:2"
    assert bad.problem.startswith(problem)
    assert isinstance(good, Row)
    path.write_bytes(b"[ ]")
    assert list(rows.read(path)) == []


def test_a_row_of_any_depth_is_read_or_told(tmp_path: Path) -> None:
    """What is read can be copied and written, wherever the stack would end; else it is told."""
    depths = [*range(1, 100), *range(300, 1100, 2)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join('{"a": ' * n + "1" + "}" * n + "\n" for n in depths), "utf-8")
    found = list(rows.read(path))
    read = [row.number for row in found if isinstance(row, Row)]
    assert read == list(range(1, 65))
    for row in found[:64]:
        assert isinstance(row, Row)
        assert json.loads(json.dumps(copy.deepcopy(row.fields), indent=1)) == row.fields


def test_a_row_of_too_many_bytes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines and elements have a bound, and the next one is read after it."""
    monkeypatch.setattr(rows, "ROW_BYTES_MAX", 100)
    monkeypatch.setattr(rows, "_SKIPPED_BYTES", 7)
    for name, form in (("a.jsonl", b"%s\n%s\n%s"), ("a.json", b"[%s,%s,%s]")):
        path = tmp_path / name
        path.write_bytes(form % (b'{"a": "%s"}' % (b"k" * 91), b'{"a": "%s"}' % (b"k" * 92), b"{}"))
        good, bad, last = rows.read(path)
        assert isinstance(good, Row)
        assert isinstance(last, Row)
        assert str(bad) == f"{path}:2: has 101 bytes or more; at most 100 are read"
        assert last.place == f"{path}:3"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [1, None]}), path)
    assert [row.fields for row in rows.read(path) if isinstance(row, Row)] == [
        {"text": "a", "label": 1},
        {"text": "b"},  # a null column is absent: a union of sets of rows has many
    ]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="not a Parquet file, or a damaged one, after row 0"):
        list(rows.read(path))


def test_objects_in_parquet_have_the_fields_that_they_were_given(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [[{"name": "w", "arguments": {"city": "Rome"}}], [{"arguments": {"days": [1, None]}}]]
    parquet.write_table(pyarrow.table({"calls": calls}), tmp_path / "rows.parquet")
    found = list(rows.read(tmp_path / "rows.parquet"))
    assert [row.fields["calls"] for row in found if isinstance(row, Row)] == calls


def test_values_that_python_has_none_for_are_told_where_they_are_used(tmp_path: Path) -> None:
    """A column of times that are finer, or later, than Python's is no harm to the others."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    times = pyarrow.array([1_234_567_891, 0], pyarrow.timestamp("ns"))
    days = pyarrow.array([10**8, 0], pyarrow.date32())
    (offsets,) = pyarrow.array([0, 3, 6], pyarrow.int32()).buffers()[1:]
    texts = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"ab\xffdef"))
    table = pyarrow.table({"text": ["ls", "cat"], "time": times, "day": days, "bad": texts})
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = list(rows.read(tmp_path / "rows.parquet"))
    first, second = (row.fields for row in found if isinstance(row, Row))
    assert (first["text"], second["text"], second["bad"]) == ("ls", "cat", "def")
    assert repr(first["bad"]).startswith("(can't be read: 'utf-8' codec can't decode byte 0xff")
    assert "out of range" in repr(first["day"])


def _parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_null_columns_of_a_union_are_absent(tmp_path: Path) -> None:
    """Sets of rows that were put together have each other's columns, without values."""
    union = {"text": ["a", None], "messages": [None, [{"role": "user", "content": "b"}]]}
    found = list(rows.read(_parquet(tmp_path / "rows.parquet", union)))
    assert [row.fields for row in found if isinstance(row, Row)] == [
        {"text": "a"},
        {"messages": [{"role": "user", "content": "b"}]},
    ]


def test_a_column_whose_name_is_damaged(tmp_path: Path) -> None:
    """No row can have such a name, so the file is refused, and not by a traceback."""
    path = _parquet(tmp_path / "rows.parquet", {"textual": ["a"]})
    path.write_bytes(path.read_bytes().replace(b"textual", b"text\xffal"))
    with pytest.raises(UsageError, match=r"rows.parquet: the name of a column is not UTF-8"):
        list(rows.read(path))


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    """One of them would vanish."""
    path = _parquet(tmp_path / "rows.parquet", {"text": ["a"], "texu": ["b"]})
    path.write_bytes(path.read_bytes().replace(b"texu", b"text"))
    with pytest.raises(UsageError, match="2 columns are called 'text'; rename all but one"):
        list(rows.read(path))


def test_times_in_a_zone_that_is_unknown(tmp_path: Path) -> None:
    """A time zone that this machine doesn't know is no harm to other columns."""
    pyarrow = pytest.importorskip("pyarrow")
    times = pyarrow.array([0], pyarrow.timestamp("s", tz="Nowhere/Atlantis"))
    (row,) = rows.read(_parquet(tmp_path / "rows.parquet", {"text": ["a"], "time": times}))
    assert isinstance(row, Row)
    assert row.fields["text"] == "a"
    assert repr(row.fields["time"]).startswith("(can't be read: ")


def test_large_rows_are_decoded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory is bounded by bytes, and rows keep their numbers."""
    monkeypatch.setattr(rows, "_BATCH_BYTES", 1000)
    path = _parquet(tmp_path / "rows.parquet", {"text": [str(n) * 99 for n in range(10, 60)]})
    found = list(rows.read(path))
    assert [row.place for row in found] == [f"{path}:{n}" for n in range(1, 51)]
    monkeypatch.setattr(rows, "ROW_BYTES_MAX", 100)
    monkeypatch.setattr(rows, "_BATCH_BYTES", 10**6)
    assert str(next(rows.read(path))) == f"{path}:1: has 202 bytes or more; at most 100 are read"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.csv", "use a file with a name that ends with .jsonl "),
        ("rows.csv.gz", "use a file with a name that ends with .jsonl "),
        ("rows-*.jsonl", "no file fits the pattern"),
        (".", "is a folder; name its files, such as"),
        ("none.jsonl", r"can't be read \(No such file or directory\)"),
        (f"{'a' * 300}.jsonl", r"can't be read \(File name too long\)"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        list(rows.read(tmp_path / name))


ROWS = [{"text": "ls \U0001f600"}, {"text": "a\nb"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS, indent=2, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES),
        ("rows.JSONL", LINES),
        ("rows.ndjson", LINES),
        ("rows.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n")),
        ("rows.json", LINES),
        ("rows.json", LIST),
        ("rows.jsonl", LIST),
        ("rows.jsonl", LIST.replace(b"\n", b"")),
        ("rows.jsonl.gz", gzip.compress(b"\n" + LIST, mtime=0)),
        ("rows.jsonl", LINES.replace(b"\n", b"\n\xef\xbb\xbf")),
        ("rows.json", b"\xef\xbb\xbf" + LIST),
        ("rows.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("rows.json.gz", gzip.compress(LIST, mtime=0)),
    ],
)
def test_files_of_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = list(rows.read(tmp_path / name))
    assert [row.fields for row in found if isinstance(row, Row)] == ROWS
    assert [row.place for row in found] == [f"{tmp_path / name}:{number}" for number in (1, 2)]


def test_a_pattern_names_files_in_order(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        (tmp_path / f"part-{number:05}.jsonl").write_text(f'{{"a": {number}}}\n', "utf-8")
    found = list(rows.read(tmp_path / "part-*.jsonl"))
    assert [row.fields["a"] for row in found if isinstance(row, Row)] == [1, 2, 10]


@pytest.mark.parametrize("pattern", ["[v1]/*/rows.jsonl", "[v1]/**/*.jsonl", "[v1]/?/r*.jsonl"])
def test_a_pattern_may_name_folders(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ba":
        (tmp_path / "[v1]" / name).mkdir(parents=True)
        (tmp_path / "[v1]" / name / "rows.jsonl").write_text(f'{{"a": "{name}"}}\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / pattern, Path(pattern)):
        found = list(rows.read(path))
        assert [row.fields["a"] for row in found if isinstance(row, Row)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.json", b'{\n"data": []}', "or one object per line; its first line is not JSON"),
        (
            "rows.json",
            LIST.decode().encode("utf-16"),
            "one object per line; its first line is not UTF",
        ),
        (
            "rows.jsonl",
            b'[\n{"a": 1},\n{"a": 2},\n]',
            r"as a list, and is not JSON at row 3 \(.*: line ",
        ),
        ("rows.json", b'[{"a": 1},]', "is not JSON"),
        ("rows.json", b"[" * 100_000, "is not JSON at row 1 \\(Expecting ',' delimiter"),
        ("rows.jsonl.gz", LINES, "can't be read \\(Not a gzipped file"),
        (
            "rows.jsonl.gz",
            gzip.compress(LINES, mtime=0)[:-9],
            "can't be read \\(Compressed file ended",
        ),
    ],
)
def test_a_file_that_is_damaged(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        list(rows.read(tmp_path / name))
