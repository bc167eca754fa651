"""How many workers a run has by default, and what is said of the cores that are left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrenar_py.train.finetune import staffing


@pytest.mark.parametrize(
    ("num_cores", "num_shards", "number"),
    [(1, 4, 1), (2, 4, 2), (3, 4, 2), (4, 4, 4), (16, 4, 4), (7, 16, 6), (8, 1, 1)],
)
def test_no_worker_more_than_shortens_a_step(num_cores: int, num_shards: int, number: int) -> None:
    """Three workers compute four shards in two rounds, as two workers do."""
    assert staffing.busy(num_cores, num_shards) == number


def test_a_containers_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with the time of one core sees all cores of its machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for text, number in (("150000 100000", 1), ("300000 100000", 3), ("max 100000", 8), ("", 8)):
        (tmp_path / "cpu.max").write_text(text, encoding="ascii")
        monkeypatch.setattr(staffing, "_QUOTA", tmp_path / "cpu.max")
        assert staffing.num_cores() == number, text
    monkeypatch.setattr(staffing, "_QUOTA", tmp_path / "none")
    assert staffing.num_cores() == 8


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "said"),
    [
        (1, 2, "1 worker with one thread each, on 2 cores; why"),
        (4, 8, "4 workers with one thread each, on 8 cores; training.num_shards: 4 allows no "
         "more workers"),
        (2, 3, "2 workers with one thread each, on 3 cores; training.num_shards: 4 allows no "
         "more workers"),
        (2, 2, "2 workers with one thread each, on 2 cores"),
    ],
)  # fmt: skip
def test_cores_that_are_left_are_told(
    num_workers: int, num_cores: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would use them is named where there is something."""
    monkeypatch.setattr(staffing, "num_cores", lambda: num_cores)
    assert staffing.remark(num_workers, num_shards=4, limit="why") == said


def test_a_damaged_ledger_says_no_number_of_workers(tmp_path: Path) -> None:
    """It is told where it is opened to go on."""
    assert staffing.begun_with(tmp_path / "none") is None
    (tmp_path / "damaged").write_text("{}\n", encoding="utf-8")
    assert staffing.begun_with(tmp_path / "damaged") is None
