"""Code shared by checks that are decided by a probe: a run of a system that tries one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Explained, Manifest, Poisoned, Product, Stepped, Trace
from entrenar_py.shared.verdict import Finding, Tally


def scenario(
    system: str, *, workload: str = "linear", seed: int = 0, world_size: int = 1, **fields: Any
) -> Scenario:
    """Return the scenario of a probe, by default on one worker."""
    return Scenario(system=system, workload=workload, world_size=world_size, seed=seed, **fields)


def judge(
    compare: Callable[[Tally, Trace], None], nothing: str
) -> Callable[[Invariant, Traces], Finding]:
    """Return a judge that applies `compare` to each run by itself.

    `nothing` is the reason if no run had anything to compare.
    """

    def judged(invariant: Invariant, traces: Traces) -> Finding:
        tally = Tally(invariant.id)
        for trace in evidence.usable(traces, tally):
            compare(tally, trace)
        return tally.finding(nothing=missing.probed(invariant, nothing))

    return judged


def note_software(
    tally: Tally, event: Attempt | Explained | Manifest | Poisoned | Product | Stepped
) -> None:
    """Add a note if a device is a software adapter, which computes on the CPU."""
    if event.software:
        tally.note(f"software adapter {event.device}")
