"""Values are aligned by samples and names, and judged by the spread at their border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar_py.check.diff import comparison, judge, report
from entrenar_py.check.diff.alignment import align
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, RankBorders


def border(
    order: int, value: float, kind: str = border_file.OUTPUT, name: str = "layer", **fields: object
) -> Border:
    """Return the border of two equal numbers."""
    numbers = np.array([value, value], np.float32)
    usual = {
        "step": 0,
        "micro_batch": 0,
        "phase": "forward",
        "digest": str(value),
        "dtype": "float32",
        "shape": (2,),
        "scale": float(np.linalg.norm(numbers)),
        "numbers": numbers,
        "where": name,
    }
    return Border(order=order, kind=kind, name=name, **{**usual, **fields})  # type: ignore[arg-type]


def samples(order: int, rows: str, **fields: object) -> Border:
    """Return the border of a micro-batch's samples."""
    fields = {"text": rows, "digest": rows, "numbers": None, **fields}
    return border(order, 0.0, border_file.SAMPLES, "samples", **fields)


def run(*borders: Border, rank: int = 0) -> list[RankBorders]:
    """Return a run of one rank."""
    return [RankBorders(rank=rank, borders=[*borders])]


def test_micro_batches_are_paired_by_samples() -> None:
    """A micro-batch with the same samples is the partner, in another place of the step."""
    first = run(
        samples(1, "a b"),
        border(2, 1.0),
        samples(3, "c d", micro_batch=1),
        border(4, 2.0, micro_batch=1),
    )
    second = run(
        samples(1, "c d"),
        border(2, 2.0),
        samples(3, "a b", micro_batch=1),
        border(4, 1.0, micro_batch=1),
    )
    assert judge.judge(first, second, []).bits is None


def test_micro_batches_are_paired_across_ranks() -> None:
    """Ranks may have each other's samples."""
    first = run(samples(1, "a"), border(2, 1.0)) + run(samples(1, "b"), border(2, 2.0), rank=1)
    second = run(samples(1, "b"), border(2, 2.0)) + run(samples(1, "a"), border(2, 1.0), rank=1)
    paired = align(first, second)
    assert {(pair.rank, pair.second_rank) for pair in paired.pairs} == {(0, 1), (1, 0)}
    assert judge.judge(first, second, []).bits is None


def test_rows_in_another_order_are_not_compared_one_by_one() -> None:
    """Losses are compared, and activations are not."""
    loss = border(3, 5.0, border_file.LOSS, "loss")
    paired = align(
        run(samples(1, "a b"), border(2, 1.0), loss), run(samples(1, "b a"), border(2, 2.0), loss)
    )
    assert [pair.first.kind for pair in paired.pairs] == [border_file.LOSS]
    assert [*paired.notes] == ["step 0: the samples of a micro-batch have another order"]


def test_a_step_that_is_divided_differently_is_compared_by_its_update() -> None:
    """What belongs to a micro-batch is left out, with a note."""
    update = border(9, 1.0, border_file.UPDATE, "weight", micro_batch=-1, phase="update")
    first = run(samples(1, "a b"), border(2, 1.0), update)
    second = run(
        samples(1, "a"),
        border(2, 1.0),
        samples(3, "b", micro_batch=1),
        border(4, 1.0, micro_batch=1),
        update,
    )
    paired = align(first, second)
    assert [pair.first.kind for pair in paired.pairs] == [border_file.UPDATE]
    assert [*paired.notes] == ["step 0: its samples are divided into other micro-batches"]


def test_other_samples_are_a_real_difference() -> None:
    """Inputs of the model are compared exactly if they are whole numbers."""
    tokens: dict[str, Any] = {"numbers": None, "dtype": "int64"}
    first = run(samples(1, "a"), border(2, 1.0, border_file.INPUT, "", **tokens))
    second = run(samples(1, "b"), border(2, 2.0, border_file.INPUT, "", **tokens))
    real = judge.judge(first, second, [first]).real
    assert real is not None
    assert report.place(real) == "step 0, rank 0, forward: input of the model"


@pytest.mark.parametrize(("away", "is_real"), [(3e-4, False), (5e-4, True)])
def test_a_difference_is_measured_by_the_spread(away: float, is_real: bool) -> None:
    """MULTIPLE times the spread is rounding, and more is real."""
    first, disturbed = run(border(1, 1.0)), [run(border(1, 1.0001)), run(border(1, 1.00005))]
    real = judge.judge(first, run(border(1, 1.0 + away)), disturbed).real
    assert (real is not None) == is_real


@pytest.mark.parametrize(("away", "is_real"), [(2e-7, False), (2e-5, True)])
def test_without_a_spread_the_rounding_of_one_sum_counts(away: float, is_real: bool) -> None:
    """The floor grows with the root of the number of terms."""
    first = run(border(1, 1.0, fan_in=16))
    real = judge.judge(first, run(border(1, 1.0 + away, fan_in=16)), [first]).real
    assert (real is not None) == is_real


def test_the_coarser_dtype_decides_the_floor() -> None:
    """A value in bfloat16 differs by the rounding of bfloat16."""
    first = run(border(1, 1.0))
    assert judge.judge(first, run(border(1, 1.008, dtype="bfloat16")), [first]).real is None


