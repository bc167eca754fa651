"""What a killed run lost is computed from the ranks' files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.field import elastic
from tests.field.elastic import Life, Loss, State


def state(name: str) -> State:
    """Return a state with one tensor."""
    return (("weight", name),)


def life(rank: int, number: int, start: str, *steps: tuple[Sequence[int], str]) -> Life:
    """Return a life with these samples and states."""
    return Life(rank, number, state(start), tuple((tuple(ids), state(name)) for ids, name in steps))


CALM = [
    life(0, 0, "a", ([0], "b"), ([1], "c"), ([2], "d"), ([3], "e")),
    life(1, 0, "a", ([4], "b"), ([5], "c"), ([6], "d"), ([7], "e")),
]


def test_a_restart_from_a_snapshot() -> None:
    """Two steps are made again, one of them twice, since the snapshot's number is too small."""
    killed = [
        life(0, 0, "a", ([0], "b"), ([1], "c"), ([2], "d")),
        life(1, 0, "a", ([4], "b"), ([5], "c")),
        life(0, 1, "c", ([1], "x"), ([2], "y"), ([3], "z")),
        life(1, 1, "c", ([5], "x"), ([6], "y"), ([7], "z")),
    ]
    found = elastic.loss(CALM, killed, 3.5)
    assert found == Loss(
        num_steps=4,
        steps_back=1,
        steps_beyond=1,
        samples_lost=0,
        samples_again=2,
        steps_alone=0,
        same_weights=False,
        ranks_agree=True,
        pause_s=3.5,
    )


def test_ranks_that_go_on_alone() -> None:
    """The other rank's samples are lost while it is away, and its weights come from the first."""
    killed = [
        life(0, 0, "a", ([0], "b"), ([1], "x"), ([2], "y"), ([3], "z")),
        life(1, 0, "a", ([4], "b")),
        life(1, 1, "a", ([4], "z")),
    ]
    found = elastic.loss(CALM, killed, 0.0)
    assert (found.steps_back, found.steps_beyond, found.steps_alone) == (0, 0, 2)
    assert (found.samples_lost, found.samples_again) == (3, 1)
    assert found.ranks_agree
    assert not found.same_weights


def test_lives_are_read_from_the_files_of_ranks(tmp_path: Path) -> None:
    """The name has rank and life; a step has the samples of the passes that it sums."""
    weights = {"weights": {"weight": ["digest", "", "float32"]}}
    events = (
        {"kind": "start", "weights": {"weight": ["first", "", "float32"]}},
        *({"kind": "shard", "shard": number, "ids": [number]} for number in (0, 1)),
        {"kind": "update", **weights},
        *({"kind": "shard", "shard": number, "ids": [number + 2]} for number in (0, 1)),
        {"kind": "update", "summed": {"weight": [1]}, **weights},
    )
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (tmp_path / "00001-002.rank.jsonl").write_text(text)
    assert elastic.lives(tmp_path) == [life(1, 2, "first", ([0, 1], "digest"), ([3], "digest"))]
