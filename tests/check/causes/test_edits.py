"""Weights that are changed between two steps: errors are named, benign changes are noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import edits
from entrenar_py.shared.trace import Update
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.check.clauses.averaged_traces import Averaged, drawn, trained
from tests.check.clauses.micro_batch_traces import Vectors
from tests.traces import broken

Edit = Callable[[Averaged, int], Vectors | None]


def judged(*ranks: Averaged, swapped: Sequence[int] = (), **traits: Any) -> Tally:
    """Return what is found of a run with evaluations of other weights before steps `swapped`."""
    trace = traces.was(trained(*ranks), starts="" if len(ranks) > 1 else "one", **traits)
    tally = Tally("F-TI-008")
    shards = [traces.shard(step, swapped=True) for step in swapped]
    edits.judge(tally, traces.also(trace, *shards))
    return tally


def at(step: int, edit: Callable[[Averaged], Any]) -> Edit:
    """Return an edit of all weights before `step` and three steps later."""
    return lambda rank, number: edit(rank) if number in (step, step + 3) else None


def each(change: Callable[[Any], Any]) -> Callable[[Averaged], Any]:
    """Return an edit that changes each tensor by itself."""
    return lambda rank: {n: change(v).astype(np.float32) for n, v in rank.weights.items()}


ERRORS = {
    "became the average ema": at(2, lambda rank: rank.average),
    "has its value from after step 0 again, although the optimizer": at(2, lambda r: r.history[1]),
}


@pytest.mark.parametrize("words", ERRORS)
def test_an_error_that_explains_all_edits_is_named(words: str) -> None:
    """With the step, the rank and a tensor."""
    found = broken(judged(Averaged(edit=ERRORS[words]), swapped=(2, 5)))
    assert (found.step, found.rank, found.tensor) == (2, 0, "a")
    assert f"before step 2 a, b {words}" in found.message


@pytest.mark.parametrize("words", ERRORS)
def test_weights_that_no_evaluation_has_used(words: str) -> None:
    """They may be meant to stay: a script goes back after a spike, or on from the average."""
    tally = judged(Averaged(edit=ERRORS[words]), swapped=(2,))
    assert tally.broken is None
    assert "which is right" in tally.missing[0]


def test_an_average_that_is_put_in_to_be_saved() -> None:
    """A save before each edit shows what it was for; earlier weights may be loaded after a save."""
    average, earlier = [judged(Averaged(edit=e), saved_after=(2, 5)) for e in ERRORS.values()]
    assert "became the average ema" in broken(average).message
    assert earlier.broken is None


@pytest.mark.parametrize("evaluated", [(1, 2, 5), (2, 5), (1, 2)])
def test_best_weights_that_are_loaded_again(evaluated: tuple[int, ...]) -> None:
    """After some evaluations, but not after all, that may be meant; at other times it isn't."""
    trace = traces.was(trained(Averaged(edit=at(2, lambda r: r.history[1]))), starts="one")
    shards = [traces.shard(n, evaluated=n in evaluated, swapped=True) for n in range(6)]
    tally = Tally("F-TI-008")
    edits.judge(tally, traces.also(trace, *shards))
    if evaluated == (1, 2, 5):
        assert tally.broken is None
        assert "or the script loads its best weights again" in tally.missing[0]
    else:
        assert tally.broken is not None


def test_weights_that_stay_uphill() -> None:
    """A sharpness-aware step has moved them along a gradient, and not back."""
    trace = traces.was(trained(Averaged()), starts="one")
    tally = Tally("F-TI-008")
    edits.judge(tally, traces.altered(trace, Update, {"step": 2}, climbed=("a",)))
    assert tally.broken is not None
    assert (tally.broken.step, tally.broken.rank, tally.broken.tensor) == (2, 0, "a")
    assert "before step 2 a had been moved along the gradient" in tally.broken.message


def test_the_weights_of_rank_0() -> None:
    """Ranks had parted, and one gets the other's weights."""
    first = Averaged()
    second = Averaged(rank=1, weights=drawn(98), edit=at(2, lambda rank: first.history[rank.made]))
    found = broken(judged(first, second))
    assert (found.step, found.rank) == (2, 1)
    assert "were replaced by rank 0's on rank 1" in found.message


def test_a_broadcast_that_comes_late() -> None:
    """Ranks get rank 0's weights before the first step; F-DP-001 tells that they had others."""
    first = Averaged()

    def edit(_: Averaged, step: int) -> Vectors | None:
        return None if step else first.history[0]

    assert judged(first, Averaged(rank=1, weights=drawn(98), edit=edit)).broken is None


def ahead(rank: Averaged) -> Any:
    """Return weights half of the way from those of three steps before, or of the beginning."""
    base = getattr(rank, "slow", rank.history[0])
    rank.slow = {n: v + np.float32(0.5) * (rank.weights[n] - v) for n, v in base.items()}  # type: ignore[attr-defined]
    return rank.slow  # type: ignore[attr-defined]


def ahead_of_a_step(rank: Averaged) -> Any:
    """The same with slow weights that are those after the first step, as is widespread."""
    rank.slow = getattr(rank, "slow", rank.history[1])  # type: ignore[attr-defined]
    return ahead(rank)


def rolled_back(rank: Averaged) -> Any:
    rank.made = 1
    return rank.history[1]


