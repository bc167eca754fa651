"""Differences of two runs that one equation explains, whatever else may differ between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations
from entrenar_py.shared.faults import OF_RECORDS, Fault
from entrenar_py.shared.trace import Drawn, Shard, Tensors, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.causes.test_presuppositions import own, parity
from tests.check.clauses import traces

Change = Callable[[Tensors, Trace], Tensors]


def drawing(trace: Trace) -> Trace:
    """Return the run of a script that draws masks in the forward pass, on each rank its own."""
    draws = tuple(
        Drawn(
            step=0,
            rank=rank,
            part=rank,
            generator="torch",
            before=f"{rank}",
            after=f"{rank}b",
            where="forward",
            micro_batch=0,
        )
        for rank in range(trace.scenario.world_size)
    )
    return replace(trace, events=(*draws, *trace.events))


def applied(trace: Trace, change: Change) -> Trace:
    """Return a run with another applied gradient in step 0."""
    gradient = change(traces.one(trace, Update, step=0, rank=0).gradient, trace)
    return traces.altered(trace, Update, {"step": 0}, gradient=gradient)


def all_halved(gradient: Tensors, _: Trace) -> Tensors:
    return evidence.times(gradient, 0.5)


def some_tripled(gradient: Tensors, _: Trace) -> Tensors:
    return {**gradient, **evidence.times({"hidden2.weight": gradient["hidden2.weight"]}, 3.0)}


def of_one_rank(gradient: Tensors, trace: Trace) -> Tensors:
    return traces.one(trace, Shard, step=0, rank=1).gradient


def masked(gradient: Tensors, _: Trace) -> Tensors:
    given = np.random.default_rng(1)
    return {
        name: traces.values(*(values * given.uniform(0.5, 1.5, values.shape)))
        for name, record in gradient.items()
        if (values := record.values()) is not None
    }


def masked_and_halved(gradient: Tensors, trace: Trace) -> Tensors:
    return masked(all_halved(gradient, trace), trace)


def centred(gradient: Tensors, _: Trace) -> Tensors:
    return {
        name: traces.values(*(values - values.mean()))
        for name, record in gradient.items()
        if (values := record.values()) is not None
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (all_halved, "all tensors have the factor 1/2"),
        (some_tripled, "hidden2.weight has the factor 3 (world_size)"),
        (of_one_rank, "micro-batches count otherwise"),
    ],
)
def test_random_draws_are_no_excuse_for_one_equation(change: Change, words: str) -> None:
    """Other masks leave no gradient that is an exact multiple of the right one, or an exact sum."""
    finding = parity(applied(drawing(own(3)), change), own(1))
    assert traces.broken(finding).step == 0
    assert any(words in note for note in finding.notes), finding.notes


@pytest.mark.parametrize("change", [masked, masked_and_halved, centred])
def test_what_no_equation_explains_may_come_from_random_draws(change: Change) -> None:
    """A right script whose masks depend on the rank is not falsified."""
    finding = parity(applied(drawing(own(3)), change), own(1))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding
    assert "in the model's forward pass" in finding.reason


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(all_halved, Verdict.FALSIFIED), (masked, Verdict.INCONCLUSIVE)],
)
def test_dropout_is_no_excuse_either(change: Change, verdict: Verdict) -> None:
    """Runs whose masks may differ are compared where their gradients follow from each other."""
    runs = [applied(own(3), change), own(1)]
    dropped = [replace(run, scenario=run.scenario.with_(dropout=0.1)) for run in runs]
    finding = parity(*dropped)
    assert finding.verdict is verdict, finding


def test_shares_that_may_be_drawn_are_left_open() -> None:
    """Ranks that weigh their losses by numbers of their own add up to no gradient of one worker."""
    trace = drawing(own(3))
    for shard in [s for s in trace.of(Shard) if s.step == 0]:
        gradient = evidence.times(shard.gradient, 1.0 + 0.3 * shard.shard)
        trace = traces.altered(trace, Shard, {"step": 0, "shard": shard.shard}, gradient=gradient)
    total = {}
    for name in traces.one(trace, Shard, step=0).gradient:
        parts = [s.gradient[name].values() for s in trace.of(Shard) if s.step == 0]
        total[name] = traces.values(*np.sum([part for part in parts if part is not None], axis=0))
    finding = parity(applied(trace, lambda *_: evidence.times(total, 0.2)), own(1))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding


def test_few_elements_are_multiples_by_chance() -> None:
    """A factor of a single tensor, or of a few numbers, explains nothing."""
    trace, alone = own(3), own(1)
    kept = {"hidden1.bias"}
    small = [
        replace(
            run,
            events=tuple(
                replace(e, gradient={n: r for n, r in e.gradient.items() if n in kept})
                if isinstance(e, Update | Shard)
                else e
                for e in run.events
            ),
        )
        for run in (applied(trace, all_halved), alone)
    ]
    assert explanations.difference(small[1], small[0], 0, 1e-4) is None
    whole = explanations.difference(alone, applied(trace, all_halved), 0, 1e-4)
    assert whole is not None


@pytest.mark.parametrize(
    ("factor", "faults", "is_told"),
    [
        (0.516, (Fault(kind=OF_RECORDS[0], step=0, value="2"),), False),
        (0.516, (), True),
        (0.5, (Fault(kind=OF_RECORDS[0], step=0, value="2"),), True),
    ],
)
def test_a_number_of_one_workers_own_samples_explains_nothing(
    factor: float, faults: tuple[Fault, ...], is_told: bool
) -> None:
    """A worker that is given others' batches may divide by a number of those that it drew itself.

    Then one factor is left that nobody chooses.
    """
    alone, many = own(1), own(2)
    alone = replace(alone, scenario=alone.scenario.with_(faults=faults))
    many = applied(many, lambda gradient, _: evidence.times(gradient, factor))
    assert bool(explanations.difference(alone, many, 0, 1e-4)) is is_told