def test_infinite_values_at_the_same_places_agree() -> None:
    """Minus infinity in a mask is no difference, and a NaN that only one run has is."""
    masked: dict[str, Any] = {"numbers": np.array([1.0, -np.inf], np.float32), "digest": "1"}
    near: dict[str, Any] = {"numbers": np.array([1.0000001, -np.inf], np.float32), "digest": "2"}
    broken: dict[str, Any] = {"numbers": np.array([1.0, np.nan], np.float32), "digest": "3"}
    first = run(border(1, 1.0, **masked))
    assert judge.judge(first, run(border(1, 1.0, **near)), [first]).real is None
    assert judge.judge(first, run(border(1, 1.0, **broken)), [first]).real is not None


def test_an_element_that_is_turned_around_is_rounding() -> None:
    """Adam steps by a sign: later steps follow from that, and can't be judged."""
    steps = {"micro_batch": -1, "phase": "update"}
    numbers = np.full(100, 0.1, np.float32)
    few, many = numbers.copy(), -numbers
    few[:2] *= -1
    shown: list[list[RankBorders]] = []
    for update, value in ((numbers, 1.0), (few, 2.0), (many, 2.0)):
        fields: dict[str, Any] = {"numbers": update, "shape": (100,), "digest": str(update[0])}
        kind = border_file.UPDATE
        shown.append(run(border(1, 1.0, kind, "w", **steps, **fields), border(2, value, step=1)))
    first = shown[0]
    judgement = judge.judge(first, shown[1], [first])
    assert judgement.real is None
    assert judgement.undecided.startswith("step 1 is not judged: rounding turns elements")
    assert comparison.verdict_of(judgement, [first], [])[0] == comparison.UNKNOWN
    one, other = (run(each[0].borders[0]) for each in shown[:2])
    of_one_step = judge.judge(one, other, [one])
    assert not of_one_step.undecided
    assert judge.judge(first, shown[2], [first]).real is not None


def test_a_choice_that_rounding_decides_is_no_difference() -> None:
    """If the experts of a token change in a disturbed run, other experts are rounding."""
    first, other = (run(border(1, value, numbers=None, dtype="int64")) for value in (1.0, 2.0))
    assert judge.judge(first, other, [first]).real is not None
    judgement = judge.judge(first, other, [first, other])
    assert judgement.real is None
    assert judgement.differences[0].ratio == 0.0


def test_a_gradient_of_only_one_run_is_real() -> None:
    """A gradient that a `detach` cuts off is named, if both runs have the output itself."""
    gradient = border(3, 1.0, border_file.OUTPUT_GRADIENT, phase="backward")
    other = border(2, 1.0, border_file.OUTPUT_GRADIENT, "last", phase="backward")
    last = border(1, 1.0, name="last")
    first = run(border(0, 1.0), last, other, gradient)
    real = judge.judge(first, run(border(0, 1.0), last, other), [first]).real
    assert real is not None
    assert "only A has a value there" in report.size(real)
    renamed = judge.judge(run(last, other, gradient), run(last, other), [])
    assert renamed.real is None


def test_a_gradient_within_a_compiled_graph_is_no_difference() -> None:
    """That only one run has an output's gradient is a bug if those of parameters differ, too."""
    output, weight = border(0, 1.0), border(4, 1.0, border_file.PARAMETER_GRADIENT, "weight")
    other = border(2, 1.0, border_file.OUTPUT_GRADIENT, "last", phase="backward")
    both = (output, border(1, 1.0, name="last"), other)
    first = run(*both, border(3, 1.0, border_file.OUTPUT_GRADIENT, phase="backward"), weight)
    assert judge.judge(first, run(*both, weight), [first]).real is None
    wrong = border(4, 9.0, border_file.PARAMETER_GRADIENT, "weight")
    real = judge.judge(first, run(*both, wrong), [first]).real
    assert real is not None
    assert "only A has a value there" in report.size(real)


def test_different_weights_at_the_beginning_are_told() -> None:
    """What follows from them can be compared from one checkpoint on."""
    first, second = (run(border(1, v, border_file.PARAMETER, phase="start")) for v in (1.0, 2.0))
    judgement = judge.judge(first, second, [first])
    told = {"names": ("A", "B"), "verdict": comparison.REAL, "judgement": judgement}
    text = report.lines(comparison.Outcome(**told))  # type: ignore[arg-type]
    assert "to compare what comes after, let both begin from one checkpoint" in text


def test_arguments_of_inner_modules_may_be_written_differently() -> None:
    """A mask of another dtype is no difference by itself."""
    mask = border(1, 1.0, border_file.INPUT, numbers=None, dtype="bool")
    other = border(1, 0.0, border_file.INPUT)
    assert judge.judge(run(mask), run(other), []).bits is None


def test_generators_alone_are_no_difference() -> None:
    """A generator that differs is remembered for what comes after it, unless it has no seed."""
    state = border(1, 1.0, border_file.GENERATOR, "torch", numbers=None)
    moved = border(1, 2.0, border_file.GENERATOR, "torch", numbers=None)
    judgement = judge.judge(run(state), run(moved), [run(state)])
    assert judgement.bits is None
    assert [pair.first.name for pair in judgement.explaining] == ["torch"]
    assert not judge.judge(run(state), run(moved), [run(moved)]).explaining
