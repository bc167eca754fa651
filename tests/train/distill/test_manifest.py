"""The list of a folder's shards: chained, appended by several, and never half a line."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.distill import manifest
from entrenar_py.train.distill.manifest import Claims, Entry, Writer
from tests.train.distill.made import FACTS


def entry(shard: int, **changes: object) -> Entry:
    made = Entry(shard=shard, rows=FACTS.rows[shard], bytes=10, digest=f"{shard:032x}")
    return replace(made, **changes)  # type: ignore[arg-type]


def written(folder: Path, *shards: int, part: tuple[int, int] | None = None) -> None:
    with closing(Claims(folder)) as claims:
        writer = Writer(folder, FACTS, part, claims)
        for shard in shards:
            writer.add(entry(shard))


def test_nothing_yet(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    (tmp_path / "manifest.jsonl").write_text('{"what":"head",')  # its writer was killed
    assert manifest.read(tmp_path) is None
    written(tmp_path, 1)
    found = manifest.read(tmp_path)
    assert found is not None
    assert (found.facts, found.missing) == (FACTS, [0, 2])


def test_the_last_line_of_a_shard_counts(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    written(tmp_path, 2)
    with closing(Claims(tmp_path)) as claims:
        Writer(tmp_path, FACTS, None, claims).add(entry(1, bytes=11))
        found = manifest.read(tmp_path)
        assert found is not None
        assert found.shards == {0: entry(0), 1: entry(1, bytes=11, remade=1), 2: entry(2)}
        # A list whose name comes earlier counts as well.
        Writer(tmp_path, FACTS, (1, 2), claims).add(entry(1, bytes=12))
    found = manifest.read(tmp_path)
    assert found is not None
    assert found.shards[1] == entry(1, bytes=12, remade=2)


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_that_was_not_finished_is_written_over(tmp_path: Path, cut: int) -> None:
    written(tmp_path, 0, 1)
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    found = manifest.read(tmp_path)
    assert found is not None
    assert set(found.shards) == {0}
    written(tmp_path, 2)
    found = manifest.read(tmp_path)
    assert found is not None
    assert set(found.shards) == {0, 2}


def test_a_list_that_grows_is_read_on(tmp_path: Path) -> None:
    """From where the last look ended; a list in its place, as of another copy, is read anew."""
    written(tmp_path, 0)
    path, lists = tmp_path / "manifest.jsonl", manifest.Lists(tmp_path)
    first = lists.read()
    assert first is not None
    assert set(first.shards) == {0}
    written(tmp_path, 1)
    grown = lists.read()
    assert grown is not None
    assert (set(first.shards), set(grown.shards)) == ({0}, {0, 1})
    path.unlink()
    assert lists.read() is None
    written(tmp_path, 2, 1, 0)
    other = lists.read()
    assert other is not None
    assert set(other.shards) == {0, 1, 2}
    path.write_bytes(path.read_bytes()[:-2] + b"x\n")
    assert lists.read() == other  # what was read counts until the list is read again
    with pytest.raises(UsageError, match="the line was edited"):
        manifest.read(tmp_path)


def test_parts_are_read_together(tmp_path: Path) -> None:
    written(tmp_path, 0, 2, part=(1, 2))
    written(tmp_path, 1, part=(2, 2))
    found = manifest.read(tmp_path)
    assert found is not None
    assert found.missing == []


@pytest.mark.parametrize(
    ("old", "new"), [(b'"rows":5', b'"rows":6'), (b'"shard":1', b'"shard":0'), (b"head", b"hat")]
)
def test_a_line_that_was_edited(tmp_path: Path, old: bytes, new: bytes) -> None:
    written(tmp_path, 0, 1)
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(UsageError, match=r"manifest.jsonl:\d: the line was edited, moved or"):
        manifest.read(tmp_path)


def test_lines_in_another_order(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    path = tmp_path / "manifest.jsonl"
    head, one, other = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + other + one)
    with pytest.raises(UsageError, match=r"manifest\.jsonl:2: the line was edited, moved"):
        manifest.read(tmp_path)


def test_shards_of_another_run(tmp_path: Path) -> None:
    written(tmp_path, 0)
    other = replace(FACTS, teacher="f" * 32, top_k=3)
    with (
        closing(Claims(tmp_path)) as claims,
        pytest.raises(UsageError, match=r"teacher 1+ and f+, top_k 4 and 3 here"),
    ):
        Writer(tmp_path, other, None, claims)
    (tmp_path / "manifest-1-of-2.jsonl").write_bytes(b"")
    assert manifest.read(tmp_path) is not None
    with closing(Claims(tmp_path / "..")) as claims:
        folder = tmp_path / "other"
        folder.mkdir()
        Writer(folder, other, (1, 2), claims)
    (folder / "manifest-1-of-2.jsonl").rename(tmp_path / "manifest-1-of-2.jsonl")
    with pytest.raises(
        UsageError, match=r"it describes different shards .*teacher 1+ and f+, top_k 4 and 3"
    ):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 9}, "version=9: the shards must have version 2"),
        ({"rows": [1, -1]}, "rows="),
        ({"rows": []}, "must have the same length"),
        ({"top_k": True}, "top_k=True"),
        ({"extra": 1}, "extra: this key is missing or unknown"),
        ({"day": 20261128}, "day=20261128: use type"),
        ({"day": "soon"}, "day='soon': is not a date"),
    ],
)
def test_facts_that_are_none(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    from entrenar_py.shared.trace import ledger

    line, _ = ledger.dump_line("", {"what": "head", **FACTS.to_dict(), **changes})
    (tmp_path / "manifest.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=told):
        manifest.read(tmp_path)


def test_a_record_is_json() -> None:
    assert type(FACTS).from_dict(json.loads(json.dumps(FACTS.to_dict()))) == FACTS


def test_the_day_stands_in_the_list_and_decides_nothing(tmp_path: Path) -> None:
    """Digest, comparison and files are those of shards that an earlier build made."""
    assert manifest.day_of(tmp_path) is None
    dated = replace(FACTS, day="2026-11-28")
    with closing(Claims(tmp_path)) as claims:
        Writer(tmp_path, dated, None, claims)
        Writer(tmp_path, FACTS, None, claims)  # an earlier build's, or of another day
    assert manifest.day_of(tmp_path) == "2026-11-28"
    assert (dated.digest, dated) == (FACTS.digest, FACTS)
    assert manifest.columns(dated, 0).equals(manifest.columns(FACTS, 0), check_metadata=True)
    assert "day" not in FACTS.to_dict()


def test_other_rows_of_another_day_name_the_date_to_set(tmp_path: Path) -> None:
    first, second = (
        replace(FACTS, data=data * 32, day=day)
        for data, day in (("3", "2026-11-28"), ("4", "2026-11-29"))
    )
    with closing(Claims(tmp_path)) as claims:
        Writer(tmp_path, first, None, claims)
        with pytest.raises(
            UsageError, match=r"set data\.date: 2026-11-28, .*\(here it is 2026-11-29"
        ):
            Writer(tmp_path, second, None, claims)
    assert "set data.date to the day" in manifest.advice_on_day(FACTS, "2026-11-29")
    assert manifest.advice_on_day(first, None) == manifest.advice_on_day(first, first.day) == ""
    line = (tmp_path / "manifest.jsonl").rename(tmp_path / "manifest-1-of-2.jsonl")
    with closing(Claims(tmp_path)) as claims:
        other = tmp_path / "other"
        other.mkdir()
        Writer(other, second, (2, 2), claims)
    (other / "manifest-2-of-2.jsonl").rename(line.with_name("manifest-2-of-2.jsonl"))
    with pytest.raises(UsageError, match=r"use one data\.date for all, or give each its own"):
        manifest.read(tmp_path)
