"""The ways that gradients go in a run over the protocol, and the parts of a run of each.

The one place that knows it of a system by its name, for harness and service alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.drivers.tcp import WorkerClient
from entrenar_py.drivers.tcp_mesh import MeshClient
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.mesh_coordinator import MeshCoordinator
from entrenar_py.protocol.mesh_worker import MeshWorker
from entrenar_py.protocol.messages import Assign, Average, Commit, Message, Weights
from entrenar_py.protocol.ring_worker import RingWorker
from entrenar_py.protocol.worker import Worker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.exchanges import RingExchange, TreeExchange

_SIMULATED = "_simulated"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One way of gradients.

    `system` is the one with real workers; the name of its simulated twin ends in `_simulated`.
    `exchange` is a worker's part that adds what other workers send; None in a star, where all goes
    to the coordinator. `down` are the messages of a step that the coordinator sends. `promise` is
    what a run on one backend promises of its bits.
    """

    system: str
    coordinator: type[Coordinator]
    worker: type[Worker]
    client: type[WorkerClient]
    exchange: type[TreeExchange] | type[RingExchange] | None
    down: tuple[type[Message], ...] = (Assign, Commit)
    promise: str = "bitwise"

    def num_owners(self, world_size: int) -> int:
        """Return how many processes average blocks: a star's server, or each worker its share."""
        return 1 if self is STAR else world_size


STAR = Topology(
    system="parameter_server",
    coordinator=Coordinator,
    worker=Worker,
    client=WorkerClient,
    exchange=None,
    down=(Assign, Average, Weights, Commit),
)
MESH = Topology(
    system="mesh",
    coordinator=MeshCoordinator,
    worker=MeshWorker,
    client=MeshClient,
    exchange=TreeExchange,
)
RING = Topology(
    system="ring",
    coordinator=MeshCoordinator,
    worker=RingWorker,
    client=MeshClient,
    exchange=RingExchange,
    promise="draws",
)
BY_NAME = {"star": STAR, "mesh": MESH, "ring": RING}
_BY_SYSTEM = {topology.system: topology for topology in BY_NAME.values()}


def of(scenario: Scenario) -> Topology:
    """Return the topology of the scenario's system; of one that has none a star's."""
    return _BY_SYSTEM.get(scenario.system.removesuffix(_SIMULATED), STAR)
