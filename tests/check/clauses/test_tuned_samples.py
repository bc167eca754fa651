"""F-FT-006 to F-FT-008 on handwritten traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.shared.trace import Encoded, Event, Shard, Taught, Update, Weighed
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import undecided

CHAT = Encoded(
    sample=0,
    row=0,
    tokens=(1, 5, 6, 7, 2),
    predicted=(3, 4),
    stock_tokens=(1, 5, 6, 7, 2),
    completion=(3, 4),
    label=-1,
)
ROW = replace(CHAT, predicted=(), completion=(), label=0)


def shard(*ids: int, step: int = 0, weight: float = 2.0, epoch: int = 0) -> Shard:
    return traces.shard(step, epoch=epoch, ids=ids, weight=weight)


def update(step: int) -> Update:
    return traces.update(step)


def judged(check: str, *events: Event, **fields: Any) -> Any:
    subject = traces.scenario(**fields) if fields else None
    return traces.judge(check, [traces.hand_written(*events, subject=subject)])


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((CHAT, Taught(sample=0, positions=(2, 3)), shard(0)), ""),
        ((ROW, Taught(sample=0, positions=(4,)), shard(0, weight=0.3)), ""),
        (
            (CHAT, Taught(sample=0, positions=(3, 4)), shard(0)),
            "states [4], that predict no target",
        ),
        ((CHAT, Taught(sample=0, positions=(2, 3, 7)), shard(0)), "[7], beyond its last token"),
        ((CHAT, Taught(sample=0, positions=(2,)), shard(0)), "doesn't depend on states [3]"),
        ((ROW, Taught(sample=0, positions=(5,)), shard(0)), "[5], beyond its last token"),
        ((CHAT, Taught(sample=0, positions=(2, 3)), shard(0, weight=5.0)), "counts 5 tokens"),
        ((replace(CHAT, tokens=(1, 1, 5, 6, 7, 2)), shard(0)), "from position 1 on"),
        ((replace(CHAT, tokens=(1, 5, 6, 7)), shard(0)), "from position 4 on"),
        ((replace(CHAT, predicted=(2, 3, 4)), shard(0)), "predicts tokens that are not"),
    ],
)
def test_the_completion_counts_and_nothing_else(events: tuple[Event, ...], words: str) -> None:
    finding = judged("completion_tokens", *events)
    assert finding.verdict is (Verdict.FALSIFIED if words else Verdict.HELD), finding
    assert words in finding.reason


def test_a_loss_that_was_not_watched_is_open() -> None:
    assert judged("completion_tokens", CHAT, shard(0)).verdict is Verdict.INCONCLUSIVE
    assert judged("completion_tokens").verdict is Verdict.INCONCLUSIVE


def classes(*labels: int) -> list[Encoded]:
    return [replace(ROW, sample=place, row=place, label=one) for place, one in enumerate(labels)]


_ROOT = (4 / 3) ** 0.5
_MEAN = (3 * _ROOT + 2) / 4


@pytest.mark.parametrize(
    ("asked", "weights"),
    [
        ("none", (1.0, 1.0)),
        ("inverse", (2 / 3, 2.0)),  # 4 / 3 and 4 / 1, over their mean 2
        ("sqrt_inverse", (_ROOT / _MEAN, 2 / _MEAN)),
    ],
)
def test_weights_are_the_formulas(asked: str, weights: tuple[float, float]) -> None:
    samples = classes(0, 0, 0, 1)
    told = Weighed(asked=asked, weights=weights)
    right = shard(0, 3, weight=weights[0] + weights[1])
    assert judged("class_weights", *samples, told, right).verdict is Verdict.HELD
    off = replace(told, weights=(weights[0], weights[1] * 1.001))
    assert traces.broken(judged("class_weights", *samples, off)).element == 1
    wrong = shard(0, 3, weight=2 * weights[0])
    if asked != "none":
        assert "count" in traces.broken(judged("class_weights", *samples, told, wrong)).message
    assert judged("class_weights", *samples).verdict is Verdict.INCONCLUSIVE


def copies(*, rows: tuple[int, ...], labels: tuple[int, ...]) -> list[Encoded]:
    pairs = zip(rows, labels, strict=True)
    return [replace(ROW, sample=i, row=row, label=one) for i, (row, one) in enumerate(pairs)]


EVEN = copies(rows=(0, 1, 2, 2), labels=(0, 0, 1, 1))


def epochs(*steps: tuple[int, ...]) -> list[Event]:
    return [
        event
        for step, ids in enumerate(steps)
        for event in (shard(*ids, step=step, epoch=step // 2), update(step))
    ]


@pytest.mark.parametrize(
    ("samples", "steps", "words"),
    [
        (EVEN, ((0, 3), (1, 2), (2, 0)), ""),
        (EVEN, ((0, 3), (3, 2)), "(3,) are drawn again in epoch 0"),
        (EVEN, ((0, 3), (1,), (2, 0)), "epoch 0 ended without samples [2]"),
        (copies(rows=(0, 1, 2, 2), labels=(0, 0, 1, 0)), ((0,),), "{0: 3, 1: 1} samples"),
        (copies(rows=(0, 2, 2, 0), labels=(0, 1, 1, 0)), ((0,),), "rows [1] are in no sample"),
        ([*EVEN[:3], replace(EVEN[3], sample=2)], ((0,),), "not numbered from 0"),
    ],
)
def test_copies_are_samples(
    samples: list[Encoded], steps: tuple[tuple[int, ...], ...], words: str
) -> None:
    finding = judged(
        "oversampled",
        *samples,
        *epochs(*steps),
        num_samples=4,
        world_size=2,
        batch_size=2,
        num_steps=4,
    )
    assert finding.verdict is (Verdict.FALSIFIED if words else Verdict.HELD), finding
    assert words in finding.reason


def test_rows_without_copies_say_nothing() -> None:
    assert "no repeated row" in undecided(judged("oversampled", *classes(0, 1), *epochs((0, 1))))
