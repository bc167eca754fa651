"""The mesh in virtual time: the protocol's machines under the seeded simulator."""

from __future__ import annotations

from entrenar_py import trace
from entrenar_py.protocol.mesh_worker import MeshWorker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.mesh_member import MeshMember
from entrenar_py.systems.star.parameter_server_simulated import SimulatedStar


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return SimulatedMesh(scenario).train()


class SimulatedMesh(SimulatedStar):
    """A run in a simulation, in which the workers exchange blocks with each other."""

    member = MeshMember
    worker = MeshWorker
