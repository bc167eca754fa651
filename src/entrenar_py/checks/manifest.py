"""F-HET-001: every backend produces gradients of the same names, shapes and dtypes, in one order.

Source: distributed-training-v1, F-HET-001.
"""

from __future__ import annotations

from itertools import zip_longest

from entrenar_py.checks import evidence, missing
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import Traces
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Attempt, Manifest, Trace
from entrenar_py.verdict import Finding, Tally

BACKENDS = ("cpu", "wgpu", "cuda")
DECLARED = "model"  # the manifest that the model declares, not one that a backend produced


def plan(invariant: Invariant) -> list[Scenario]:
    """One gradient of every workload."""
    return [
        Scenario(system="manifest", workload=workload, world_size=1, seed=0, backends=BACKENDS)
        for workload in ("linear", "mlp", "decoder")
    ]


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if in each run, two backends or more, all manifests equal the first one.

    The first one is the model's own where the trace has it: backends may also agree on nonsense.
    """
    tally, probe = Tally(invariant.id), plan(invariant)[0].system
    for trace in evidence.usable(traces, tally):
        if trace.scenario.system == probe or trace.of(Manifest):
            _judge_trace(tally, trace)
    return tally.finding(nothing=missing.probed(invariant, "no gradient manifest was recorded"))


def _judge_trace(tally: Tally, trace: Trace) -> None:
    manifests = sorted(trace.of(Manifest), key=lambda manifest: manifest.backend != DECLARED)
    produced = [manifest for manifest in manifests if manifest.backend != DECLARED]
    skipped = [f"{a.backend} ({a.reason})" for a in trace.of(Attempt) if not a.served]
    if len(produced) < 2:
        only = ", ".join(manifest.backend for manifest in produced) or "none"
        tally.miss(
            f"two backends are needed to compare manifests, given: {only}; "
            f"skipped: {', '.join(skipped) or 'none'}"
        )
    for reason in skipped:
        tally.note(f"skipped: {reason}")
    for manifest in produced:
        tally.check(
            bool(manifest.entries),
            f"{manifest.backend} produced no gradient at all",
            rank=manifest.rank,
            scenario=trace.scenario,
        )
        if manifest.software:
            tally.note(f"software adapter {manifest.device}")
    for manifest in manifests[1:]:
        _compare(tally, manifests[0], manifest, trace.scenario)


def _compare(tally: Tally, first: Manifest, other: Manifest, scenario: Scenario) -> None:
    for position, (expected, got) in enumerate(zip_longest(first.entries, other.entries)):
        tally.equal(
            expected,
            got,
            f"gradient {position} on {other.backend} is not the one on {first.backend}",
            tensor=(expected or got)[0],
            rank=other.rank,
            scenario=scenario,
        )


ROWS = (
    Check(
        name="manifest",
        id="F-HET-001",
        decides="every backend gives gradients of the same names, shapes and dtypes, in one order",
        judge=judge,
        plan=plan,
        explores=False,
    ),
)
