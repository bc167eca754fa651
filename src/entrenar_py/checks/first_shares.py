"""Compare several workers with one by the micro-batches that both have in the first step.

A script that cuts its own batches, each of a worker's size, has no run on one worker with the
batches of all. But its runs begin with the same weights, and a rank may be given the rows that one
worker is given: the first of a text, or those that a seed draws. What a row counts in the applied
gradient of the first step must then be the same. How the ranks' gradients are added up in this step
and in all others is judged by F-TI-001, without another run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrenar_py.checks import (
    evidence,
    factors,
    gradient_sums,
    loss_terms,
    presuppositions,
    step_sums,
)
from entrenar_py.checks.compared import Compared
from entrenar_py.checks.needs import ALONE, Traces
from entrenar_py.checks.run_comparison import Bounds
from entrenar_py.trace import Shard, Tensors, Trace, Update
from entrenar_py.verdict import Tally

# In what the two runs differ where batches have a worker's size. The data may be guessed by them.
_BY_SIZE = {"batch_size", "num_samples"}


def model_of(runs: Traces) -> Trace | None:
    """Return the run on one worker if the base has other rows in each step; None if it has not.

    Where loaders draw samples, they can be made to fetch the same.
    """
    near, base, model = runs.near.get(ALONE), runs.base, next(iter(runs.of(ALONE)), None)
    if base is None or base.scenario.workload != "own":
        return None
    if model is None:
        is_smaller = near is not None and "batch_size" in near.fields
        model = near.run if near and is_smaller and near.fields.keys() <= _BY_SIZE else None
    elif "content" not in (base.traits.sample_ids, model.traits.sample_ids):
        return None
    if model is None or model is base:
        return None
    rows = [Counter(_rows(evidence.shards(run).get(0, []))) for run in (base, model)]
    return model if rows[0] != rows[1] else None


def compare(tally: Tally, runs: Traces, model: Trace) -> int:
    """Compare the base with `model` on one worker; return the number of micro-batches compared.

    If nothing certain can be said, nothing is counted.
    """
    base = runs.base
    assert base is not None, "its model was found"
    compared = presuppositions.aligned(Compared(runs=runs, model=model, trace=base))
    if not _are_alike(compared):
        return 0
    alone, several = (_First.of(run) for run in (compared.model, compared.trace))
    if alone is None or several is None or not several.counts_alike():
        return 0
    bounds = Bounds.of(evidence.updates(compared.model), compared.model, compared.trace)
    pairs = [*_pairs(alone.shards, several.shards)]
    told = [_factor(alone, several, pair, bounds.gradient) for pair in pairs]
    if not pairs or None in told:
        return 0
    for (_, shard), factor in zip(pairs, told, strict=True):
        assert factor is not None, "it was tested above"
        is_right = math.isclose(factor, 1.0, rel_tol=bounds.gradient)
        tally.check(
            is_right,
            f"the first step's gradient is {factor:.3g} times as large as one worker's, for the "
            "same rows",
            **evidence.place(base, shard),
        )
    tally.note("compared with one worker by the rows that both are given in the first step alone")
    return len(pairs)


def _rows(shards: Iterable[Shard]) -> Iterator[int]:
    return (id_ for shard in shards for id_ in shard.ids)


@dataclass(frozen=True)
class _First:
    """The first step of a run: its micro-batches, and by which number their sum is divided."""

    trace: Trace
    shards: list[Shard]
    divisor: float

    @classmethod
    def of(cls, trace: Trace) -> _First | None:
        """Return None unless the applied gradient is a known part of the micro-batches' sum."""
        by_rank, shards = evidence.updates(trace).get(0, {}), evidence.shards(trace).get(0, [])
        if not by_rank or not all(shard.ids and not shard.unknown for shard in shards):
            return None
        total = step_sums.total(by_rank, shards)
        mean = evidence.vectors(_before_clipping(evidence.any_rank(by_rank)))
        if total is None or mean is None or total.keys() != mean.keys():
            return None
        divisor = gradient_sums.divisor(total, mean)
        bound = Bounds.of({}, trace).gradient
        size = float(np.linalg.norm(step_sums.joined(mean, [*mean])))
        allowed = bound * abs(divisor or 0.0) * size
        if not divisor or gradient_sums.off(total, mean, divisor, allowed):
            return None
        return cls(trace, shards, divisor)

    def per_row(self, shard: Shard) -> NDArray[np.float64] | None:
        """Return what a micro-batch gave to the step, times the step's number of rows."""
        values = evidence.vectors(shard.gradient)
        rows = sum(len(one.ids) for one in self.shards)
        return None if values is None else step_sums.joined(values, [*values]) * rows / self.divisor

    def counts_alike(self) -> bool:
        """Return whether all micro-batches have as many rows, others, and losses of equal terms."""
        are_others = len({frozenset(shard.ids) for shard in self.shards}) == len(self.shards)
        return are_others and len({(len(one.ids), one.terms) for one in self.shards}) == 1


def _before_clipping(update: Update) -> Tensors:
    return update.unclipped or update.gradient


def _are_alike(compared: Compared) -> bool:
    """Return whether both runs begin alike, are run again alike, and name tensors alike."""
    needed = (
        presuppositions.SAME_NAMES,
        presuppositions.COPIES,
        presuppositions.FINITE,
        presuppositions.PLAIN_RUNS_AGREE,
        presuppositions.SAME_BEGINNING,
        presuppositions.REDUCED,
        presuppositions.STATISTICS,
    )
    return not any(one.lacking(compared) for one in needed)


def _pairs(alone: list[Shard], several: list[Shard]) -> Iterator[tuple[Shard, Shard]]:
    """Yield the micro-batches of both runs that have the same rows."""
    left = list(alone)
    for shard in several:
        for other in left:
            if Counter(other.ids) == Counter(shard.ids):
                yield other, shard
                left.remove(other)
                break


def _factor(
    alone: _First, several: _First, pair: tuple[Shard, Shard], bound: float
) -> float | None:
    """Return how much larger a row's gradient is than on one worker; None if that isn't certain.

    A factor is certain if it is the number of workers or of micro-batches, and losses are means.
    The rate, or an optimizer of the script's own, may make up for it.
    """
    due, got = alone.per_row(pair[0]), several.per_row(pair[1])
    if due is None or got is None or due.shape != got.shape:
        return None
    factor = factors.ratio(due, got, bound)
    if factor is None or math.isclose(factor, 1.0, rel_tol=bound):
        return factor
    runs = alone.trace, several.trace
    rates_of = [evidence.any_rank(evidence.updates(run)[0]).learning_rate for run in runs]
    may_be_meant = not math.isclose(*rates_of) or several.trace.traits.rule == "own"
    named = factors.named(factor, several.trace.scenario, bound)
    is_mean = loss_terms.are_all(several.shards, means=True)
    return factor if is_mean and named and named[1] and not may_be_meant else None
