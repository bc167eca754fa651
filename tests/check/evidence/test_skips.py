"""Steps that a user's trainer skipped, as the checks judge them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Injected, Start, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, one, scenario

STEP = 2
NAN = Fault(kind="non_finite_gradient", step=STEP, rank=1, value="nan")
STRIKE = Injected(fault=NAN.to_dict(), step=STEP, rank=1, shard=1)


def own(trace: Trace, **changes: Any) -> Trace:
    """Return `trace` as a user's own trainer's, which has skipped no step."""
    told = {"system": "command", "workload": "own", **changes}
    made = replace(trace, scenario=trace.scenario.with_(**told), promises=())
    return traces.was(made, clipping="other")


def skipping(trace: Trace, ranks: Collection[int] = (0, 1, 2), step: int = STEP) -> Trace:
    """Return `trace` with a step that these ranks skipped, with unchanged state and no gradient."""
    for rank in ranks:
        before = one(trace, Update, step=step - 1, rank=rank)
        kept = {"weights": before.weights, "optimizer": before.optimizer, "gradient": {}}
        trace = altered(trace, Update, {"step": step, "rank": rank}, **kept)
    return trace


def struck(trace: Trace) -> Trace:
    """Return `trace` with a NaN in the gradient of `STEP`."""
    return replace(trace, events=(STRIKE, *trace.events))


CALM = traces.run(scenario(optimizer="adamw"))


def test_a_step_that_all_ranks_skip() -> None:
    """A step skipped by all ranks holds despite its NaN, and a note names it."""
    finding = traces.judge("finiteness", [struck(skipping(own(CALM)))])
    assert finding.verdict is Verdict.HELD
    (note,) = finding.notes
    assert "skipped step 2 on all ranks, as a GradScaler does" in note
    assert "nothing moved" in note


def test_weights_that_are_lost_skip_nothing() -> None:
    """A step that leaves NaN weights as they were is no step that a scaler skipped."""
    lost = skipping(own(CALM))
    for rank in (0, 1, 2):
        lost = altered(lost, Update, {"step": STEP, "rank": rank}, finite=False)
    assert evidence.skipped(lost) == set()
    finding = traces.judge("finiteness", [struck(lost)])
    assert finding.verdict is Verdict.FALSIFIED
    assert not any("GradScaler" in note for note in finding.notes)


@pytest.mark.parametrize("ranks", [(0, 2), (1,), ()])
def test_a_step_that_some_ranks_skip(ranks: tuple[int, ...]) -> None:
    """If only some ranks skip a step, the others applied the NaN."""
    finding = traces.judge("finiteness", [struck(skipping(own(CALM), ranks))])
    assert "updated in step 2 after a non-finite value" in broken(finding).message


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_skipped_step_that_moves_something(part: str) -> None:
    """A rank that changed a weight or optimizer state did not skip the step."""
    after = {part: getattr(one(CALM, Update, step=STEP, rank=2), part)}
    moved = altered(skipping(own(CALM)), Update, {"step": STEP, "rank": 2}, **after)
    finding = traces.judge("finiteness", [struck(moved)])
    assert "updated in step 2 after a non-finite value" in broken(finding).message
    assert evidence.skipped(moved) == set()


def test_the_harness_own_trainers_halt() -> None:
    """The harness's own trainers must halt instead of skipping."""
    finding = traces.judge("finiteness", [struck(skipping(CALM))])
    assert "updated in step 2 after a non-finite value" in broken(finding).message


def test_another_value_after_a_skipped_step() -> None:
    """A skipped step does not excuse a NaN in another one."""
    later = replace(STRIKE, step=STEP + 1, fault={**NAN.to_dict(), "step": STEP + 1})
    trace = struck(skipping(own(CALM)))
    finding = traces.judge("finiteness", [replace(trace, events=(later, *trace.events))])
    assert "updated in step 3 after a non-finite value" in broken(finding).message


@pytest.mark.parametrize(("step", "detail"), [(1, "values"), (3, "values"), (1, "digests")])
def test_a_step_that_one_run_skips(step: int, detail: str) -> None:
    """If only one run skips a step, they are compared up to that step, or not at all."""
    several = own(traces.run(scenario(detail=detail)))
    alone = own(traces.run(scenario(world_size=1, detail=detail)))
    for who, both in (
        ("this run", (skipping(several, step=step), alone)),
        ("the single-device run", (several, skipping(alone, (0,), step))),
    ):
        finding = traces.judge("parity", both)
        told = f"{who} alone skipped step {step}"
        if detail == "values":
            assert finding.verdict is Verdict.HELD, finding.reason
            assert any(told in note for note in finding.notes)
        else:
            assert finding.verdict is Verdict.INCONCLUSIVE
            assert told in finding.reason


def test_a_run_of_skipped_steps_alone() -> None:
    """A run of skipped steps only is neither compared nor recomputed."""
    sgd = own(traces.run(scenario(num_steps=2)))
    start = {"weights": one(CALM, Update, step=0, rank=0).weights, "gradient": {}, "optimizer": {}}
    still = altered(sgd, Update, {}, **start)
    still = altered(still, Start, {}, weights=start["weights"])
    finding = traces.judge("step_rule", [still])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "nothing was recomputed: the run skipped steps 0, 1 on all ranks" in finding.reason
