"""F-HET-002 on hand-written measurements."""

from __future__ import annotations

import pytest

from entrenar_py.checks import memory
from entrenar_py.trace import Memory, Trace
from entrenar_py.verdict import Verdict
from tests.checks import traces
from tests.checks.traces import broken


def measured(
    *, peak: int = 900, baseline: int = 500, estimate: int = 600, budget: int = 1000
) -> Trace:
    """A run on whose worker 3 this was measured."""
    return traces.hand_written(
        Memory(
            rank=3,
            backend="cpu",
            peak_bytes=peak,
            baseline_bytes=baseline,
            estimate_bytes=estimate,
            budget_bytes=budget,
        )
    )


@pytest.mark.parametrize(
    "trace",
    [measured(), measured(budget=900), measured(estimate=400), measured(estimate=800)],
)
def test_within_budget_and_foreseen(trace: Trace) -> None:
    """A peak up to the budget, and an estimate of once to twice the growth, hold."""
    finding = traces.judge("memory", [trace])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)


@pytest.mark.parametrize(
    ("trace", "message", "got"),
    [
        (measured(budget=899), "budget is 899", "900"),
        (measured(estimate=399), "the estimate was 399", "400"),
        (measured(estimate=801), "the estimate was 801", "400"),
    ],
)
def test_over_budget_or_unforeseen(trace: Trace, message: str, got: str) -> None:
    """One byte over the budget, or an estimate that is too low or no estimate, names the rank."""
    found = broken(traces.judge("memory", [trace]))
    assert (found.rank, found.got) == (3, got)
    assert message in found.message


@pytest.mark.slow
def test_a_real_worker_holds() -> None:
    """The plan's worker, in a process of its own, stays within what was foreseen."""
    clause = traces.clause("memory")
    finding = traces.judge("memory", [traces.run(subject) for subject in memory.plan(clause)])
    assert finding.verdict is Verdict.HELD, finding
