"""Averages of the weights are recognised by how they move, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.causes import weight_averages
from entrenar_py.shared.trace import Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.check.clauses import averaged_traces
from tests.check.clauses.averaged_traces import STEPS, Averaged, drawn, trained
from tests.traces import altered, broken, records, values


def test_an_average_is_known_by_its_shares() -> None:
    """The share of each move but the last one, which no record is after."""
    ((holder, shares),) = weight_averages.of(trained(Averaged())).items()
    assert holder == ("ema", 0)
    due = {step: averaged_traces.shares(step + 1) for step in range(STEPS - 1)}
    assert shares == pytest.approx(due, rel=1e-3)


def still(_: int) -> float:
    return 0.0


def copied(_: int) -> float:
    return 1.0


@pytest.mark.parametrize("share", [still, copied])
def test_what_is_no_average(share: Callable[[int], float]) -> None:
    """A reference model stays, and a snapshot is what the weights were: neither is compared."""
    assert weight_averages.of(trained(Averaged(share=share))) == {}


def test_a_list_that_moves_otherwise_is_no_average() -> None:
    """A list of gradients has the shapes of the weights, too."""
    trace = trained(Averaged())
    assert (
        weight_averages.of(
            altered(
                trace,
                Update,
                {},
                extra=lambda event: {
                    f"grads/{n}": one for n, one in records(drawn(event.step)).items()
                },
            )
        )
        == {}
    )


def count(rank: Averaged) -> None:
    rank.count = 0


def average(rank: Averaged) -> None:
    rank.average = drawn(99)


def made_anew(rank: Averaged) -> None:
    rank.average = dict(rank.weights)


def nothing(_: Averaged) -> None:
    """Lose nothing."""


@pytest.mark.parametrize(
    ("lose", "step", "words"),
    [
        (
            count,
            4,
            "after step 3 it moves 0.9 of the way to the weights, not 0.25, as it did after",
        ),
        (average, 3, "it has its value from before the first step: it was not restored"),
        (made_anew, 3, "the weights with which the run resumed: it was started again from them"),
    ],
)
def test_a_resume_that_loses_a_part_of_an_average(
    lose: Callable[[Averaged], None], step: int, words: str
) -> None:
    """The average after the resume is not that of the run without stops."""
    tally = Tally("F-TI-003")
    weight_averages.compare_resumed(
        tally, trained(Averaged()), averaged_traces.resumed(Averaged(), 3, lose)
    )
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.tensor) == (step, "ema/a")
    assert words in tally.broken.message


def test_an_average_that_is_restored() -> None:
    """It is compared in each step after the resume."""
    tally = Tally("F-TI-003")
    weight_averages.compare_resumed(
        tally, trained(Averaged()), averaged_traces.resumed(Averaged(), 3, nothing)
    )
    assert (tally.broken, tally.compared) == (None, 2 * (STEPS - 3))


def stopped(rank: Averaged) -> None:
    rank.share = still
    rank.average = drawn(97)


def test_a_copy_that_does_not_move_after_the_resume() -> None:
    """It may be what was loaded, and not the average: no error."""
    tally = Tally("F-TI-003")
    weight_averages.compare_resumed(
        tally, trained(Averaged()), averaged_traces.resumed(Averaged(), 3, stopped)
    )
    assert tally.broken is None
    assert tally.notes == ["ema, an average of the weights, was not seen after the resume"]


def test_a_snapshot_need_not_be_restored() -> None:
    """A list that is no average is not compared over a resume."""
    tally = Tally("F-TI-003")
    weight_averages.compare_resumed(
        tally,
        trained(Averaged(share=copied)),
        averaged_traces.resumed(Averaged(share=copied), 3, average),
    )
    assert tally.compared == 0


def test_ranks_that_keep_other_averages() -> None:
    """It is open, since one rank's may be the only one that is used; declared, it is an error."""
    trace = trained(Averaged(), Averaged(rank=1, average=drawn(98)))
    tally = Tally("F-DP-001")
    weight_averages.compare_ranks(tally, trace)
    assert tally.broken is None
    assert "rank 1 keeps a different average of the weights, ema, than rank 0" in tally.missing[0]
    tally = Tally("F-DP-001")
    weight_averages.compare_ranks(tally, averaged_traces.declared(trace))
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.rank) == (0, 1)


