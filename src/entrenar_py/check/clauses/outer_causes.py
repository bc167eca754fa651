"""Explain an outer step that is wrong: which other step it is, if one is recognised.

Each cause is a step that real scripts make by mistake. It is recomputed and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = Mapping[str, NDArray[Any]]

ALIKE = "workers count alike, whatever their samples"

# The first words of the causes.
_BEGINNINGS = (
    ALIKE,
    "nothing was changed since the round",
    "the worker went on from its own weights",
    "the pseudo-gradient has the wrong sign",
    "pseudo-gradients are added",
    "the mean is divided by the workers",
    "the workers' weights are added",
    "the outer momentum was lost",
    "Nesterov's look ahead is there",
    "only rank",
)
_ALIKE = 1e-3  # of the step's length: the causes are far further apart


@dataclass(frozen=True, kw_only=True)
class Round:
    """The quantities that an outer step is computed from.

    `before` are the outer weights that all began the round with, `momentum` is the outer one,
    `inner` has each worker's weights at its end, and `shares` each worker's part of the samples.
    """

    before: Vectors
    momentum: Vectors
    inner: Mapping[int, Vectors]
    shares: Mapping[int, float]

    @property
    def mean(self) -> dict[str, NDArray[np.float64]]:
        """The mean of the workers' weights, weighted by their samples."""
        return {
            name: np.sum(
                [
                    share * self.inner[rank][name].astype(np.float64)
                    for rank, share in self.shares.items()
                ],
                axis=0,
            )
            for name in self.before
        }


Step = Callable[[Round], Vectors]  # returns the outer weights after the round


def explain(round_: Round, got: Vectors, rank: int, step: Step, other: Step) -> str:
    """Return the cause of the weights `got` of a worker, to end a message; "" if none is found.

    `step` makes the right outer step, `other` that of the other rule of momentum.
    """
    if any(name not in got or got[name].shape != v.shape for name, v in round_.before.items()):
        return ""
    due = step(round_)
    scale = _distance(due, round_.before) or 1.0
    for words, weights in _causes(round_, rank, step, other):
        if _distance(weights, got) <= _ALIKE * scale < _distance(weights, due):
            return f": {words}"
    return ""


def is_named(message: str) -> bool:
    """Return whether a message about an outer step ends with what `explain` returned."""
    return any(f": {words}" in message for words in _BEGINNINGS)


def _causes(round_: Round, rank: int, step: Step, other: Step) -> Iterator[tuple[str, Vectors]]:
    """Yield each cause in words, with the weights that it leads to."""
    yield "nothing was changed since the round began", round_.before
    if rank in round_.inner:
        yield "the worker went on from its own weights", round_.inner[rank]
    mean, num_workers = round_.mean, len(round_.shares)
    alike = dict.fromkeys(round_.shares, 1.0 / num_workers)
    yield ALIKE, step(replace(round_, shares=alike))
    for words, factor in (
        ("the pseudo-gradient has the wrong sign", -1.0),
        ("pseudo-gradients are added, and not divided by the workers", float(num_workers)),
        ("the mean is divided by the workers once more", 1.0 / num_workers),
    ):
        moved = {
            name: round_.before[name] + factor * (value - round_.before[name])
            for name, value in mean.items()
        }
        yield words, step(replace(round_, inner={rank: moved}, shares={rank: 1.0}))
    added = {name: num_workers * value for name, value in mean.items()}
    yield "the workers' weights are added, and not divided by their number", added
    yield "the outer momentum was lost", step(replace(round_, momentum={}))
    yield "Nesterov's look ahead is there in only one of rule and step", other(round_)
    for alone in round_.inner:
        words = f"only rank {alone}'s weights count"
        yield words, step(replace(round_, shares={alone: 1.0}))


def _distance(one: Vectors, other: Vectors) -> float:
    return float(
        np.sqrt(sum(np.square(one[name].astype(np.float64) - other[name]).sum() for name in one))
    )
