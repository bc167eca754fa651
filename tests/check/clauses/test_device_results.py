"""F-WGPU-004, 007, 008, 009 on right, wrong and missing operations, NaNs, losses and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import ON_CPU
from entrenar_py.check.harness import companions
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Declined, End, Event, Explained, Poisoned, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

SCENARIO = Scenario(
    system="wgpu_operations", workload="linear", world_size=1, seed=0, backends=("wgpu",)
)
EXACT = Explained(
    of="relu",
    tensor="result 0",
    device="llvmpipe (Vulkan)",
    software=True,
    finite=True,
    num_elements=3,
    num_bounded=3,
    element=0,
    error=0.0,
    bound=0.0,
)
KEPT = Poisoned(
    of="relu", tensor="result 0", device="llvmpipe (Vulkan)", software=True, reached=2, lost=0
)
REFUSED = Declined(
    case="no kernel",
    operation="inv",
    error="UsageError",
    message="aten.linalg_inv at model.py:3 in forward: no kernel",
    in_line=True,
    right=False,
    submissions=0,
)


def trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    """Return a run of a probe."""
    end = End(status=status, reason=reason)
    return Trace(scenario=SCENARIO, environment={}, promises=(), events=(*events, end))


@pytest.mark.parametrize(
    ("check", "compared"),
    [("device_operations", 2), ("device_finiteness", 2), ("device_refusals", 3)],
)
def test_right_results_hold(check: str, compared: int) -> None:
    """Exact results, preserved NaNs and a refusal hold. Without an adapter all is inconclusive."""
    finding = traces.judge(check, [trace(EXACT, KEPT, REFUSED)])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, compared), finding
    missing = traces.judge(check, [trace(status="failed", reason="no adapter")])
    assert missing.verdict is Verdict.INCONCLUSIVE
    assert "no adapter" in missing.reason


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        ("device_operations", replace(EXACT, error=1e-9), "relu: result 0 is off by 1e-09"),
        ("device_operations", replace(EXACT, finite=False), "relu: result 0 is not finite"),
        ("device_finiteness", replace(EXACT, finite=False), "though all its inputs are"),
        ("device_finiteness", replace(KEPT, lost=1, element=4), "reaches 2 elements of result 0"),
        ("device_refusals", replace(REFUSED, error="TypeError"), "no kernel: the error"),
        ("device_refusals", replace(REFUSED, message="no"), "does not name inv and its line: no"),
        ("device_refusals", replace(REFUSED, in_line=False), "does not name inv and its line"),
        ("device_refusals", replace(REFUSED, submissions=1), "submissions before the refusal"),
        ("device_refusals", replace(REFUSED, error=None), "its result is not the CPU's"),
    ],
)
def test_wrong_results_are_found(check: str, wrong: Event, message: str) -> None:
    """A wrong result is named by its operation or case."""
    found = traces.broken(traces.judge(check, [trace(EXACT, KEPT, wrong)]))
    assert message in found.message


def test_elements_without_a_bound_are_told_of() -> None:
    """A note says how many elements have no bound."""
    finding = traces.judge("device_operations", [trace(replace(EXACT, num_bounded=1))])
    assert finding.verdict is Verdict.HELD
    assert "relu: result 0: 2 of 3 elements have no bound" in finding.notes


def test_what_is_right_need_not_be_refused() -> None:
    """A device may compute a case that another device refuses."""
    taken = replace(REFUSED, error=None, right=True, submissions=1)
    assert traces.judge("device_refusals", [trace(taken)]).verdict is Verdict.HELD


def test_nans_that_reach_nothing_show_nothing() -> None:
    """A NaN that reaches no result, as in a comparison, makes the run inconclusive."""
    finding = traces.judge("device_finiteness", [trace(EXACT, replace(KEPT, reached=0))])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no NaN reached a result" in finding.reason


# --- training ----------------------------------------------------------------------------------

SHORT = CHECKS["device_training"].plan(traces.clause("device_training"))[0].with_(num_steps=3)


def trained(scenario: Scenario, *losses: float) -> Trace:
    """Return a run with these losses."""
    updates = [
        Update(step=step, rank=0, loss=loss, weight=7.0, learning_rate=0.1, finite=True, weights={})
        for step, loss in enumerate(losses)
    ]
    return replace(trace(*updates), scenario=scenario)


def judged(*losses: float, cpu: tuple[float, ...] = (2.0, 1.5, 1.0)) -> Finding:
    """Judge a run on a device with the run on the CPU, with a tolerance of 1e-4."""
    device, model = companions.of((ON_CPU,), SHORT)
    return traces.judge("device_training", [trained(device, *losses), trained(model, *cpu)], 1e-4)


def test_losses_that_agree_hold() -> None:
    """Losses hold within the tolerance, relative to the first loss."""
    assert judged(2.0, 1.5001, 1.0001).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("losses", "step"),
    [((2.0, 1.5003, 1.0), 1), ((2.0, 1.5, float("nan")), 2), ((2.0, 1.5, 0.9), 2)],
)
def test_a_loss_that_differs_is_found(losses: tuple[float, ...], step: int) -> None:
    """A loss that differs is named at its step, even if it is lower."""
    assert traces.broken(judged(*losses)).step == step


def test_who_does_not_learn_is_found() -> None:
    """Runs that agree are falsified if neither learns."""
    found = traces.broken(judged(2.0, 2.0, 2.0, cpu=(2.0, 2.0, 2.0)))
    assert "mlp on the CPU does not learn" in found.message


@pytest.mark.parametrize("losses", [(), (2.0, 1.5)])
def test_losses_that_are_missing_are_missing(losses: tuple[float, ...]) -> None:
    """A run with no losses, or too few, is inconclusive."""
    assert judged(*losses).verdict is Verdict.INCONCLUSIVE


def test_a_device_without_the_cpu_beside_it_is_inconclusive() -> None:
    """Without the run on the CPU there is nothing to compare with."""
    finding = traces.judge("device_training", [trained(SHORT, 2.0, 1.5, 1.0)], 1e-4)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no run on the CPU" in finding.reason


def test_training_is_planned_for_a_hundred_steps() -> None:
    """The plan trains two models, on the device alone."""
    known: list[Any] = CHECKS["device_training"].plan(traces.clause("device_training"))
    assert {one.workload: one.num_steps for one in known} == {"mlp": 100, "decoder": 100}
    assert all(one.backends == ("wgpu",) for one in known)