BENIGN = {
    "clamped": each(lambda v: v.clip(-0.1, 0.1)),
    "clamped at a bound below": each(lambda v: v.clip(-0.05, None)),
    "pruned": each(lambda v: np.where(np.abs(v) < 0.05, 0, v)),
    "rescaled": each(lambda v: 0.5 * v),
    "lookahead": ahead,
    "lookahead from the first step": ahead_of_a_step,
}


@pytest.mark.parametrize("name", BENIGN)
def test_a_benign_change_is_noted(name: str) -> None:
    """Nothing is open, and nothing is found."""
    tally = judged(Averaged(edit=at(2, BENIGN[name])))
    assert (tally.broken, tally.missing) == (None, [])


def test_rows_are_rescaled() -> None:
    """The norm of each row of a matrix is held below a bound."""

    def edit(rank: Averaged) -> Any:
        rows = rank.weights["a"].reshape(3, 4)
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        return {"a": (rows * np.minimum(1, 0.1 / length)).astype(np.float32).reshape(-1)}

    tally = judged(Averaged(edit=at(2, edit)))
    assert (tally.broken, tally.missing) == (None, [])
    assert "rescaled by rows" in tally.notes[0]


def test_the_mean_of_all_ranks() -> None:
    """Ranks that step alone are brought together: another clause asks whether they should."""
    pair = [Averaged(), Averaged(rank=1, weights=drawn(98))]

    def mean(_: Averaged, step: int) -> Any:
        held = [rank.history[step] for rank in pair]
        return (
            {n: (held[0][n] + held[1][n]) / np.float32(2) for n in held[0]} if step == 2 else None
        )

    for rank in pair:
        rank.edit = mean
    tally = judged(*pair)
    assert (tally.broken, tally.missing) == (None, [])


@pytest.mark.parametrize(("part", "is_explained"), [(1.0, True), (0.5, True), (-0.5, False)])
def test_ranks_that_go_a_part_of_the_way_to_one_place(part: float, is_explained: bool) -> None:
    """An outer step gives all ranks the same part of other weights; moving apart is none."""
    pair = [Averaged(), Averaged(rank=1, weights=drawn(98))]
    goal = drawn(97)

    def towards(rank: Averaged, step: int) -> Any:
        held = pair[rank.rank].history[step]
        way = {n: held[n] + np.float32(part) * (goal[n] - held[n]) for n in held}
        return way if step == 2 else None

    for rank in pair:
        rank.edit = towards
    tally = judged(*pair)
    assert tally.broken is None
    assert bool(tally.missing) is not is_explained


def test_a_rank_without_batches_catches_up() -> None:
    """It gets the weights of a rank that has made more steps, and they count as its own."""
    ahead = Averaged()
    for step in range(5):
        ahead.step(step)

    def edit(_: Averaged, step: int) -> Any:
        return ahead.history[4] if step == 2 else None

    tally = judged(Averaged(), Averaged(rank=1, weights=drawn(98), edit=edit))
    assert (tally.broken, tally.missing) == (None, [])


def test_weights_that_are_swapped_out_and_back() -> None:
    """What differs by rounding only is no change."""
    tally = judged(Averaged(edit=at(2, each(lambda v: (v * np.float32(1.1)) / np.float32(1.1)))))
    assert (tally.broken, tally.missing, tally.notes) == (None, [], [])


def test_a_change_in_every_step_is_noted() -> None:
    """The script means to; the steps are judged from there."""
    tally = judged(Averaged(edit=lambda rank, step: rank.average if step else None))
    assert (tally.broken, tally.missing) == (None, [])
    assert "a, b changed outside of the optimizer before 5 steps, first step 1" in tally.notes[0]


def drawn_back(rank: Averaged, step: int) -> Vectors | None:
    """Return weights a tenth of the way to the average, before each step but the first ones."""
    part = np.float32(0.1)
    weights = {n: v + part * (rank.average[n] - v) for n, v in rank.weights.items()}
    return weights if step > 1 else None


@pytest.mark.parametrize(
    ("label", "share", "first", "is_swapped"),
    [
        ("model_ema", 0.0, 99, True),
        ("model_ema", 0.5, 99, False),
        ("slow", 0.0, 99, False),
        ("teacher", 0.0, 98, False),
    ],
)
def test_weights_that_follow_their_average(
    label: str, share: float, first: int, is_swapped: bool
) -> None:
    """An average that stays while the weights come to it was to move.

    Other copies may be slow, and other weights than the first ones are no average of them.
    """
    rank = Averaged(edit=drawn_back, label=label, share=lambda _: share, average=drawn(first))
    tally = judged(rank)
    assert (tally.broken is not None) is is_swapped
    if tally.broken is not None:
        assert (tally.broken.step, tally.broken.tensor) == (2, "a")
        assert "a, b went 0.1 of the way to model_ema, which stays" in tally.broken.message


@pytest.mark.parametrize("edit", [each(lambda v: v + drawn(7)["b"][0]), rolled_back])
def test_a_change_that_nothing_explains_is_open(edit: Callable[[Averaged], Any]) -> None:
    """Noise may be added on purpose, and a run that diverged may go back with its optimizer."""
    tally = judged(Averaged(edit=at(2, edit)))
    assert tally.broken is None
    assert "a, b changed outside of the optimizer before 2 steps (steps 2, 5)" in tally.missing[0]
