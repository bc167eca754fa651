"""The way of gradients in a run over the protocol: to the coordinator, or from worker to worker.

The one place that knows it of a system by its name, for harness and service alike.
"""

from __future__ import annotations

from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.mesh_coordinator import MeshCoordinator
from entrenar_py.scenario import Scenario

STAR, MESH, RING = "star", "mesh", "ring"
# The system of each, with real workers; the names of their simulated twins end in _SIMULATED.
SYSTEMS = {STAR: "parameter_server", MESH: "mesh", RING: "ring"}
_OF = {system: topology for topology, system in SYSTEMS.items()}
_SIMULATED = "_simulated"


def of(scenario: Scenario) -> str:
    """The topology of the scenario's system; of one that has none a star's."""
    return _OF.get(scenario.system.removesuffix(_SIMULATED), STAR)


def coordinator_of(scenario: Scenario) -> type[Coordinator]:
    """The machine that coordinates the scenario's run."""
    return Coordinator if of(scenario) == STAR else MeshCoordinator


def num_owners(scenario: Scenario) -> int:
    """Return how many average blocks: in a star the server, elsewhere every worker its share."""
    return 1 if of(scenario) == STAR else scenario.world_size
