"""The watch on four real ranks over gloo: a rank that drifts is named on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NAN = """
metadata: {version: "1.0.0", created: 2026-01-01, author: me, description: mine, references: [a]}
clauses:
  - {id: F-DP-003, name: finite, invariant: no NaN, tolerance: 0}
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the outcome of every training, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "nan.yaml").write_text(NAN)
    forked = HERE.parent / "command" / "forked.py"
    command = [sys.executable, str(forked), "4", str(HERE / "watched_ranks.py"), str(folder)]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_what_is_right(ranks: list[dict[str, Any]]) -> None:
    """DistributedDataParallel with running means of each rank's own, watched twice in 7 steps."""
    for one in (rank["right"] for rank in ranks):
        assert (one["found"], one["problem"]) == (None, None)
        assert one["watched"]["F-DP-001"] == [2, 2 * 3 * 6, ""]
        assert one["watched"]["F-DP-003"] == [2, 2 * 4 * 6, ""]
        assert one["watched"]["F-TI-004"] == [1, 4 * 6, ""]


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ("drifts", ["F-DP-001", 2, [1], "3.bias"]),
        ("nan", ["F-DP-003", 2, [3], "3.bias"]),
        ("not averaged", ["F-DP-001", 0, [0, 1, 2, 3], "0.weight"]),
        ("shards", None),
        ("copies of shards", None),
        ("a copy drifts", ["F-DP-001", 2, [1, 3], "2.bias"]),
    ],
)
def test_every_rank_finds_the_same(
    ranks: list[dict[str, Any]], run: str, found: list[Any] | None
) -> None:
    """All ranks stop with the same step, rank and tensor."""
    assert [rank[run]["problem"] for rank in ranks] == [None] * 4
    assert [rank[run]["found"] for rank in ranks] == [found] * 4


def test_shards_that_nobody_else_holds(ranks: list[dict[str, Any]]) -> None:
    """Shards on one rank are checked to be finite and to move, and noted as not compared."""
    for rank in ranks:
        steps, comparisons, note = rank["shards"]["watched"]["F-DP-001"]
        assert (steps, comparisons) == (0, 0)
        assert note == "16 tensors or shards are held by one rank alone, the first 0.weight"
        assert rank["shards"]["watched"]["F-DP-003"] == [4, 64, ""]
        assert rank["copies of shards"]["watched"]["F-DP-001"] == [4, 32, ""]


def test_ranks_that_watch_different_things(ranks: list[dict[str, Any]]) -> None:
    """Ranks with different arguments are all refused before they wait for each other."""
    assert "the ranks watch different things" in ranks[0]["unlike"]["problem"]
