"""F-HET-001: every backend produces gradients of the same names, shapes and dtypes, in one order.

Source: distributed-training-v1, F-HET-001.
"""

from __future__ import annotations

from itertools import zip_longest

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Manifest, Trace
from entrenar_py.shared.verdict import Finding, Tally

BACKENDS = ("cpu", "wgpu", "cuda")
DECLARED = "model"  # the backend name in the manifest that the model itself declares


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan one gradient each of the workloads linear, mlp and decoder."""
    return [
        probes.scenario("manifest", workload=workload, backends=BACKENDS)
        for workload in ("linear", "mlp", "decoder")
    ]


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that in each run, on two backends or more, all manifests equal the first.

    The first is what the network itself declares, if recorded: all backends might be wrong alike.
    """
    tally, probe = Tally(invariant.id), plan(invariant)[0].system
    for trace in evidence.usable(traces, tally):
        if trace.scenario.system == probe or trace.of(Manifest):
            _compare(tally, trace)
    return tally.finding(nothing=missing.probed(invariant, "no gradient manifest was recorded"))


def _compare(tally: Tally, trace: Trace) -> None:
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
        message = f"{manifest.backend} produced no gradient at all"
        tally.check(bool(manifest.entries), message, **evidence.place(trace, manifest))
        probes.note_software(tally, manifest)
    for manifest in manifests[1:]:
        _compare_entries(tally, manifests[0], manifest, trace)


def _compare_entries(tally: Tally, first: Manifest, other: Manifest, trace: Trace) -> None:
    for position, (expected, got) in enumerate(zip_longest(first.entries, other.entries)):
        message = f"gradient {position} on {other.backend} is not the one on {first.backend}"
        place = {"tensor": (expected or got)[0], **evidence.place(trace, other)}
        tally.equal(expected, got, message, **place)


ROWS = (
    Check(
        name="manifest",
        id="F-HET-001",
        decides="every backend gives gradients of the same names, shapes and dtypes, in one order",
        spoken_of="tensor layout shapes dtype mixed backend gradient-size",
        judge=judge,
        plan=plan,
    ),
)
