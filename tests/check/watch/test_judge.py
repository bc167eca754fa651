"""Judge rows of numbers: ranks that differ, values that are not finite, tensors that don't move."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar_py.check.watch.judge import ALL, FINITENESS, IDENTITY, LIVENESS, Judge, Piece, Rows
from entrenar_py.shared.errors import WatchFinding


def piece(name: str, *, shard: int | None = None, dtype: str = "float32") -> Piece:
    """A tensor, whole or a shard of one."""
    return Piece(name, () if shard is None else ((0, shard),), (4,), dtype)


A, B = piece("a"), piece("b")


def judge(*ranks: list[Piece], check: str = IDENTITY, patience: int = 2) -> Judge:
    return Judge(ranks, {check: ALL[check]}, patience)


def rows(*ranks: list[int], flags: int = 0, live: int = 0) -> Rows:
    """Return rows with these low halves of digests, by rank; all else is equal."""
    found = np.zeros((len(ranks), len(ranks[0]), 4), np.int64)
    found[:, :, 0], found[:, :, 2], found[:, :, 3] = ranks, flags, live
    return found


def only(found: list[WatchFinding]) -> WatchFinding:
    """Return the only finding."""
    (one,) = found
    return one


def test_the_odd_one_is_named() -> None:
    """The rank that differs from all others is named, with the first tensor in which it does."""
    found = only(judge([A, B], [A, B], [A, B]).look(7, rows([1, 2], [1, 3], [1, 2])))
    assert (found.clause, found.step, found.ranks, found.tensor) == ("F-DP-001", 7, (1,), "b")
    assert str(found).startswith(
        "F-DP-001: step 7, tensor b: rank 1 holds different weights from ranks 0, 2 (rank 1: "
    )


def test_two_that_differ() -> None:
    """If there is no majority both ranks are named, and the number of tensors."""
    found = only(judge([A, B], [A, B]).look(0, rows([1, 2], [3, 4])))
    assert (found.ranks, found.tensor) == ((0, 1), "a")
    assert "ranks 0, 1 hold different weights" in str(found)
    assert "2 tensors in all" in str(found)


def test_shards_are_compared_with_copies_alone() -> None:
    """Four ranks hold two shards twice; a pipeline's stages hold different tensors."""
    low, high = piece("w", shard=0), piece("w", shard=1)
    ranks = [[low], [high], [low], [high]]
    sharded = judge(*ranks)
    assert not sharded.look(0, rows([1], [2], [1], [2]))
    assert only(sharded.look(1, rows([1], [2], [1], [3]))).ranks == (1, 3)
    (watched,) = sharded.watched()
    assert (watched.steps, watched.comparisons, watched.note) == (2, 4, "")
    stages = judge([A, B], [piece("c")], [A, B], [piece("c")])
    assert not stages.look(0, rows([1, 2], [3, 0], [1, 2], [3, 0]))
    assert only(stages.look(0, rows([1, 2], [3, 0], [1, 2], [4, 0]))).tensor == "c"


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        ([[A]], "there is only one process, and no other to compare it with"),
        (
            [[A, piece("w", shard=0)], [A, piece("w", shard=1)]],
            "2 tensors or shards are held by one rank alone, the first w",
        ),
    ],
)
def test_what_nobody_else_holds(ranks: list[list[Piece]], note: str) -> None:
    """A tensor on one rank is noted as not compared; with no comparison, no step is counted."""
    alone = judge(*ranks)
    assert not alone.look(0, rows(*([1] * len(one) for one in ranks)))
    (watched,) = alone.watched()
    assert watched.note == note
    assert watched.steps == watched.comparisons == int(len(ranks) > 1)


def test_what_is_not_finite() -> None:
    """NaN or Inf is reported for the ranks that have it, in formats that have such values."""
    numbers = [A, piece("n", dtype="int8")]
    watching = judge(numbers, numbers, check=FINITENESS)
    assert not watching.look(0, rows([1, 2], [1, 2]))
    broken = rows([1, 2], [1, 2])
    broken[1, :, 2] = 1
    found = only(watching.look(1, broken))
    assert (found.clause, found.ranks, found.tensor) == ("F-DP-003", (1,), "a")
    (watched,) = watching.watched()
    assert (watched.comparisons, watched.note) == (4, "tensors of dtype int8 are not checked")


def test_what_does_not_move() -> None:
    """A tensor that should move is reported after `patience` steps, and again after as many."""
    watching = judge([A, B], check=LIVENESS, patience=3)
    found = [watching.look(step, rows([1, step], live=1)) for step in range(8)]
    assert [bool(one) for one in found] == [False] * 3 + [True] + [False] * 2 + [True, False]
    dead = only(found[3])
    assert (dead.clause, dead.step, dead.tensor) == ("F-TI-004", 3, "a")
    assert watching.idle(0) == [0]


def test_what_need_not_move() -> None:
    """A tensor without a gradient, or that moved or had none in between, isn't reported."""
    watching = judge([A], check=LIVENESS, patience=2)
    assert not any(watching.look(step, rows([1])) for step in range(9))
    moving = judge([A], check=LIVENESS, patience=2)
    assert not any(moving.look(step, rows([step // 2], live=1)) for step in range(9))
    resting = judge([A], check=LIVENESS, patience=2)
    assert not any(resting.look(step, rows([1], live=step % 2)) for step in range(9))


def test_sparse_looks() -> None:
    """Patience counts steps, not looks."""
    watching = judge([A], check=LIVENESS, patience=30)
    found = [step for step in range(9, 90, 10) if watching.look(step, rows([1], live=1))]
    assert found == [39, 69]
