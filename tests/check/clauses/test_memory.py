"""F-HET-002 on handwritten measurements."""

from __future__ import annotations

import pytest

from entrenar_py.check.clauses import backends
from entrenar_py.shared.trace import Attempt, Memory, Trace
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import broken

UNIT = 2**20


def measured(
    *,
    peak: int = 900,
    baseline: int = 500,
    estimate: int = 600,
    budget: int = 1000,
    world_size: int = 1,
) -> Trace:
    """Return a run with this measurement of worker 0, in units large enough to be judged."""
    peak, baseline, estimate, budget = (UNIT * n for n in (peak, baseline, estimate, budget))
    return traces.hand_written(
        Memory(
            rank=0,
            backend="cpu",
            peak_bytes=peak,
            baseline_bytes=baseline,
            estimate_bytes=estimate,
            budget_bytes=budget,
        ),
        subject=traces.scenario(world_size=world_size),
    )


@pytest.mark.parametrize(
    "trace",
    [measured(), measured(budget=900), measured(estimate=400), measured(estimate=600)],
)
def test_within_budget_and_foreseen(trace: Trace) -> None:
    """A peak within the budget, and an estimate of 1 to 1.5 times the growth, hold."""
    finding = traces.judge("memory", [trace])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)


@pytest.mark.parametrize(
    ("trace", "message", "got"),
    [
        (measured(budget=899), "budget is", 900),
        (measured(estimate=399), "the estimate was", 400),
        (measured(estimate=601), "the estimate was", 400),
        (measured(peak=500), "grew by 0 bytes, the estimate was", 0),
        (measured(peak=601, estimate=100), "the estimate was", 101),
    ],
)
def test_over_budget_or_unforeseen(trace: Trace, message: str, got: int) -> None:
    """A peak over the budget, or an estimate that is too low or too high, names the rank."""
    found = broken(traces.judge("memory", [trace]))
    assert (found.rank, found.got) == (0, str(got * UNIT))
    assert message in found.message


@pytest.mark.parametrize("peak", [500, 501, 627])
def test_small_models_are_bounded_only(peak: int) -> None:
    """Below 128 MiB an estimate may be any upper bound, since free memory may hide growth."""
    finding = traces.judge("memory", [measured(peak=peak, estimate=127)])
    assert finding.verdict is Verdict.HELD


def test_every_rank_is_asked_for() -> None:
    """A rank without a measurement is named, and the run is inconclusive."""
    finding = traces.judge("memory", [measured(world_size=3)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason == "the memory of ranks [1, 2] was not measured"
    nothing = traces.judge("memory", [traces.hand_written()])
    assert nothing.reason.startswith("no worker's memory was measured: F-HET-002 is decided by a")


@pytest.mark.slow
def test_real_workers_hold() -> None:
    """Workers, each in a process of its own, stay within what was foreseen.

    Of the first scenario of the plan; `make verify` runs all of it.
    """
    subject = backends.plan_memory(traces.clause("memory"))[0]
    finding = traces.judge("memory", [traces.run(subject)])
    assert finding.verdict is Verdict.HELD, finding


def on_device(*, peak: int = 9, estimate: int = 9, reported: int | None = None) -> Trace:
    """Return a run whose worker is on an adapter."""
    return traces.hand_written(
        Memory(
            rank=0,
            backend="wgpu",
            peak_bytes=UNIT * peak,
            baseline_bytes=0,
            estimate_bytes=UNIT * estimate,
            budget_bytes=UNIT * 10,
            reported_bytes=reported,
        ),
        subject=traces.scenario(world_size=1, backends=("wgpu",)),
    )


def test_on_a_device_little_stands_out() -> None:
    """An estimate of 9 MiB on a device is compared with the memory that was needed."""
    assert traces.judge("memory", [on_device()]).verdict is Verdict.HELD
    assert traces.judge("memory", [on_device(peak=5)]).verdict is Verdict.FALSIFIED
    assert traces.judge("memory", [on_device(peak=3, estimate=7)]).verdict is Verdict.HELD


def test_what_a_device_does_not_say_is_said() -> None:
    """A note says if a device reports no memory size, so that the scenario's budget counts."""
    silent, telling = (traces.judge("memory", [on_device(reported=n)]) for n in (None, 2**40))
    assert any("wgpu reports no size of its memory" in note for note in silent.notes)
    assert not telling.notes


def test_a_device_that_is_not_there_is_noted() -> None:
    """The rank of an absent device is not missing; without any measured rank nothing compares."""
    absent = traces.hand_written(
        Attempt(backend="wgpu", served=False, reason="no adapter"),
        subject=traces.scenario(world_size=1, backends=("wgpu",)),
    )
    finding = traces.judge("memory", [absent])
    assert finding.verdict is Verdict.INCONCLUSIVE
    together = traces.judge("memory", [absent, measured()])
    assert together.verdict is Verdict.HELD
    assert "not measured: wgpu (no adapter)" in together.notes
