"""The bytes of a step of a star and a mesh over TCP, to compare with the simulator's.

    python -m tests.benchmarks.scale_over_tcp --workers 2 4 8

Every worker is a process on this machine. Prints a JSON line for each run: bytes sent and received
by the coordinator, and by a worker on average, in one step, without heartbeats, and without the
messages of joining and leaving.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star import processes

OF_A_STEP = ("Assign", "Computed", "TreeNode", "Average", "Staged", "Commit", "Applied")
SYSTEMS = {"star": "parameter_server", "mesh": "mesh"}
STEPS = 6


def measure(topology: str, workers: int, elements: int) -> dict[str, object]:
    """Return the bytes of a step, for a model of `elements` float32."""
    scenario = Scenario(
        system=SYSTEMS[topology],
        workload="vectors",
        world_size=workers,
        num_shards=workers,
        num_samples=workers,
        batch_size=workers,
        num_steps=STEPS,
        width=elements,
        seed=0,
    )
    num_bytes: Counter[tuple[bool, str]] = Counter()
    for one in processes.run(scenario).of(trace.Traffic):
        if one.message in OF_A_STEP:
            num_bytes[one.rank is None, one.direction] += one.bytes
    coordinator, all_workers = (
        [num_bytes[is_coordinator, direction] / STEPS for direction in ("sent", "got")]
        for is_coordinator in (True, False)
    )
    return {
        "topology": topology,
        "workers": workers,
        "elements": elements,
        "coordinator_bytes": [round(one) for one in coordinator],
        "worker_bytes": [round(one / workers) for one in all_workers],
    }


def main() -> None:
    """Measure each number of workers, as a star and as a mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--elements", type=int, default=4096)
    given = parser.parse_args()
    for topology in SYSTEMS:
        for workers in given.workers:
            print(json.dumps(measure(topology, workers, given.elements)), flush=True)


if __name__ == "__main__":
    main()
