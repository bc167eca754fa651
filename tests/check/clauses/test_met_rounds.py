"""Rounds of ranks that step alone are seen by their weights, and judged without a declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.check.causes import common_steps
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import CHECKS, met_rounds
from entrenar_py.check.evidence import rounds
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import runner
from entrenar_py.shared.trace import (
    Event,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

Vectors = Mapping[str, NDArray[np.float32]]
# Returns each rank's weights after a round, given those before it and each rank's own.
Outer = Callable[[Vectors, Sequence[Vectors]], Sequence[Vectors]]

SIZES = {"w": 9, "b": 4}
NUM_STEPS, ROUND = 8, 2


def mean(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean of their weights."""
    one, other = inner
    return [{n: np.asarray((one[n] + other[n]) / 2, np.float32) for n in SIZES}] * 2


class Nesterov:
    """Steps along the pseudo-gradient, `factor` times the mean of the ranks' movements."""

    def __init__(self, rate: float, momentum: float, factor: float = 1.0, ahead: bool = True):
        self.rate, self.momentum, self.factor, self.ahead = rate, momentum, factor, ahead
        self.kept: dict[str, NDArray[np.float64]] = {}

    def __call__(self, before: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
        """Return the outer weights, for each rank."""
        after: dict[str, NDArray[np.float32]] = {}
        for name in SIZES:
            slope = self.factor * np.mean([before[name] - one[name] for one in inner], axis=0)
            self.kept[name] = self.momentum * self.kept.get(name, 0.0) + slope
            move = slope + self.momentum * self.kept[name] if self.ahead else self.kept[name]
            after[name] = (before[name] - self.rate * move).astype(np.float32)
        return [after] * len(inner)


def first_alone(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the first one's weights."""
    return [inner[0]] * len(inner)


def best(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the weights of another one than rank 0, as populations do."""
    return [inner[1]] * len(inner)


def added(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the sum of their weights."""
    return [{n: inner[0][n] + inner[1][n] for n in SIZES}] * 2


def nearer(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Bring ranks half of the way to their mean, as elastic averaging does."""
    middle = mean({}, inner)[0]
    return [{n: (one[n] + middle[n]) / np.float32(2) for n in SIZES} for one in inner]


def one_tensor_kept(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean, but for a tensor that rank 1 keeps."""
    middle = mean({}, inner)[0]
    return [middle, {**middle, "b": inner[1]["b"]}]


def body_alone(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean of one tensor; each keeps its own other one."""
    return [{**one, "w": mean({}, inner)[0]["w"]} for one in inner]


def ran(
    outer: Outer,
    *,
    samples: Sequence[int] = (4, 4),
    shared: Sequence[str] = (),
    warm: int = 0,
    options: Mapping[str, float] | None = None,
) -> Trace:
    """Return the run of two ranks with SGD and rounds of two steps; `outer` ends each round.

    The gradients of the tensors `shared` are the ranks' mean, and those of all tensors in the first
    `warm` steps. `options` are those of an outer optimizer that was seen.
    """
    drawn = np.random.default_rng(5)
    begun = {n: drawn.standard_normal(size).astype(np.float32) for n, size in SIZES.items()}
    held: list[Vectors] = [begun, begun]
    before: Vectors = begun
    events: list[Event] = [
        Start(step=0, rank=rank, weights=recorded(begun), trainable=(*SIZES,)) for rank in (0, 1)
    ]
    edited: list[Vectors] = [{}, {}]
    for step in range(NUM_STEPS):
        slopes = [
            {n: drawn.standard_normal(s).astype(np.float32) for n, s in SIZES.items()}
            for _ in samples
        ]
        own = [dict(one) for one in slopes]
        for name in SIZES if step < warm else shared:
            for one in own:
                one[name] = (slopes[0][name] + slopes[1][name]) / np.float32(2)
        held = [
            {n: one[n] - np.float32(0.1) * slope[n] for n in SIZES}
            for one, slope in zip(held, own, strict=True)
        ]
        for rank, count in enumerate(samples):
            ids = tuple(range(sum(samples[:rank]), sum(samples[: rank + 1])))
            events.append(
                Shard(
                    step=step,
                    epoch=step,
                    rank=rank,
                    shard=rank,
                    ids=ids,
                    loss_sum=1.0,
                    weight=count,
                    finite=True,
                    gradient=recorded(slopes[rank]),
                )
            )
        events += [
            Update(
                step=step,
                rank=rank,
                loss=None,
                weight=sum(samples),
                learning_rate=0.1,
                finite=True,
                weights=recorded(held[rank]),
                gradient=recorded(own[rank]),
                edited=recorded(edited[rank]),
            )
            for rank in (0, 1)
        ]
        edited = [{}, {}]
        if (step + 1) % ROUND == 0 and step + 1 > warm:
            after = outer(before, held)
            edited = [
                {n: new[n] for n in SIZES if not np.array_equal(new[n], old[n])}
                for old, new in zip(held, after, strict=True)
            ]
            held, before = [*after], after[0]
    subject = traces.scenario(
        world_size=2, num_steps=NUM_STEPS, optimizer="sgd", learning_rate=0.1, num_shards=2
    ).with_(system="command", workload="own", options=options or {})
    return met_rounds.seen(traces.hand_written(*events, subject=subject))


def recorded(vectors: Vectors) -> Tensors:
    """Return the records of tensors, with their values."""
    return {name: record_tensor(v.astype(np.float32), values=True) for name, v in vectors.items()}


def judged(check: str, trace: Trace) -> Finding:
    """Return the finding as the harness makes it."""
    return runner.judge(traces.clause(check), CHECKS[check], Runs(trace)).finding


RIGHT = {
    "the mean": mean,
    "DiLoCo": Nesterov(0.7, 0.9),
    "momentum without a look ahead": Nesterov(0.8, 0.5, ahead=False),
    "a rate of the server": Nesterov(0.35, 0.0),
}


@pytest.mark.parametrize("outer", RIGHT.values(), ids=RIGHT)
def test_right_rounds_are_held(outer: Outer) -> None:
    """Ranks agree after each round, and weights are what one rule makes of all movements."""
    trace = ran(outer)
    assert sorted(rounds.synchronisations(trace)) == [1, 3, 5]
    assert trace.scenario.options["inner_steps"] == ROUND
    for check in ("replica_identity", "weighting", "outer_agreement", "outer_step"):
        finding = judged(check, trace)
        assert finding.verdict is Verdict.HELD, (check, finding.reason)
    assert "after rounds" in CHECKS["parity"].absent([trace])
    assert CHECKS["optimizer_state"].absent([traces.was(trace, saves="nothing")])


def test_a_warm_up_with_common_steps_is_none_of_a_round() -> None:
    """Post-local SGD reduces gradients at first."""
    trace = ran(mean, warm=4)
    assert sorted(rounds.synchronisations(trace)) == [5]
    assert judged("weighting", trace).verdict is Verdict.HELD


def test_shares_of_unequal_samples_are_weighed_or_left_open() -> None:
    """A mean by samples is right. Equal shares may be meant, unless the contract says otherwise."""

    def weighted(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
        return [{n: (6 * inner[0][n] + 2 * inner[1][n]) / np.float32(8) for n in SIZES}] * 2

    right, alike = (ran(outer, samples=(6, 2)) for outer in (weighted, mean))
    assert judged("weighting", right).verdict is Verdict.HELD
    assert "count alike" in judged("weighting", alike).reason
    assert judged("weighting", alike).verdict is Verdict.INCONCLUSIVE
    assert judged("outer_step", alike).verdict is Verdict.FALSIFIED


WRONG = {
    "a wrong sign": (Nesterov(0.7, 0.0, factor=-1), "weighting", "the wrong sign"),
    "rank 0's alone": (first_alone, "weighting", "went on from its own weights"),
    "a sum of weights": (added, "weighting", "weights are added, and not divided"),
    "a tensor that one rank keeps": (one_tensor_kept, "replica_identity", "b differs"),
}


@pytest.mark.parametrize(("outer", "check", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_round_is_falsified(outer: Outer, check: str, words: str) -> None:
    """The message names what the workers were given instead."""
    place = traces.broken(judged(check, ran(outer)))
    assert place.step == 1
    assert words in place.message


def test_an_error_of_a_rule_that_was_seen_is_no_other_rate() -> None:
    """Pseudo-gradients that are added look like a rate of 1.4, where the optimizer's is 0.7."""
    rule = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    right, wrong = (ran(Nesterov(0.7, 0.9, factor=by), options=rule) for by in (1.0, 2.0))
    assert judged("weighting", right).verdict is Verdict.HELD
    assert "are added, and not divided" in traces.broken(judged("weighting", wrong)).message


def test_what_may_be_meant_is_left_open() -> None:
    """A sum of movements may be a rate of 2, and ranks may go on from the best one of them.

    A tensor of each rank may be its own.
    """
    assert "rule of the outer step" in judged("weighting", ran(best)).reason
    twice = judged("weighting", ran(Nesterov(2.0, 0.0)))
    assert "rule of the outer step" in twice.reason
    own = judged("replica_identity", ran(body_alone))
    assert (own.verdict, own.compared > 0) == (Verdict.INCONCLUSIVE, True)
    assert "b differ between ranks" in own.reason


@pytest.mark.parametrize(
    ("outer", "shared"),
    [(nearer, ()), (mean, ("w",))],
    ids=["ranks come nearer", "one tensor is not reduced"],
)
def test_what_are_no_rounds(outer: Outer, shared: Sequence[str]) -> None:
    """Elastic averaging has no common weights; ranks that reduce gradients don't step alone."""
    trace = ran(outer, shared=shared)
    assert not rounds.are_in(trace)
    compared = Compared(runs=Runs(trace), model=trace, trace=trace)
    assert "call obs.synchronised(...)" in common_steps.brought_together(compared)


def test_declared_rounds_are_left_as_they_are() -> None:
    """What a script says counts."""
    trace = ran(mean)
    assert met_rounds.seen(trace) is trace
    assert all(event.collectives_alone is None for event in trace.of(Synchronised))
    assert judged("outer_schedule", replace(trace)).verdict is Verdict.INCONCLUSIVE
