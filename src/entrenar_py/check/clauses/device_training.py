"""F-WGPU-008: training on a device is training on the CPU, loss by loss.

Source: wgpu-backend-v1. Its bound is derived in docs/numerics.md.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import ON_CPU, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Finding, Tally

CPU = ("cpu",)
NUM_STEPS = 100
FALLEN = 0.99  # of the first loss: two runs that don't train at all would agree, too


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan reference training on one worker and one shard, so that a device makes whole steps."""
    fields: dict[str, Any] = {"num_shards": 1, "num_samples": 21, "batch_size": 7}
    fields |= {"num_steps": NUM_STEPS, "learning_rate": 0.1, "backends": ("wgpu",)}
    return [probes.scenario("reference", workload=name, **fields) for name in ("mlp", "decoder")]


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that losses on the device and the CPU are equal, and fall. In each step the tolerance
    is relative to the CPU's first loss, or to its loss in that step if that is larger.
    """
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None and runs.base.scenario.backends != CPU:
        for model in runs.of(ON_CPU):
            _compare(tally, model, runs.base, invariant.tolerance)
        if not runs.of(ON_CPU):
            tally.miss("there is no run on the CPU to compare with")
    return tally.finding(nothing=missing.probed(invariant, "no training on a device was recorded"))


def _compare(tally: Tally, model: Trace, trace: Trace, tolerance: float | None) -> None:
    what = f"{trace.scenario.workload} on {trace.scenario.backends[0]}"
    if tolerance is None:
        tally.miss("the clause has no tolerance: give it one, with tolerance_kind: relative")
        return
    expected, got = _losses(model), _losses(trace)
    if len(expected) < trace.scenario.num_steps or expected.keys() != got.keys():
        tally.miss(f"{what}: {len(got)} losses of {trace.scenario.num_steps} steps were recorded")
        return
    first = expected[min(expected)]
    for step, right in expected.items():
        allowed = tolerance * max(abs(first), abs(right))
        tally.check(
            abs(got[step] - right) <= allowed,
            f"{what}: the loss of step {step} is {got[step]:.7g}, on the CPU {right:.7g}",
            step=step,
            expected=f"{right:.7g} +- {allowed:.2g}",
            got=f"{got[step]:.7g}",
            scenario=trace.scenario,
        )
    last = max(expected)
    for name, losses in (("the CPU", expected), (trace.scenario.backends[0], got)):
        message = f"{trace.scenario.workload} on {name} does not learn"
        place = {"step": last, "scenario": trace.scenario}
        tally.at_most(FALLEN * first, losses[last], message, form=".7g", **place)


def _losses(trace: Trace) -> dict[int, float]:
    """Return step -> mean loss, for the steps with a known loss."""
    losses = {}
    for step, by_rank in evidence.ranks_by_step(evidence.with_losses(trace)):
        loss = evidence.any_rank(by_rank).loss
        if loss is not None:
            losses[step] = loss
    return losses
