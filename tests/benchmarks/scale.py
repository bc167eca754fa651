"""A star or a mesh of many workers in the simulator: traffic, virtual seconds, and the same bits.

    python -m tests.benchmarks.scale --workers 10 100 1000 --topology star --steps 20

The state machines, the frames, the additions and the weights are those of `entrenar`. Clocks and
links are simulated: every process has a link of `--mbit` in each direction, and needs
`--message-us` for each message that it sends or receives. Workers die at random times, at
`--change` percent of them a minute, and as many join. With `--silent`, a dead worker's machine is
gone, so nobody notices before `dead_after_s`.

Prints a JSON line for each run. `digest` is `same` if all weights have the bits of a run of one
worker. Bytes and messages are those of one step without a loss or join. `cpu_s` is measured: the
processor seconds that this machine took for the coordinator's part of a step. CI does not run it,
but a test runs it with fewer workers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from statistics import mean, median
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
from torch import Tensor, from_numpy

from entrenar_py.compute import Batch, DropFunction, LinearFunction, Tensors
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.datasets import digest
from entrenar_py.train.arithmetic.tensors import Array, TensorSpec, Workload
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.replicas import Replicas
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.effects import Effect, Gather, Joined, Left
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.injections import unmeddled
from entrenar_py.train.wire_io.simulated_links import Network
from entrenar_py.train.wire_io.simulation import Node, Simulation

ROWS = 64  # different samples; the others repeat them
PATIENCE_S = 3600.0  # virtual seconds after which a run counts as stuck


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One run: its workers and their links, and the model's size in float32 elements.

    `change` is the share of the workers that die in a minute, and that join.
    """

    trainer: str
    workers: int
    steps: int
    elements: int = 4096
    network: Network = field(default_factory=Network)
    change: float = 0.0
    silent: bool = False
    seed: int = 0
    timing: Timing = field(default_factory=Timing)

    @property
    def plan(self) -> TrainingPlan:
        """The run of `workers`, a shard of one sample for each."""
        shards = self.workers
        return TrainingPlan(
            trainer=self.trainer,
            workload="vectors",
            world_size=self.workers,
            num_shards=shards,
            num_samples=shards,
            batch_size=shards,
            num_steps=self.steps,
            learning_rate=0.1,
            width=self.elements,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run. Bytes and messages are of a step in which nobody came or went.

    `worker_bytes` are those of the worker with the most. Seconds are virtual, except `cpu_s` and
    `wall_s`.
    """

    trainer: str
    workers: int
    elements: int
    status: str
    digest: str
    messages: int
    coordinator_bytes: tuple[int, int]  # out of its link, and into it
    worker_bytes: tuple[int, int]
    step_s: float
    mean_step_s: float
    longest_step_s: float
    lost: int
    joined: int
    cpu_s: float
    wall_s: float


class Quadratic(Workload):
    """Half the squared distance to one of ROWS points, so a gradient costs one subtraction."""

    name = "quadratic"

    def __init__(self, num_samples: int, length: int) -> None:
        self.num_samples = num_samples
        self.specs = (TensorSpec("vector", (length,), "trainable", decayed=False),)
        self._points = np.random.default_rng(0).standard_normal((ROWS, length), np.float32)
        self.data_digest = digest(self._points)

    def batch(self, ids: Any) -> tuple[Tensor]:
        return (from_numpy(self._points[np.array(ids) % ROWS]),)

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        return ((tensors["vector"] - batch[0]) ** 2).sum() / 2

    def gradients(
        self, tensors: Tensors, ids: Any, *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        away = tensors["vector"].detach().numpy() - self._points[np.array(ids) % ROWS]
        gradient = away.sum(axis=0, dtype=np.float32) * np.float32(scale)
        return float((away * away).sum()) / 2, [gradient]


Result = TypeVar("Result")


class Stopwatch:
    """The processor seconds in the functions that it watches, each second counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def watched(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return `function`, watched."""

        def run(*arguments: Any) -> Result:
            self._depth += 1
            begun = time.process_time()
            try:
                return function(*arguments)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begun

        return run


@contextmanager
def one_order() -> Iterator[None]:
    """Let all workers of this process share the order of the samples and the shards of a step.

    Each would have a copy, which takes most of the memory of 10,000 workers.
    """
    orders: dict[tuple[int, int, int], sharding.Ids] = {}
    drawn, alone, shared = Replicas._order, sharding.cut, cache(sharding.cut)

    def order(self: Replicas, epoch: int) -> sharding.Ids:
        key = self.plan.seed, self.plan.num_samples, epoch
        if key not in orders:
            orders[key] = tuple(drawn(self, epoch))
        return orders[key]

    def cut(ids: sharding.Ids, num_parts: int) -> list[sharding.Ids]:
        return (shared if isinstance(ids, tuple) else alone)(ids, num_parts)

    with patch.object(Replicas, "_order", order), patch.object(sharding, "cut", cut):
        yield


@dataclass(frozen=True)
class Counts:
    """What has happened when a step begins. `links` has the bytes out of each link and into it."""

    now: float
    messages: int
    links: list[tuple[int, int]]
    cpu_s: float


class Crowd:
    """The workers of one run in one simulation, and what is counted."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, plan = cluster, cluster.plan
        self._workload = Quadratic(plan.num_samples, plan.width)
        self._server = Server(plan, workload=self._workload)
        self._watch, self._random = Stopwatch(), random.Random(cluster.seed)
        self._counts: dict[int, Counts] = {}  # step -> when it began for the first time
        self._changed: set[int] = set()  # steps in which a worker left or joined
        self._lost = self._joined = 0
        self._nodes: list[Node] = []
        self._server.reduce = self._watch.watched(self._server.reduce)  # type: ignore[method-assign]
        run = self._server.run_between(0, plan.num_steps)
        self._simulation = Simulation(
            replace(run, num_awaited=cluster.workers),
            self._server,
            self._member,
            seed=cluster.seed,
            meddle=unmeddled,
            timing=cluster.timing,
            worker=topology.of(plan).worker,
            notify=self._notify,
            network=cluster.network,
        )
        end: Any = self._simulation.coordinator
        end.filled, end.tick = self._watch.watched(end.filled), self._watch.watched(end.tick)

    def train(self) -> tuple[str, list[bytes]]:
        """Run to the end; return the status, and the weights of all workers that are left."""
        self._nodes = [self._simulation.start(rank, "cpu") for rank in range(self._cluster.workers)]
        finish = self._simulation.run(until_s=PATIENCE_S)
        ended = [node.end for node in self._nodes if node.end.finished == finish]
        there = [cast("Member", end.hands) for end in ended]
        last = [one.worker for one in there if one.step == self._cluster.steps]  # not just joining
        weights = [worker.replica.parameters.tobytes() for worker in last]
        return finish.reason or finish.status, weights

    def outcome(self, status: str, same: bool, wall_s: float) -> Outcome:
        """Return the counts of the run, which ended with `status`."""
        *steps, _ = counts = self._counts
        quiet = [step for step in steps if not {step, step + 1} & self._changed] or steps
        took_s = [counts[step + 1].now - counts[step].now for step in steps]
        before, after = counts[quiet[-1]], counts[quiet[-1] + 1]
        coordinator, *others = [
            (out_after - out_before, into_after - into_before)
            for (out_before, into_before), (out_after, into_after) in zip(
                before.links, after.links, strict=False
            )
        ]
        cpu_s = counts[steps[-1] + 1].cpu_s - counts[steps[0]].cpu_s
        return Outcome(
            trainer=self._cluster.trainer,
            workers=self._cluster.workers,
            elements=self._cluster.elements,
            status=status,
            digest="same" if same else "different",
            messages=after.messages - before.messages,
            coordinator_bytes=coordinator,
            worker_bytes=max(others, key=sum),
            step_s=round(median(took_s), 4),
            mean_step_s=round(mean(took_s), 4),
            longest_step_s=round(max(took_s), 4),
            lost=self._lost,
            joined=self._joined,
            cpu_s=round(cpu_s / len(took_s), 4),
            wall_s=round(wall_s, 1),
        )

    def _member(self) -> Member:
        return Member(self._cluster.plan, workload=self._workload)

    def _notify(self, effect: Effect) -> None:
        if isinstance(effect, Gather) and effect.step not in self._counts:
            self._count(effect.step)
        elif isinstance(effect, Gather | Left) or (isinstance(effect, Joined) and effect.late):
            self._changed.add(effect.step)

    def _count(self, step: int) -> None:
        if not self._counts and self._cluster.change:
            self._wait(self._lose)
            self._wait(self._join)
        simulation = self._simulation
        cards = [simulation.card, *(node.card for node in simulation.nodes)]
        links = [(card.out.bytes, card.into.bytes) for card in cards]
        messages = sum(card.out.messages for card in cards)
        self._counts[step] = Counts(simulation.now, messages, links, self._watch.seconds)

    # --- losses and joins -------------------------------------------------------------------------

    def _wait(self, action: Callable[[], None]) -> None:
        rate = self._cluster.change * self._cluster.workers / 60
        self._simulation.later(self._random.expovariate(rate), action)

    def _lose(self) -> None:
        there: list[Node] = [node for node in self._simulation.nodes if node.alive]
        if len(there) > 1:
            self._simulation.kill(self._random.choice(there), silently=self._cluster.silent)
            self._lost += 1
        self._wait(self._lose)

    def _join(self) -> None:
        if self._lost > self._joined:  # a rank is free
            self._nodes.append(self._simulation.start(None, "cpu"))
            self._joined += 1
        self._wait(self._join)


def simulate(cluster: Cluster) -> Outcome:
    """Train with `cluster`, and compare all weights with those of one worker."""
    with one_order():
        begun = time.perf_counter()
        crowd = Crowd(cluster)
        status, weights = crowd.train()
        wall_s = time.perf_counter() - begun
        return crowd.outcome(status, set(weights) == {alone(cluster)}, wall_s)


def alone(cluster: Cluster) -> bytes:
    """Return the weights after the same run on one worker."""
    return _alone(replace(cluster, trainer="parameter_server", network=Network(), change=0.0))


@cache
def _alone(cluster: Cluster) -> bytes:
    plan = cluster.plan.with_(world_size=1)
    workload = Quadratic(plan.num_samples, plan.width)
    server = Server(plan, workload=workload)
    simulation = Simulation(
        server.run_between(0, plan.num_steps),
        server,
        partial(Member, plan, workload=workload),
        seed=0,
        meddle=unmeddled,
        timing=cluster.timing,
    )
    simulation.start(0, "cpu")
    simulation.run(until_s=PATIENCE_S)
    return server.replica.replica.parameters.tobytes()


def main() -> None:
    """Simulate each cluster that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", choices=sorted(topology.BY_NAME), default="star")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--latency-ms", type=float, nargs=2, default=(0.1, 2.0))
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--message-us", type=float, default=100.0)
    parser.add_argument("--change", type=float, default=0.0, help="percent a minute")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--dead-after", type=float, default=Timing().dead_after_s, metavar="S")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    low_ms, high_ms = given.latency_ms
    network = Network(
        latency_s=(low_ms / 1e3, high_ms / 1e3),
        bytes_s=given.mbit * 1e6 / 8,
        message_s=given.message_us / 1e6,
    )
    timing = Timing(heartbeat_s=given.dead_after / 6, dead_after_s=given.dead_after)
    for workers in given.workers:
        cluster = Cluster(
            trainer=topology.BY_NAME[given.topology].trainer,
            workers=workers,
            steps=given.steps,
            elements=given.elements,
            network=network,
            change=given.change / 100,
            silent=given.silent,
            timing=timing,
            seed=given.seed,
        )
        print(json.dumps(asdict(simulate(cluster))), flush=True)


if __name__ == "__main__":
    main()
