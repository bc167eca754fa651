"""The checks of rounds hold on a run, and are falsified or inconclusive on changed copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check import clauses as checks
from entrenar_py.check.clauses import local_sgd
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import judgement
from entrenar_py.shared import systems
from entrenar_py.shared.trace import (
    End,
    Halt,
    Shard,
    Synchronised,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses.test_parity import oracle
from tests.check.clauses.traces import altered, broken, clause, judge, one, run, without

NAMES = ("outer_agreement", "outer_schedule", "outer_step", "outer_parity", "outer_finiteness")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return a run of two workers that synchronise after each of three steps of SGD."""
    (planned,) = local_sgd.plan_parity(clause("outer_parity"))
    return run(planned.with_(world_size=2, num_steps=3))


def _nudged(tensors: Tensors, by: float) -> Tensors:
    """Return `tensors`, the first of them somewhat larger."""
    name, record = next(iter(tensors.items()))
    values = record.values()
    assert values is not None
    moved = (values * (1 + by)).astype(np.float32)
    return {**tensors, name: record_tensor(moved, values=True)}


def _place(finding: Finding) -> tuple[int | None, int | None]:
    return broken(finding).step, broken(finding).rank


def test_a_right_run_holds(trace: Trace) -> None:
    """Every clause holds, each after comparisons."""
    model = run(oracle(trace.scenario))
    for name in NAMES:
        finding = judge(name, [trace, model])
        assert finding.verdict is Verdict.HELD, (name, finding)
        assert finding.compared


def test_without_rounds_nothing_is_known(trace: Trace) -> None:
    """An empty trace and one that does not promise rounds are inconclusive."""
    for name in NAMES:
        for bare in (replace(trace, events=trace.events[-1:]), replace(trace, promises=())):
            assert judge(name, [bare]).verdict is Verdict.INCONCLUSIVE, name


def test_one_rank_s_outer_weights_differ(trace: Trace) -> None:
    """Agreement detects a difference of a millionth in one tensor, the rule one of a thousandth."""
    at = {"step": 1, "rank": 1}
    weights = one(trace, Synchronised, **at).weights
    near, far = (
        altered(trace, Synchronised, at, weights=_nudged(weights, by)) for by in (1e-6, 1e-3)
    )
    assert _place(judge("outer_agreement", [near])) == (1, 1)
    assert _place(judge("outer_step", [far])) == (1, 1)
    assert _place(judge("outer_parity", [far, run(oracle(trace.scenario))])) == (1, 1)


def test_another_mean(trace: Trace) -> None:
    """The rule is checked against the mean of the workers' weights, by their samples."""
    at = {"step": 2, "rank": 1}
    moved = _nudged(one(trace, Update, **at).weights, 1e-3)
    assert _place(judge("outer_step", [altered(trace, Update, at, weights=moved)])) == (2, 0)
    heavier = altered(trace, Shard, {"step": 0, "rank": 1}, weight=9.0)
    assert _place(judge("outer_step", [heavier])) == (0, 0)


def test_without_values_the_rule_is_not_compared(trace: Trace) -> None:
    """Weights recorded as digests only can't be compared with the rule."""
    at = {"step": 1, "rank": 1}
    bare = {n: replace(r, data=None) for n, r in one(trace, Update, **at).weights.items()}
    assert judge("outer_step", [altered(trace, Update, at, weights=bare)]).verdict is (
        Verdict.INCONCLUSIVE
    )


def test_a_round_that_was_not_ended(trace: Trace) -> None:
    """A worker that does not synchronise after the last step is found."""
    lacking = without(trace, Synchronised, step=2, rank=1)
    assert _place(judge("outer_schedule", [lacking])) == (2, 1)


def test_a_collective_within_a_round(trace: Trace) -> None:
    """Collectives within a round are found by torch's count, and unknown without one."""
    chatty = altered(trace, Synchronised, {"step": 1, "rank": 0}, collectives_alone=1)
    assert _place(judge("outer_schedule", [chatty])) == (1, 0)
    silent = altered(trace, Synchronised, {}, collectives_alone=None)
    assert judge("outer_schedule", [silent]).verdict is Verdict.INCONCLUSIVE


def test_a_nan_that_nobody_minded(trace: Trace) -> None:
    """Workers that go on after a NaN, or halt after moving by it, are falsified."""
    bad = altered(trace, Shard, {"step": 1, "rank": 1}, finite=False)
    assert _place(judge("outer_finiteness", [bad])) == (1, 1)
    shard = one(bad, Shard, step=1, rank=1)
    halt = Halt(step=1, reason="NaN", rank=1, shard=shard.shard, ids=shard.ids)
    early = [
        event
        for event in bad.events[:-1]
        if not (isinstance(event, Synchronised | Update) and event.step > 0)
    ]
    end = End(status="halted", reason="NaN")
    halted = replace(bad, events=(*early, halt, end))
    assert judge("outer_finiteness", [halted]).verdict is Verdict.HELD
    moved = replace(bad, events=(*early, one(trace, Update, step=1, rank=1), halt, end))
    assert _place(judge("outer_finiteness", [moved])) == (1, 1)


def test_parity_asks_for_rounds_of_one_step(trace: Trace) -> None:
    """A run with longer rounds is inconclusive, since it is another training."""
    longer = replace(trace, scenario=trace.scenario.with_(options={"inner_steps": 2}))
    finding = judge("outer_parity", [longer])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "only with optimizer=sgd" in finding.reason


def test_what_presupposes_common_steps_does_not_apply(trace: Trace) -> None:
    """A clause that needs common steps is not judged on a stored run in rounds."""
    found = judgement.judge(
        clause("replica_identity"), checks.CHECKS["replica_identity"], Runs(trace)
    )
    assert found.finding.verdict is Verdict.INCONCLUSIVE
    assert "local-sgd-v1.yaml" in found.finding.reason


def test_plans_can_be_run() -> None:
    """The system can run every planned scenario."""
    for name in NAMES:
        for planned in checks.CHECKS[name].plan(clause(name)):
            systems.require_possible(planned)
