"""Epochs follow from samples that are drawn once each, or they stay unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from entrenar_py.check.rank_files import epochs
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Shard, Start


def drawn(steps: Sequence[Sequence[int]], begin: int = 0) -> list[Start | Shard]:
    """Return the events of a rank that draws these samples, from step `begin` on."""
    shards = [
        Shard(
            step=begin + number,
            epoch=0,
            rank=0,
            shard=0,
            ids=tuple(ids),
            loss_sum=None,
            weight=float(len(ids)),
            finite=True,
        )
        for number, ids in enumerate(steps)
    ]
    return [Start(step=begin, rank=0, weights={}), *shards]


def found(steps: Sequence[Sequence[int]], size: int | None, begin: int = 0) -> list[int] | None:
    """Return the epoch of each step, None if they are unknown."""
    events = epochs.derived(drawn(steps, begin), None if size is None else range(size))
    if events is None:
        return None
    return [event.epoch for event in events if isinstance(event, Shard)]


@pytest.mark.parametrize("size", [4, None])
def test_epochs_that_are_complete(size: int | None) -> None:
    """An epoch begins when all samples were drawn, those that are known or those of the run."""
    assert found([[0, 1], [2, 3], [3, 0], [1, 2], [2, 0]], size) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("steps", "size", "begin"),
    [
        pytest.param([[0, 1], [2, 0]], 4, 0, id="an error, or a cut epoch"),
        pytest.param([[0, 1, 2], [3, 0, 1]], 4, 0, id="a batch of two epochs, or padded"),
        pytest.param([[0, 1], [0, 1]], 3, 0, id="a rest that is dropped, or lost"),
        pytest.param([[0, 0]], 4, 0, id="twice in a step"),
        pytest.param([[2, 3], [0, 1]], 4, 2, id="a resume in the middle of an epoch"),
    ],
)
def test_epochs_that_are_not(steps: list[list[int]], size: int, begin: int) -> None:
    """Where a sample that comes again may be wrong, no epoch is made up."""
    assert found(steps, size, begin) is None


def goes_on(steps: Sequence[Sequence[int]], header: dict[str, Any]) -> bool:
    """Return whether the steps, of four samples, are taken for one pass that never ends."""
    rank = RankTrace(life=0, header=header, events=tuple(drawn(steps)), ended=True, problem="")
    return epochs.go_on([rank], rank.events, range(4))


def test_one_pass_of_a_loader_may_go_on_for_ever() -> None:
    """It does if all samples have come before one comes again, and if a loader's indices are known.

    A script that reports samples by itself may have padded its last batch.
    """
    seen = {"samples": "index"}
    assert goes_on([[0, 1, 2], [3, 1, 0]], seen)
    assert not goes_on([[0, 1, 2], [3]], seen)
    assert not goes_on([[0, 1, 2], [1, 0]], seen)
    assert not goes_on([[0, 1, 2], [3, 1, 0]], {})
