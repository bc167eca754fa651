"""The mesh over TCP: this process steers, its workers exchange blocks with each other."""

from __future__ import annotations

from entrenar_py import trace
from entrenar_py.protocol.messages import Assign, Commit
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.parameter_server import ProcessStar


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return ProcessMesh(scenario).train()


class ProcessMesh(ProcessStar):
    """A run with real processes on this machine, each connected to each."""

    down = (Assign, Commit)
