"""The service with gradients as people have them, beside gloo's all-reduce of the same vector.

`python -m tests.benchmarks.service` runs `entrenar` with real processes: star and mesh, plain and
over TLS. Each is timed undisturbed, and then run again with a worker and the coordinator killed;
both must end on the reference's digest. Exit code 1 if one does not.

Ours is `exchange_ms`, from the last shard computed until everyone holds the average; gloo's is the
sum and its division, before and after each run of ours, since all processors are taken by either.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.conftest import timed
from tests.benchmarks.test_exchange import reducing
from tests.train.service.cluster import Cluster, Process, cluster, metrics, weights
from tests.train.wire_io.certificates import Authority

# Widths of `mlp`, whose gradient has so many bytes.
SIZES = {"1.1 MB": 490, "23.6 MB": 2389, "64 MB": 3968}
GOALS = {"star": 2.0, "mesh": 1.3}
NUM_STEPS = 12
UNTIMED = 2  # steps at the start, in which memory is touched for the first time
ROUNDS = 8  # of gloo's, before and after
PATIENCE_S = 240.0
TIMING = {"heartbeat_s": 2, "dead_after_s": 60}


def main() -> int:
    """Runs what is asked for, and prints a table; 1 if a digest was another."""
    given = _given()
    failed = False
    for num_workers in given.workers:
        for size in given.sizes:
            for topology in given.topologies:
                for tls in given.tls:
                    failed |= not _row(topology, tls == "tls", size, num_workers)
    return int(failed)


def _given() -> argparse.Namespace:
    one = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    one.add_argument("--sizes", nargs="+", choices=SIZES, default=["64 MB"])
    one.add_argument("--workers", nargs="+", type=int, default=[4])
    one.add_argument("--topologies", nargs="+", choices=GOALS, default=[*GOALS])
    one.add_argument("--tls", nargs="+", choices=("plain", "tls"), default=["plain", "tls"])
    return one.parse_args()


def training(size: str, num_workers: int) -> dict[str, Any]:
    """One sample and one shard a worker: hardly any computing beside the exchange."""
    return {
        "workload": "mlp",
        "width": SIZES[size],
        "world_size": num_workers,
        "num_shards": num_workers,
        "batch_size": num_workers,
        "seed": 7,
        "num_steps": NUM_STEPS,
    }


def _row(topology: str, over_tls: bool, size: str, num_workers: int) -> bool:
    """Prints one row; whether both digests were right."""
    asked = training(size, num_workers)
    num_elements = (64 + asked["width"] + 1 + 1 + 10) * asked["width"] + 10 + 64
    gloo: list[float] = []
    _all_reduce(gloo, num_elements, num_workers)
    with _prepared(asked, topology, over_tls) as (run, given):
        undisturbed = _undisturbed(run, given, num_workers)
        steps = [one for one in metrics(run.folder) if one["what"] == "step"][UNTIMED:]
    _all_reduce(gloo, num_elements, num_workers)
    with _prepared(asked, topology, over_tls) as (run, given):
        disturbed = _disturbed(run, given, num_workers)
    right = weights(asked)
    ours, whole = ([one[name] for one in steps] for name in ("exchange_ms", "step_ms"))
    theirs = [1e3 * one for one in gloo]
    same = undisturbed == disturbed == right
    print(
        f"| {topology}{', TLS' if over_tls else ''} | {size} | {num_workers} "
        f"| {min(ours):.0f} ({median(ours):.0f}) | {min(theirs):.0f} ({median(theirs):.0f}) "
        f"| {min(ours) / min(theirs):.2f}x ({median(ours) / median(theirs):.2f}x) "
        f"| {GOALS[topology]}x | {min(whole):.0f} ({median(whole):.0f}) "
        f"| {'the same' if same else f'DIFFERENT: {undisturbed} {disturbed} {right}'} |",
        flush=True,
    )
    return same


def _all_reduce(seconds: list[float], num_elements: int, num_workers: int) -> None:
    """Adds the times of some rounds of gloo's."""
    with reducing(num_elements, num_workers) as step:
        step()
        one = timed(step)
        for _ in range(ROUNDS):
            one()
    seconds += one.seconds


@contextmanager
def _prepared(
    asked: dict[str, Any], topology: str, over_tls: bool
) -> Iterator[tuple[Cluster, list[object]]]:
    """A folder with a configuration, and what a worker is given for it."""
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as made:
        service: dict[str, Any] = {
            "topology": topology,
            "wait_for": asked["world_size"],
            "timing": TIMING,
            "metrics": "metrics.jsonl",
            "checkpoint": {"path": "state", "every_steps": 3},
            "ledger": "ledger.jsonl",
        }
        given: list[object] = []
        if over_tls:
            authority = Authority(made.folder, "ca")
            own, shown = authority.signed("coordinator"), authority.signed("worker")
            service["tls"] = {"cert": own.cert.name, "key": own.key.name, "ca": authority.ca.name}
            given = ["--tls-ca", authority.ca, "--tls-cert", shown.cert, "--tls-key", shown.key]
        made.configure(asked, **service)
        yield made, given


def _undisturbed(run: Cluster, given: list[object], num_workers: int) -> str:
    """Return the digest that the coordinator holds at the end of an undisturbed run."""
    serving = run.coordinator()
    for _ in range(num_workers):
        run.worker(*given)
    return _digest(serving)


def _disturbed(run: Cluster, given: list[object], num_workers: int) -> str:
    """The same when a worker is killed and replaced, and then the coordinator is, too."""
    first = run.coordinator()
    workers = [run.worker(*given) for _ in range(num_workers)]
    _await_step(run, 1)
    workers[0].kill()
    run.worker(*given)
    _await_step(run, 5)
    first.kill()
    return _digest(run.coordinator("--resume"))


def _await_step(run: Cluster, step: int) -> None:
    """Returns when `step` is made."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        path = run.folder / "metrics.jsonl"
        if path.exists() and any(
            one.get("loss") and one["step"] >= step for one in metrics(run.folder)
        ):
            return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not made: {[one.lines for one in run.processes]}")


def _digest(serving: Process) -> str:
    """The weights that it names at its end; all that it said, if it names none."""
    serving.code()
    said = serving.lines[-1]
    return said.rpartition("weights ")[2] if said.startswith("completed") else serving.text


if __name__ == "__main__":
    sys.exit(main())
