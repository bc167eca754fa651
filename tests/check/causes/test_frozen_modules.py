"""Statistics that move in a module of which nothing trains are found; others are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from entrenar_py.check.causes import frozen_modules
from entrenar_py.shared.trace import Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import averaged_traces
from tests.check.clauses.traces import values

WEIGHT, MEAN = "teacher/0.weight", "teacher/1.running_mean"


def run(
    weights: Sequence[float], means: Sequence[float], *, name: str = WEIGHT, resumed: int = 0
) -> Trace:
    """Return a run with these values in a module, before the first step and after each."""

    def extra(at: int) -> Tensors:
        return {name: values(weights[at]), MEAN: values(means[at])}

    def start(step: int) -> Start:
        held = {"a": values(0.0)}
        return Start(step=step, rank=0, weights=held, extra=extra(step), resumed=step > 0)

    updates = [
        Update(
            step=step,
            rank=0,
            loss=None,
            weight=1.0,
            learning_rate=0.1,
            finite=True,
            weights={"a": values(step + 1.0)},
            extra=extra(step + 1),
        )
        for step in range(len(weights) - 1)
    ]
    middle = [start(resumed)] if resumed else []
    return averaged_traces.trace_of([start(0), *updates[:resumed], *middle, *updates[resumed:]], 1)


def judged(trace: Trace) -> Tally:
    tally = Tally("F-TI-004")
    frozen_modules.compare(tally, trace)
    return tally


def test_a_teacher_in_training_mode() -> None:
    """Its statistics move, and it has no tensor that trains."""
    broken = judged(run([1, 1, 1], [0, 0, 0.5])).broken
    assert broken is not None
    assert (broken.step, broken.rank, broken.tensor) == (1, 0, MEAN)
    assert "running statistics of teacher moved" in broken.message


@pytest.mark.parametrize(
    ("trace", "compared"),
    [
        (run([1, 1, 1], [0, 0, 0]), 1),
        (run([1, 2, 3], [0, 0.5, 0.7]), 0),  # something trains it, or renews it
        (run([1, 1, 1], [0, 0, 0], resumed=1), 1),
    ],
)
def test_what_rests_or_trains_is_left_alone(trace: Trace, compared: int) -> None:
    """Statistics are compared within a life of a rank."""
    tally = judged(trace)
    assert (tally.broken, tally.missing, tally.compared) == (None, [], compared)


def test_a_copy_of_the_model_may_be_renewed_later() -> None:
    """A target network is not wrong if it was only not renewed yet."""
    tally = judged(run([1, 1, 1], [0, 0.5, 0.7], name="teacher/a"))
    assert tally.broken is None
    assert "or run until the script renews it" in tally.missing[0]


MASKS = "masks of teacher/num_masks"


def test_dropout_of_a_teacher() -> None:
    """It draws masks, whether it has the model's form or not; none, or on its way, it is right."""
    for name in (WEIGHT, "teacher/a"):
        broken = judged(renamed(run([1, 1, 1], [0, 2, 4], name=name))).broken
        assert broken is not None
        assert (broken.step, broken.rank, broken.tensor) == (0, 0, "teacher")
        assert broken.message.startswith("dropout of teacher draws masks, and nothing of it trains")
    still = judged(renamed(run([1, 1, 1], [0, 0, 0])))
    moving = judged(renamed(run([1, 2, 3], [0, 2, 4])))
    assert (still.broken, still.compared) == (None, 1)
    assert (moving.broken, moving.compared) == (None, 0)


def renamed(trace: Trace) -> Trace:
    """Return a run whose statistics are the numbers of masks."""

    def changed(event: Start | Update) -> Start | Update:
        extra = {MASKS if name == MEAN else name: one for name, one in event.extra.items()}
        return replace(event, extra=extra)

    events = (changed(e) if isinstance(e, Start | Update) else e for e in trace.events)
    return replace(trace, events=tuple(events))


def of_rank(rank: int, trace: Trace) -> Sequence[Start | Update]:
    """Return what a rank of another number records."""
    return [replace(e, rank=rank) for e in trace.events if isinstance(e, Start | Update)]


@pytest.mark.parametrize(
    ("means", "is_wrong"),
    [([0, 0, 0.5], True), ([0, 0, 0], False)],
)
def test_an_average_that_one_rank_moves_and_another_uses(
    means: Sequence[float], is_wrong: bool
) -> None:
    """Its own keeps the first weights, and spoils what all validate. One that rests is unused."""
    moving = of_rank(0, run([1, 2, 3], [0, 0.5, 0.7], name="average/a"))
    resting = of_rank(1, run([1, 1, 1], means, name="average/a"))
    renamed = [
        replace(e, extra={n.replace("teacher", "average"): r for n, r in e.extra.items()})
        for e in (*moving, *resting)
    ]
    broken = judged(averaged_traces.trace_of(renamed, 2)).broken
    assert (broken is not None) is is_wrong
    if broken is not None:
        assert (broken.step, broken.rank) == (1, 1)
        assert "rank 0 moves the parameters of average, and rank 1 doesn't" in broken.message
