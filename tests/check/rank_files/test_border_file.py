"""A rank's file of borders is read as it was written, and refused if no rank wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, BorderFile
from entrenar_py.shared.errors import TraceError

USUAL = Border(order=1, step=0, micro_batch=0, phase="forward", kind="output", name="", digest="1")


def written(folder: Path, *borders: Border) -> Path:
    """Return the file of a rank with these borders."""
    file = BorderFile(folder, 3, {"torch": "2"})
    for border in borders:
        file.append(border)
    file.close()
    return folder / f"00003-000{border_file.SUFFIX}"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All fields, and arrays that several borders share."""
    numbers = np.array([1.5, -np.inf, np.nan], np.float32)
    fields = {"shape": (3,), "scale": 2.0, "fan_in": 7, "dtype": "float32", "where": "a.b"}
    shared = [
        Border(
            order=order,
            step=2,
            micro_batch=1,
            phase="backward",
            kind=border_file.OPERATION,
            name="mm",
            digest="9",
            call=1,
            part="x",
            numbers=numbers,
            text="mm(_, _)",
            site="a.py:3",
            **fields,  # type: ignore[arg-type]
        )
        for order in (4, 5)
    ]
    rank = border_file.load(written(tmp_path, USUAL, *shared))
    assert (rank.rank, rank.facts, len(rank.borders)) == (3, {"torch": "2"}, 3)
    for border, other in zip(shared, rank.borders[1:], strict=True):
        for name in Border.__slots__:
            left, right = getattr(border, name), getattr(other, name)
            assert (
                np.array_equal(left, right, equal_nan=True) if name == "numbers" else left == right
            )


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A process may have died while it wrote."""
    path = written(tmp_path, USUAL)
    path.write_text(path.read_text() + '{"order": 2, "st')
    assert len(border_file.load(path).borders) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "secret"},
        {"phase": "later"},
        {"order": "1"},
        {"step": True},
        {"name": 7},
        {"shape": "x"},
        {"numbers": "!", "format": "<f4"},
        {"numbers": "AAAA", "format": "O"},
        {"same": 99},
    ],
)
def test_a_line_that_no_rank_writes_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """The error names the line."""
    path = written(tmp_path, USUAL)
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps({**json.loads(line), **change})}\n")
    with pytest.raises(TraceError, match=r"borders\.jsonl:2: no border"):
        border_file.load(path)


@pytest.mark.parametrize("text", ["", "[]\n", '{"version": 2, "rank": 0, "facts": {}}\n'])
def test_a_file_without_a_header_is_refused(tmp_path: Path, text: str) -> None:
    """Also one of a later version."""
    path = tmp_path / f"00000{border_file.SUFFIX}"
    path.write_text(text)
    with pytest.raises(TraceError):
        border_file.load(path)
