"""The parts of systems that variants change, and the small runs in which the change shows.

Sizes are chosen so that no bug hides: shards of unequal size, a short last batch, two epochs,
plain SGD without clipping unless a bug needs more.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import sharding

REFERENCE = "entrenar_py.train.reference"
REPLICAS = "entrenar_py.train.coordinator.replicas"
COORDINATOR = "entrenar_py.train.wire.coordinator"
WORKER = "entrenar_py.train.wire.worker"
MESH_COORDINATOR = "entrenar_py.train.wire.mesh_coordinator.MeshCoordinator"
MESH_WORKER = "entrenar_py.train.wire.mesh_worker.MeshWorker"
RING_WORKER = "entrenar_py.train.wire.mesh_worker.RingWorker"
RING_EXCHANGE = "entrenar_py.train.coordinator.topology.RingExchange"
TREE_EXCHANGE = "entrenar_py.train.coordinator.topology.TreeExchange"
FRAMES = "entrenar_py.train.wire.frames"
SERVER = "entrenar_py.train.coordinator.server"
MEMBER = "entrenar_py.train.coordinator.member"
TEXTBOOK = "entrenar_py.systems.single.textbook"
REPLICA = "entrenar_py.systems.single.textbook_replica"
TRAINING = "entrenar_py.train.arithmetic"
DDP = "entrenar_py.systems.torch.ddp"
FSDP = "entrenar_py.systems.torch.fsdp"
TORCH_MODULE = "entrenar_py.systems.torch.workload_module"


def textbook(**changes: Any) -> Scenario:
    """Return a run of two ranks of the textbook trainer: 21 digits in batches of 8, 8, 5."""
    usual: dict[str, Any] = {
        "system": "textbook",
        "workload": "mlp",
        "world_size": 2,
        "seed": 0,
        "num_shards": 5,
        "num_samples": 21,
        "batch_size": 8,
        "num_steps": 4,
        "width": 8,
        "detail": "values",
    }
    return Scenario(**{**usual, **changes})


def ddp(**changes: Any) -> Scenario:
    """Return a run of two ranks of torch's DistributedDataParallel, each in its own process."""
    return textbook(**{"system": "ddp", "num_steps": 2, **changes})


def fsdp(**changes: Any) -> Scenario:
    """Return a run of two ranks of torch's FSDP."""
    return textbook(**{"system": "fsdp", "num_steps": 2, **changes})


def reference(**changes: Any) -> Scenario:
    """Return a run of three workers of the reference trainer, with shards 0-1, 2-3 and 4.

    The shards of a full batch hold 2, 2, 2, 1 and 1 samples.
    """
    return textbook(**{"system": "reference", "world_size": 3, **changes})


def star(**changes: Any) -> Scenario:
    """Return the same run with a simulated parameter server."""
    return reference(**{"system": "parameter_server_simulated", **changes})


def mesh(**changes: Any) -> Scenario:
    """Return the same run with a simulated mesh, in which workers exchange blocks."""
    return reference(**{"system": "mesh_simulated", "options": {"block_bytes": 400}, **changes})


def vectors(**changes: Any) -> Scenario:
    """Return a run of three workers of a simulated ring, with shards 0-1, 2-3 and 4.

    Vectors have 51 elements in five blocks: the last block has 11 elements, the others 10.
    """
    usual = {"system": "ring_simulated", "workload": "vectors", "width": 51}
    return reference(**{**usual, "num_steps": 2, "options": {"block_bytes": 44}, **changes})


def visit(scenario: Scenario, *, epoch: int = 0) -> list[int]:
    """Return the sample ids in the order in which a correct trainer visits them in `epoch`."""
    return list(sharding.order(scenario.num_samples, scenario.rng("order", epoch)))
