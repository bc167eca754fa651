"""The same training on 1, 2, 3, 4 and 8 workers, down to the last bit.

    python examples/worker_count.py
    python examples/worker_count.py decoder --steps 10

The batch is cut into eight logical shards however many workers there are, and their gradients are
added along one fixed tree: who computes which shard changes no bit of the weights. Exits 1 if two
workers, or two rows, differ.
"""

from __future__ import annotations

import argparse
import sys
import time

from blake3 import blake3
from rich.console import Console
from rich.table import Table

from entrenar_py import systems, trace
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.trace import Scenario

WORKLOADS = ("linear", "mlp", "decoder")
WORKERS = (1, 2, 3, 4, 8)


def train(scenario: Scenario) -> set[tuple[float, str]]:
    """Last loss and weight digest of every worker: one pair if they agree."""
    run = systems.run(scenario)
    if run.end.status != "completed":
        raise SystemFailure(f"world_size={scenario.world_size}: {run.end.status} {run.end.reason}")
    last = [update for update in run.of(trace.Update) if update.step == scenario.num_steps - 1]
    return {(update.loss or 0.0, digest(update)) for update in last}


def digest(update: trace.Update) -> str:
    """16 hex digits over the names and digests of all weights and buffers."""
    tensors = {**update.weights, **update.buffers}
    text = "\n".join(f"{name} {record.digest}" for name, record in tensors.items())
    return str(blake3(text.encode()).hexdigest(8))


def main(arguments: list[str]) -> int:
    """Prints the table; 0 if there is one result in it, 1 if there are more."""
    cli = argparse.ArgumentParser(description="The same training on 1, 2, 3, 4 and 8 workers.")
    cli.add_argument("workload", nargs="?", default="mlp", choices=WORKLOADS)
    cli.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    given = cli.parse_args(arguments)
    try:
        single = Scenario(
            system="reference",
            workload=given.workload,
            world_size=1,
            num_steps=given.steps,
            optimizer="adamw",
            clip_norm=1.0,
            seed=0,
        )
    except UsageError as error:
        cli.error(str(error))
    train(single.with_(num_steps=1))  # imports and data, which no row should pay for
    table = Table("workers", "final loss", "weights", "steps/s", box=None)
    results = set()
    for world_size in WORKERS:
        start = time.perf_counter()
        found = train(single.with_(world_size=world_size))
        rate = given.steps / (time.perf_counter() - start)
        for loss, weights in sorted(found):
            table.add_row(str(world_size), f"{loss:.9f}", weights, f"{rate:.0f}")
        results |= found
    Console().print(table)
    print("the same bits in every row" if len(results) == 1 else f"{len(results)} results, not one")
    return 0 if len(results) == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
