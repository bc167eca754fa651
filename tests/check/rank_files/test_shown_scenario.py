"""The scenario of a run, as its ranks' files show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check.rank_files import rank_trace, shown_scenario
from entrenar_py.check.rank_files.rank_file import RankFile
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Shard, Update
from tests.check.clauses.traces import values


def passes(*, kept: tuple[int, ...], step: int = 0) -> list[Event]:
    """Return a step of two passes of four samples, of which those `kept` were applied."""
    shards = [
        Shard(
            step=step,
            epoch=0,
            rank=0,
            shard=number,
            ids=tuple(range(4 * number, 4 * number + 4)),
            loss_sum=1.0,
            weight=4.0,
            finite=True,
            gradient={"w": values(1.0)},
        )
        for number in range(2)
    ]
    update = Update(
        step=step,
        rank=0,
        loss=None,
        weight=4.0,
        learning_rate=0.1,
        finite=True,
        weights={},
        gradient={"w": values(1.0)},
        summed={} if kept == (0, 1) else {"w": kept},
    )
    return [*shards, update]


@pytest.mark.parametrize(("kept", "size"), [((0, 1), 8), ((1,), 4)], ids=["added", "skipped"])
def test_a_batch_that_is_skipped_counts_in_no_step(kept: tuple[int, ...], size: int) -> None:
    """Else a script that leaves a batch out seems to have a batch of two."""
    (first, _, update) = passes(kept=(0, 1), step=1)
    scenario, _ = shown_scenario.of([], [*passes(kept=kept), first, update], 1)
    assert scenario.batch_size == size


def test_passes_that_each_step_drops_are_a_part_of_it() -> None:
    """The inner loop of a meta-learner has samples of its own."""
    events = [*passes(kept=(1,)), *passes(kept=(1,), step=1)]
    assert shown_scenario.of([], events, 1)[0].batch_size == 8


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        ({}, ""),
        ({"joined": True}, "micro-batch"),
        ({"joined": True, "loss_over": "batch"}, "batch"),
    ],
    ids=["plain", "joined", "declared"],
)
def test_batches_count_as_they_are_where_ranks_join(
    header: dict[str, object], meaning: str
) -> None:
    """torch's `Join` takes the mean over ranks; a line may mean something else."""
    whole = {"rank": 0, "world_size": 1, **header}
    ranks = [RankTrace(life=0, header=whole, events=(), ended=True, problem="")]
    _, traits = shown_scenario.of(ranks, passes(kept=(0, 1)), 1)
    assert traits.loss_over == meaning


def test_compression_begins_with_the_first_rank_that_compresses(tmp_path: Path) -> None:
    """Until then gradients are sent as they are."""
    for rank, step in enumerate((3, 2)):
        file = RankFile(tmp_path, {"rank": rank, "world_size": 2})
        file.note("compressed", to="powerSGD_hook", step=step)
        file.close("")
    ranks = [rank_trace.load(path) for path in sorted(tmp_path.glob("*.rank.jsonl"))]
    _, traits = shown_scenario.of(ranks, passes(kept=(0, 1)), 2)
    assert (traits.compressed, traits.compressed_from) == ("powerSGD_hook", 2)
