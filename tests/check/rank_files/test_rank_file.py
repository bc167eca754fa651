"""One rank's file, read back: each line is parsed once, and invalid lines are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrenar_py.check.rank_files import rank_file
from entrenar_py.check.rank_files.rank_file import RankFile
from entrenar_py.shared.errors import TraceError, UsageError
from tests.fuzz import bad_contents


def test_each_line_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run's file is mostly JSON: parsing it is what reading costs."""
    path = tmp_path / "00000-000.rank.jsonl"
    path.write_bytes(bad_contents.rank_lines())
    parsed: list[bytes] = []

    def loads(line: bytes) -> object:
        parsed.append(line)
        return json.JSONDecoder().decode(line.decode())

    monkeypatch.setattr("entrenar_py.check.rank_files.rank_file.json_text.load", loads)
    rank_file.load(path)
    assert b"".join(parsed) == path.read_bytes()


def test_a_rank_that_has_closed(tmp_path: Path) -> None:
    """A rank has closed if it came to the end of training without an error."""
    for rank, problem in enumerate(("", "ValueError: no")):
        RankFile(tmp_path, {"rank": rank, "world_size": 3}).close(problem)
    training = RankFile(tmp_path, {"rank": 2, "world_size": 3})
    paths = sorted(tmp_path.glob("*.rank.jsonl"))
    assert [rank_file.is_closed(path) for path in paths] == [True, False, False]
    assert [rank_file.load(path).ended for path in paths] == [True, True, False]
    training.close()


def test_a_file_that_says_nonsense_of_pieces(tmp_path: Path) -> None:
    """Invalid pieces are refused, with the line."""
    file = RankFile(tmp_path, {"rank": 0, "world_size": 2})
    pieces = {"weight": [[3], [1], [2], [0, 1]]}
    file.note("layout", axes=[["dp", 2]], tied=[], pieces=pieces)
    file.close()
    (path,) = tmp_path.glob("*.rank.jsonl")
    with pytest.raises(TraceError, match=r"jsonl:2: layout can't be read"):
        rank_file.load(path)


def test_the_whole_job_comes_before_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ENTRENAR_RANK and ENTRENAR_WORLD_SIZE come before what a launcher sets in a replica group."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert rank_file.environment_rank() == (0, 1)
    for name, value in {"ENTRENAR_RANK": "1", "ENTRENAR_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert rank_file.environment_rank() == (1, 2)
    monkeypatch.delenv("ENTRENAR_WORLD_SIZE")
    with pytest.raises(UsageError, match="ENTRENAR_RANK=1 is set, and ENTRENAR_WORLD_SIZE isn't"):
        rank_file.environment_rank()
