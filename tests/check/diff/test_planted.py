"""Planted changes of small models: bugs are located, and other orders of the same are rounding."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from entrenar_py.check.diff import judge, operations
from entrenar_py.check.diff.judge import Judgement, Ranks
from entrenar_py.check.diff.operations import Culprit
from tests.check.diff import models

ATTENTION = "blocks.1.attention"


class Bug(NamedTuple):
    """Where a change is first seen: its module, a word of the operation ("" if none), and when."""

    change: str
    module: str
    operation: str
    phase: str = "forward"
    step: int = 0
    model: str = "decoder"
    parts: int = 1


DECODER = (
    Bug("wrong scale", ATTENTION, "mul"),
    Bug("dropped mask", ATTENTION, "masked_fill"),
    Bug("mask off by one", ATTENTION, "triu"),
    Bug("weak mask", ATTENTION, "-5.0"),
    Bug("softmax over queries", ATTENTION, "clamp"),
    Bug("view instead of transpose", ATTENTION, "clone"),
    Bug("no q norm", ATTENTION, "slice"),
    Bug("swapped k and v", ATTENTION, "slice"),
    Bug("stale cache", ATTENTION, "slice", step=1),
    Bug("rope off by one for keys", ATTENTION, "arange"),
    Bug("rope base", ATTENTION, "pow"),
    Bug("rope once", ATTENTION, "slice"),
    Bug("adjacent rope", ATTENTION, "slice"),
    Bug("interleaved groups", ATTENTION, "repeat"),
    Bug("detached keys", ATTENTION, "", "backward"),
    Bug("float16 products", ATTENTION, "_to_copy"),
    Bug("swapped gate", "blocks.1.mlp", "silu"),
    Bug("gelu gate", "blocks.1.mlp", "gelu"),
    Bug("detached gate", "blocks.1.mlp", "", "backward"),
    Bug("wrong eps", "blocks.0.norm1", "1e-05"),
    Bug("norm after", "blocks.1", "mm"),
    Bug("residual from the norm", "blocks.1", "add"),
    Bug("no second residual", "blocks.1", "add"),
    Bug("norm left out", "blocks.1", "pow"),
    Bug("norm without mean", "blocks.1.norm1", "sum"),
    Bug("scaled embedding", "", "mul"),
    Bug("final norm left out", "", "pow"),
    Bug("head in bfloat16", "", "_to_copy"),
    Bug("label shift", "", "nll_loss"),
    Bug("sum of losses", "", "nll_loss"),
    Bug("label smoothing", "", "sum"),
    Bug("term of no value", "", "mul(_, 0.1)", "backward"),
    Bug("first token ignored", "", "slice"),
    Bug("not divided by micro-batches", "", "div", parts=2),
    Bug("other samples", "", "", step=1),
    Bug("gradients not cleared", "embedding.weight", "add_", "update", step=1),
    Bug("clipped harder", "embedding.weight", "0.5", "update"),
    Bug("clipped by value", "embedding.weight", "clamp", "update"),
    Bug("not clipped", "embedding.weight", "norm", "update"),
    Bug("rate of the next step", "lr", "", "update"),
    Bug("weight decay", "weight_decay", "", "update"),
    Bug("coupled weight decay", "decoupled_weight_decay", "", "update"),
    Bug("beta2", "betas[1]", "", "update"),
    Bug("optimizer eps", "eps", "", "update"),
    Bug("weights scaled in the step", "embedding.weight", "mul_", "update"),
    Bug("amsgrad", "amsgrad", "", "update"),
    Bug("weights rounded to bfloat16", "embedding", "embedding", step=1),
)
VIT = tuple(
    bug._replace(model="vit")
    for bug in (
        Bug("layer norm eps", "block.norm1", "1e-12"),
        Bug("gelu tanh", "block.act", "tanh"),
        Bug("dropout rate", "block.dropout", "0.8"),
        Bug("qkv by head", "block", "permute"),
        Bug("heads not transposed", "block", "transpose"),
        Bug("layer scale left out", "block", "mul"),
        Bug("dropout left out", "block", "bernoulli"),
        Bug("batch norm momentum", "bn", "0.2", "update"),
        Bug("swapped channels", "", "flip"),
        Bug("patches transposed", "", "transpose"),
        Bug("positions of patches only", "", "slice"),
        Bug("mean pooled", "", "mean"),
        Bug("evaluation mode", "bn", "add_"),
        Bug("one more draw", "block.dropout", "bernoulli"),
    )
)
# A change of eps where it is small beside the mean square is smaller than rounding.
BELOW_ROUNDING = "norm with eps outside"
SAME_ON_DECODER = (
    *("norm in float64", "norm divided", "fused norm", "sdpa", "sdpa with a mask", "sdpa math"),
    *("scaled queries", "einsum", "float64 scores", "added mask", "softmax by hand"),
    *("products by head", "sigmoid by hand", "chunked product", "chunked head", "loss by hand"),
    *("loss in float64", "loss in chunks", "for each", "one by one", "fused"),
    *("clipped one by one", "more threads", "transposed weights", "columns first", "sdpa flash"),
    *("checkpointing", "loss added up backwards", "embedding as a product", "rope in float64"),
    *("products of high precision", BELOW_ROUNDING),
)
SAME_ON_VIT = (
    *("channels last", "patches unfolded", "for each", "one by one", "loss by hand"),
    *("weights in channels last", "layer norm by hand", "three products", "gelu by hand"),
    *("products without oneDNN", "deterministic algorithms"),
)


@cache
def of_first(model: str, parts: int) -> tuple[Ranks, list[Ranks]]:
    """Return the run without a change, and the disturbed runs."""
    disturbed: list[Ranks] = [models.train(model, noise=seed, parts=parts) for seed in (1, 2, 3)]
    return models.train(model, parts=parts), disturbed


@cache
def with_operations(model: str, parts: int, step: int) -> tuple[Ranks, ...]:
    """Return the run without a change and a disturbed one, with the operations of a step."""
    return tuple(
        models.train(model, parts=parts, operations=(step, step), noise=noise, steps=step + 1)
        for noise in (None, 1)
    )


def judged(model: str, change: str, parts: int = 1, steps: int = 2) -> Judgement:
    """Return the judgement of a run of some steps with a change."""
    first, disturbed = of_first(model, parts)
    second = models.train(model, change, parts=parts, steps=steps)
    return judge.judge(first, second, disturbed)


def culprit(bug: Bug, judgement: Judgement, *, in_bits: bool = False) -> Culprit | None:
    """Return the first operation that differs in a run with a change."""
    difference = judgement.bits if in_bits else judgement.real
    assert difference is not None
    step = difference.border.step
    first, disturbed = with_operations(bug.model, bug.parts, step)
    second = models.train(
        *(bug.model, bug.change), parts=bug.parts, operations=(step, step), steps=step + 1
    )
    return operations.culprit(first, second, [disturbed], difference, in_bits=in_bits)


@pytest.mark.parametrize("bug", [*DECODER, *VIT], ids=lambda bug: f"{bug.model}-{bug.change}")
def test_the_first_place_of_a_bug_is_named(bug: Bug) -> None:
    """Step, phase, module and operation are those of the planted line."""
    judgement = judged(bug.model, bug.change, bug.parts, bug.step + 1)
    assert judgement.real is not None
    border = judgement.real.border
    named = border.where or (border.name if border.kind == "setting" else "")
    assert (border.step, border.phase, named) == (bug.step, bug.phase, bug.module)
    if bug.operation:
        known = culprit(bug, judgement)
        assert known is not None
        assert bug.operation in f"{known.first} {known.second}"


@pytest.mark.parametrize(
    ("model", "change", "parts"),
    [
        *(("decoder", change, 1) for change in SAME_ON_DECODER),
        *(("vit", change, 1) for change in SAME_ON_VIT),
        ("decoder", "micro-batches in another order", 4),
    ],
)
def test_another_order_of_the_same_is_rounding(model: str, change: str, parts: int) -> None:
    """No difference of a benign change comes near the limit of rounding."""
    judgement = judged(model, change, parts)
    assert max(each.ratio for each in judgement.differences) < 0.5
    if judgement.bits is not None:
        known = culprit(Bug(change, "", "", model=model, parts=parts), judgement, in_bits=True)
        assert known is None or not known.other_factors


@pytest.mark.parametrize(
    "change", ["wrong scale", "weak mask", "rope base", "wrong eps", "gelu tanh"]
)
def test_another_argument_is_a_bug_however_little_it_changes(change: str) -> None:
    """The operation before had the same bits, so this one got the same inputs."""
    (bug,) = (each for each in (*DECODER, *VIT) if each.change == change)
    known = culprit(bug, judged(bug.model, change), in_bits=True)
    assert known is not None
    assert known.other_factors


@pytest.mark.parametrize("change", ["dropped mask", "gelu gate", "mask off by one"])
def test_another_operation_is_no_other_factor(change: str) -> None:
    """Only the size of the difference says that these are bugs."""
    (bug,) = (each for each in DECODER if each.change == change)
    known = culprit(bug, judged("decoder", change), in_bits=True)
    assert known is not None
    assert not known.other_factors


def test_the_same_run_is_equal() -> None:
    """Two runs of the same training have no difference in any bit."""
    assert judged("vit", "").bits is None


def test_a_generator_explains_a_difference() -> None:
    """One more random number is named as what differed before the dropout."""
    explaining = judged("vit", "one more draw").explaining
    assert [pair.first.name for pair in explaining][:1] == ["torch"]
