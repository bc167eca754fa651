"""The topologies of a run over the protocol (star, mesh, ring), and the classes that each uses.

Only this module derives a topology from a system's name, for the harness and the service alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import blocks
from entrenar_py.train.coordinator.exchanges import RingExchange, TreeExchange
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker, RingWorker
from entrenar_py.train.wire.messages import Assign, Average, Commit, Message, Weights
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.tcp import MeshClient, WorkerClient

_SIMULATED = "_simulated"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One topology.

    `system` names the system with real workers; the simulated one has the suffix `_simulated`.
    `exchange` adds, in a worker, what other workers send. It is None in a star, where everything
    goes to the coordinator. `down` lists the messages of a step that the coordinator sends.
    `promise` is what the trace promises if all workers use one backend.
    """

    system: str
    coordinator: type[Coordinator]
    worker: type[Worker]
    client: type[WorkerClient]
    exchange: type[TreeExchange] | type[RingExchange] | None
    down: tuple[type[Message], ...] = (Assign, Commit)
    promise: str = "bitwise"

    def num_owners(self, world_size: int) -> int:
        """Return the number of processes that average blocks: 1 in a star, else all workers."""
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
    """Return the topology of the scenario's system; STAR if the system has none."""
    return _BY_SYSTEM.get(scenario.system.removesuffix(_SIMULATED), STAR)


def num_blocks(scenario: Scenario, num_elements: int) -> int:
    """Return the number of blocks of a vector; option `block_bytes` limits their size.

    Raises UsageError if that is not a size.
    """
    if "block_bytes" not in scenario.options:
        return blocks.num_blocks(num_elements, of(scenario).num_owners(scenario.world_size))
    block_bytes = scenario.options["block_bytes"]
    if type(block_bytes) is not int or block_bytes < 4:
        raise UsageError(f"options block_bytes={block_bytes!r}: use a whole number of bytes >= 4")
    return min(-(-4 * num_elements // (block_bytes // 4 * 4)), num_elements)
