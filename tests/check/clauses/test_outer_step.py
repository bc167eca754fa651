"""A wrong outer step is recognised by what it amounts to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.clauses import outer_step
from entrenar_py.check.clauses.outer_step import Round, Vectors

ROUND = Round(
    before={"w": np.array([1.0, 2.0])},
    momentum={"w": np.array([0.5, -0.5])},
    inner={0: {"w": np.array([0.9, 1.7])}, 1: {"w": np.array([0.5, 1.9])}},
    shares={0: 0.75, 1: 0.25},
)


def step(round_: Round, *, ahead: bool = True) -> Vectors:
    """Make an outer step with rate 0.7 and momentum 0.9."""
    weights = {}
    for name, mean in round_.mean.items():
        gradient = round_.before[name] - mean
        kept = 0.9 * round_.momentum.get(name, np.zeros(2)) + gradient
        move = gradient + 0.9 * kept if ahead else kept
        weights[name] = round_.before[name] - 0.7 * move
    return weights


def plain(round_: Round) -> Vectors:
    """Make the step without a look ahead."""
    return step(round_, ahead=False)


def flipped(round_: Round) -> Round:
    """Return the round with a mean on the other side of the outer weights."""
    moved = {"w": 2 * round_.before["w"] - round_.mean["w"]}
    return replace(round_, inner={0: moved}, shares={0: 1.0})


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (step(flipped(ROUND)), "the wrong sign"),
        (step(replace(ROUND, shares={0: 0.5, 1: 0.5})), "workers have equal weight"),
        (step(replace(ROUND, momentum={})), "the outer momentum was lost"),
        (plain(ROUND), "look-ahead"),
        (ROUND.before, "nothing was changed"),
        (ROUND.inner[1], "went on from its own weights"),
        (step(replace(ROUND, shares={1: 1.0})), "only rank 1's weights count"),
        ({"w": np.array([7.0, 7.0])}, ""),
        ({}, ""),
    ],
)
def test_the_cause_is_named(got: Vectors, words: str) -> None:
    """Each cause is recognised by its weights; others are not."""
    found = outer_step.explain(ROUND, got, 1, step, plain)
    assert words in found
    assert bool(words) == bool(found)
