"""The ring over TCP: this process steers, its workers send blocks around."""

from __future__ import annotations

from entrenar_py import trace
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.mesh import ProcessMesh


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return ProcessRing(scenario).train()


class ProcessRing(ProcessMesh):
    """A run with real processes on this machine, each connected to the next."""

    promises = ("draws",)
