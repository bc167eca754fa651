"""The ring in virtual time: the protocol's machines under the seeded simulator."""

from __future__ import annotations

from entrenar_py import trace
from entrenar_py.protocol.ring_worker import RingWorker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.parameter_server_simulated import SimulatedStar
from entrenar_py.systems.star.ring_member import RingMember


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return SimulatedRing(scenario).train()


class SimulatedRing(SimulatedStar):
    """A run in a simulation, in which every block goes around."""

    member = RingMember
    worker = RingWorker
    promises = ("draws",)
