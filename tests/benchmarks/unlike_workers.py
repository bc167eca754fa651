"""Two workers, one of which has a third of the other's speed, beside two equal ones.

`python -m tests.benchmarks.unlike_workers` runs `entrenar` with real processes. A worker computes
each shard and then sleeps until 40 ms are over, the slow one until 120 ms are. So the figures are
those of the dealing, also on a machine whose processors are shared. A step should take at most 1.15
times as long as the two need together: the number of shards divided by the sum of their speeds.
The first steps, before the speeds are known, have equally many shards for all; they are shown
beside. All runs must end on the reference's digest. Exit code 1 if one does not, or a step takes
longer.

`python -m tests.benchmarks.unlike_workers MS worker ...` is `entrenar worker ...` with shards that
take MS milliseconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from entrenar_py.entrenar import main as entrenar
from entrenar_py.shared import trace
from entrenar_py.train.coordinator.replicas import Replicas
from entrenar_py.train.wire.shard_assignment import NEEDED
from tests.train.service.cluster import Cluster, cluster, metrics, weights

FAST_MS, SLOW_MS = 40.0, 120.0  # for a shard
GOAL = 1.15
SETTLED = 2 * NEEDED  # steps at the start, in which speeds are measured
TOPOLOGIES = ("star", "mesh")
TRAINING: dict[str, Any] = {
    "workload": "mlp",
    "width": 128,
    "world_size": 2,
    "num_shards": 16,
    "batch_size": 256,
    "num_samples": 1024,
    "seed": 7,
    "num_steps": 24,
}


def main() -> int:
    """Print a row for each run; 1 if a digest was another, or a step took too long."""
    right = weights(TRAINING)
    print("| | shards | step, ms | together, ms | ratio | waits, ms | equal shards: step | waits |")
    print("|---|---|---|---|---|---|---|---|")
    pairs = [(FAST_MS, FAST_MS), (FAST_MS, SLOW_MS)]
    rows = [_row(topology, pair, right) for topology in TOPOLOGIES for pair in pairs]
    return int(not all(rows))


def _row(topology: str, shard_ms: tuple[float, float], right: str) -> bool:
    """Print a row; return whether its digest is `right` and its steps are short enough."""
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as run:
        run.configure(
            TRAINING, topology=topology, wait_for=2, metrics="metrics.jsonl", ledger="ledger.jsonl"
        )
        serving = run.coordinator()
        with ExitStack() as workers:
            for rank, milliseconds in enumerate(shard_ms):
                workers.enter_context(_worker(run, rank, milliseconds))
            serving.code()
        same = serving.lines[-1].endswith(f"weights {right}")
        steps = [one for one in metrics(run.folder) if one["what"] == "step"]
        shards = _shards(run.folder / "ledger.jsonl")
    settled, early = steps[SETTLED:], steps[1:NEEDED]
    step_ms = median(one["step_ms"] for one in settled)
    together_ms = TRAINING["num_shards"] / sum(1 / milliseconds for milliseconds in shard_ms)
    dealt = " and ".join(str(shards[steps[-1]["step"]][rank]) for rank in (0, 1))
    print(
        f"| {topology}, {shard_ms[0]:g} and {shard_ms[1]:g} ms | {dealt} | {step_ms:.0f} "
        f"| {together_ms:.0f} | {step_ms / together_ms:.2f}x | {_wait_ms(settled):.0f} "
        f"| {median(one['step_ms'] for one in early):.0f} | {_wait_ms(early):.0f} |"
        f"{'' if same else ' DIFFERENT DIGEST'}",
        flush=True,
    )
    return same and step_ms <= GOAL * together_ms


@contextmanager
def _worker(run: Cluster, rank: int, shard_ms: float) -> Iterator[None]:
    """Start a worker, and wait for its end."""
    joins = ["worker", "--coordinator", run.address, "--secret-file", str(run.secret)]
    command = [sys.executable, "-m", "tests.benchmarks.unlike_workers", str(shard_ms), *joins]
    with subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.DEVNULL) as worker:
        yield
        worker.wait(60)


def _shards(ledger: Path) -> dict[int, Counter[int]]:
    """Return how many shards of each step each rank computed."""
    counts: dict[int, Counter[int]] = {}
    for event in trace.load(ledger).of(trace.Shard):
        counts.setdefault(event.step, Counter())[event.rank] += 1
    return counts


def _wait_ms(steps: list[dict[str, Any]]) -> float:
    """Return the time for which a worker waits for the other in a step."""
    return float(median(max(one["waits_ms"].values()) for one in steps))


def _paced(shard_s: float, arguments: list[str]) -> int:
    """Run `entrenar` with shards that take `shard_s` seconds."""
    compute = Replicas.compute

    def slowly(*given: Any) -> Any:
        ends = time.perf_counter() + shard_s
        leaf = compute(*given)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return leaf

    setattr(Replicas, "compute", slowly)  # noqa: B010  (mypy allows no other method)
    return entrenar(arguments)


if __name__ == "__main__":
    sys.exit(_paced(float(sys.argv[1]) / 1e3, sys.argv[2:]) if sys.argv[1:] else main())
