"""Gradients that a script clips in a wrong way, to a norm that it doesn't declare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from entrenar_py.check.causes import explanations
from entrenar_py.check.causes.clipping import Clipped
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.clauses import undeclared_clipping
from entrenar_py.shared.trace import Trace
from tests.check.clauses.micro_batch_traces import Vectors, summed, times, trace_of


def run(*norms: float) -> Trace:
    """Return a run whose applied gradients have these norms."""
    return trace_of([_of_norm(norm, summed(step)) for step, norm in enumerate(norms)])


def _of_norm(norm: float, vectors: Vectors) -> Vectors:
    return times(norm / np.sqrt(sum(np.square(v).sum() for v in vectors.values())), vectors)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([2.0**-16] * 3, "1 divided by 65536"),
        ([0.25 * 2.0**-16] * 3, "0.25 divided by 65536"),
        ([0.5 * 2.0**-17] * 3, "0.25 divided by 65536"),
        ([2.0**-15, 2.0**-16, 2.0**-16], "2 divided by 65536"),  # the scale grew
    ],
)
def test_a_limit_over_a_power_of_two_is_recognised(norms: Sequence[float], words: str) -> None:
    """The first step is named; the scale may double or halve."""
    found = undeclared_clipping.first(run(*norms))
    assert found is not None
    assert found[0] == 0
    assert words in found[1].words


@pytest.mark.parametrize(
    "norms",
    [
        [1.0, 1.0, 1.0],  # clipped at a limit that people write
        [1e-5, 1e-5, 1e-5],
        [0.3, 2.0**-16, 0.7],
        [0.001234567] * 3,
        [2.0**-16] * 2,
    ],
)
def test_other_norms_are_left_alone(norms: Sequence[float]) -> None:
    """A limit without a scale, no limit, or too few steps."""
    assert undeclared_clipping.first(run(*norms)) is None


NAMES = ("inp.weight", "inp.bias", "out.weight", "out.bias")
DECAYED, OTHERS = NAMES[::2], NAMES[1::2]
GIVEN = np.random.default_rng(5)
WHOLE = [{name: GIVEN.normal(size=6) for name in NAMES} for _ in range(6)]


def cut(whole: Vectors, limit: float, *groups: Iterable[str]) -> Vectors:
    """Return a gradient whose groups are each clipped to a norm, as torch does it."""
    applied = {name: 0.5 * value for name, value in whole.items()}
    for group in groups:
        size = np.sqrt(sum(np.square(applied[name]).sum() for name in group))
        applied |= {name: min(1.0, limit / (size + 1e-6)) * applied[name] for name in group}
    return applied


def found(applied: Sequence[Vectors]) -> Explanation | None:
    """Return the explanation of a run that applied these gradients."""
    steps = [
        Clipped(
            applied=one,
            sizes={name: float(np.square(value).sum()) for name, value in one.items()},
            large=False,
            limit=np.nan,
            bound=1e-4,
            whole=whole,
            by_rank={},
            given={},
        )
        for one, whole in zip(applied, WHOLE, strict=False)
    ]
    return explanations.first(
        undeclared_clipping.LIST,
        undeclared_clipping.Steps(
            norms={step: one.norm(NAMES) for step, one in enumerate(steps)},
            clipped=dict(enumerate(steps)),
            weights=dict.fromkeys(range(len(steps)), 1.0),
        ),
    )


def test_groups_of_parameters_that_are_clipped_by_their_own_norms() -> None:
    """They divide the layers, as the lists with and without weight decay do."""
    why = found([cut(whole, 0.5, DECAYED, OTHERS) for whole in WHOLE])
    assert why is not None
    assert why.tensor in NAMES
    assert "have the norm 0.5 by themselves" in why.words


@pytest.mark.parametrize(
    "groups",
    [
        (NAMES[:2], NAMES[2:]),  # two networks, each clipped apart
        tuple((name,) for name in NAMES),  # a limit for each tensor
        (NAMES,),
        (DECAYED,),
        (),
    ],
)
def test_what_may_be_clipped_apart_on_purpose(groups: Sequence[Sequence[str]]) -> None:
    """Nothing is said of whole layers, of single tensors, and of the whole gradient."""
    assert found([cut(whole, 0.5, *groups) for whole in WHOLE]) is None


def test_one_step_of_groups_is_too_few() -> None:
    """Two norms may be equal by chance."""
    applied = [
        cut(whole, 0.5, *([DECAYED, OTHERS] if n == 2 else [])) for n, whole in enumerate(WHOLE)
    ]
    assert found(applied) is None


def test_a_generator_of_parameters_is_exhausted_by_the_first_step() -> None:
    """The first gradient alone is clipped, and the others are longer."""
    once = [cut(whole, 0.5, *([NAMES] if n == 0 else [])) for n, whole in enumerate(WHOLE)]
    why = found(once)
    assert why is not None
    assert "is clipped, to 0.5, and later ones are longer" in why.words
    assert found(once[:4]) is None, "too few steps"
    assert (
        found([cut(whole, 0.5123, *([NAMES] if n == 0 else [])) for n, whole in enumerate(WHOLE)])
        is None
    )
    some = [cut(whole, 0.5, *([NAMES] if n in (0, 3) else [])) for n, whole in enumerate(WHOLE)]
    assert found(some) is None, "now and then"
    short = [{n: 0.01 * v for n, v in one.items()} if k else one for k, one in enumerate(once)]
    assert found(short) is None, "the others need no clipping"