@pytest.mark.parametrize("share", [averaged_traces.shares, still])
def test_ranks_whose_averages_agree_or_rest(share: Callable[[int], float]) -> None:
    """An average that only rank 0 moves is no other average."""
    tally = Tally("F-DP-001")
    weight_averages.compare_ranks(tally, trained(Averaged(), Averaged(rank=1, share=share)))
    assert (tally.broken, tally.missing) == (None, [])
    assert bool(tally.compared) is (share is averaged_traces.shares)


def test_statistics_in_averages_are_those_of_each_rank() -> None:
    """An average of the whole state follows the statistics of a rank's own batches, too."""
    trace = trained(Averaged(), Averaged(rank=1))
    held = (
        replace(event, extra={**event.extra, "ema/1.running_mean": one})
        if isinstance(event, Update) and (one := records(drawn(event.rank))["b"])
        else event
        for event in trace.events
    )
    tally = Tally("F-DP-001")
    weight_averages.compare_ranks(tally, replace(trace, events=(*held,)))
    assert (tally.broken, tally.missing) == (None, [])
    assert tally.compared


def test_a_frozen_tensor_that_follows_a_trained_one() -> None:
    """An average within the model, as AveragedModel keeps it: nothing else moves so."""
    trace = trained(Averaged())
    held = [event for event in trace.events if isinstance(event, Start | Update)]
    within = [
        replace(event, weights={**event.weights, n.replace("ema/", "ema.module."): one})
        for event in held
        for n, one in event.extra.items()
        if n == "ema/a"
    ]
    start, *updates = within
    assert isinstance(start, Start)
    found = weight_averages.follow_others(
        start, [one for one in updates if isinstance(one, Update)], ["ema.module.a"]
    )
    assert found == {"ema.module.a"}
    noisy = [
        replace(one, weights={**one.weights, **records({"ema.module.a": np.full(12, one.step)})})
        for one in updates
        if isinstance(one, Update)
    ]
    assert weight_averages.follow_others(start, noisy, ["ema.module.a"]) == set()


# --- frozen modules -------------------------------------------------------------------------------
# Statistics that move in a module of which nothing trains are found; others are left alone.


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
        traces.update(step, loss=None, weights={"a": values(step + 1.0)}, extra=extra(step + 1))
        for step in range(len(weights) - 1)
    ]
    middle = [start(resumed)] if resumed else []
    return averaged_traces.trace_of([start(0), *updates[:resumed], *middle, *updates[resumed:]], 1)


def judged(trace: Trace) -> Tally:
    tally = Tally("F-TI-004")
    weight_averages.compare_modules(tally, trace)
    return tally


def test_a_teacher_in_training_mode() -> None:
    """Its statistics move, and it has no tensor that trains."""
    found = broken(judged(run([1, 1, 1], [0, 0, 0.5])))
    assert (found.step, found.rank, found.tensor) == (1, 0, MEAN)
    assert "running statistics of teacher moved" in found.message


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


@pytest.mark.parametrize("own", [{}, {"norm/weight": values(1.0)}])
def test_a_module_that_only_normalises(own: Tensors) -> None:
    """A running normaliser of inputs trains nothing, and its statistics may move."""
    means = [{"norm/running_mean": values(mean), **own} for mean in (0.0, 1.0, 2.0)]
    start = Start(step=0, rank=0, weights={"a": values(0.0)}, extra=means[0])
    updates = [traces.update(n, loss=None, extra=extra) for n, extra in enumerate(means[1:])]
    tally = judged(averaged_traces.trace_of([start, *updates], 1))
    assert (tally.broken, tally.missing) == (None, [])


def test_a_copy_of_the_model_may_be_renewed_later() -> None:
    """A target network is not wrong if it was only not renewed yet."""
    tally = judged(run([1, 1, 1], [0, 0.5, 0.7], name="teacher/a"))
    assert tally.broken is None
    assert "or run until the script renews it" in tally.missing[0]


MASKS = "masks of teacher/num_masks"


def test_dropout_of_a_teacher() -> None:
    """It draws masks, whether it has the model's form or not; none, or on its way, it is right."""
    for name in (WEIGHT, "teacher/a"):
        found = broken(judged(renamed(run([1, 1, 1], [0, 2, 4], name=name))))
        assert (found.step, found.rank, found.tensor) == (0, 0, "teacher")
        assert found.message.startswith("dropout of teacher draws masks, and no part of it trains")
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


@pytest.mark.parametrize(("means", "is_wrong"), [([0, 0, 0.5], True), ([0, 0, 0], False)])
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
