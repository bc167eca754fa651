"""Averages of the weights are recognised by how they move, and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.causes import weight_averages
from entrenar_py.shared.trace import Start, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import averaged_traces
from tests.check.clauses.averaged_traces import STEPS, Averaged, drawn, trained
from tests.check.clauses.micro_batch_traces import records


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
    events = [
        replace(event, extra={f"grads/{n}": one for n, one in records(drawn(event.step)).items()})
        if isinstance(event, Update)
        else event
        for event in trace.events
    ]
    assert weight_averages.of(replace(trace, events=tuple(events))) == {}


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
        (average, 3, "it is as it was before the first step: it was not restored"),
        (made_anew, 3, "the weights with which the run resumed: it was made anew from them"),
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
    assert "rank 1 keeps another average of the weights, ema, than rank 0" in tally.missing[0]
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
