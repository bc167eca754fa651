"""A step that is nothing but communication: hands without a model, and the worker that has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Semaphore
from typing import Any

import numpy as np

from entrenar_py.train.arithmetic import blocks, reduction
from entrenar_py.train.arithmetic.blocks import Blocks, Sums
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Conclude, Finish, Joined, Left, Stop
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker, RingWorker
from entrenar_py.train.wire.messages import (
    Applied,
    Average,
    Computed,
    Loaded,
    Message,
    Partial,
    Piece,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.terms import Run, Terms, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.endpoints import Saving
from entrenar_py.train.wire_io.processes import Job
from entrenar_py.train.wire_io.tcp import CoordinatorServer, MeshClient, WorkerClient

TERMS = Terms(run="lean", manifest="m", data="d")
TIMING = Timing(heartbeat_s=2.0, dead_after_s=60.0, gather_s=60.0)
SECRET = b"a secret of the benchmark's own"
LOOPBACK = "127.0.0.1"


class _Reducing:
    """The vector in blocks, and what came of it."""

    def __init__(self, num_elements: int, num_blocks: int, num_shards: int) -> None:
        self.blocks = Blocks(num_elements, num_blocks)
        self.sums = Sums(num_shards)
        self.mean = np.zeros(num_elements, np.float32)

    def take(
        self, rank: int, node: TreeNode, vector: reduction.Vector, payload: Buffer | None
    ) -> None:
        one = reduction.Node(node.level, node.index, vector, node.loss, node.weight)
        self.sums.take(rank, node.block, one, payload)

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        if isinstance(message, TreeNode):
            self.take(rank, message, blocks.vector_of(payload), payload)

    def room(self, message: Message, num_bytes: int) -> memoryview:
        if isinstance(message, TreeNode):
            return self.sums.room(num_bytes)
        if isinstance(message, Average):
            return blocks.payload_of(self.mean[self.blocks.part(message.block)])
        return new_room(message, num_bytes)

    def complete(self, block: int) -> None:
        self.sums.complete(block)

    def average(self, block: int) -> tuple[float, float]:
        averaged = self.sums.average(block, 1.0, out=self.mean[self.blocks.part(block)])
        assert averaged is not None
        return averaged

    def part(self, block: int) -> Buffer:
        return blocks.payload_of(self.mean[self.blocks.part(block)])


class LeanServer(_Reducing):
    """The coordinator's hands. Every step waits until it is let go, and says when it is made."""

    def __init__(self, num_elements: int, num_blocks: int, num_shards: int) -> None:
        super().__init__(num_elements, num_blocks, num_shards)
        self.go, self.made = Semaphore(0), Semaphore(0)

    def sizes(self) -> dict[type[Message], int]:
        return {TreeNode: self.blocks.num_bytes_max, Loaded: 0, Computed: 0, Applied: 0}

    def require(self, rank: int, message: Message, payload: Buffer) -> None: ...
    def joined(self, effect: Joined) -> None: ...
    def prepare(self, step: int) -> tuple[float, float]:
        raise AssertionError("every worker updates")

    def apply_average(self, step: int) -> None: ...
    def save(self, step: int) -> Saving:
        raise AssertionError("nothing is saved")

    def left(self, effect: Left) -> None:
        raise AssertionError(effect.reason)

    def stop(self, effect: Stop) -> None:
        raise AssertionError(effect.reason)

    def deliver(self, rank: int) -> None:
        self.sums.deliver(rank)

    def copy(self, rank: int, message: Message, payload: Buffer) -> None:
        raise AssertionError("nothing is audited here")

    def end_copy(self, rank: int, shard: int) -> None:
        raise AssertionError("nothing is audited here")

    def compare(self, shard: int) -> Callable[[], tuple[list[int], list[int]]]:
        raise AssertionError("nothing is audited here")

    def piece(self, piece: Piece) -> bytes | str:
        return "no files"

    def conclude(self, effect: Conclude) -> None:
        raise AssertionError("nothing is audited here")

    def gather(self, step: int) -> None:
        self.sums.clear()
        self.made.release()
        self.go.acquire()  # nothing else is to be done in this process

    def reduce(self, block: int) -> tuple[float, float]:
        return self.average(block)

    def payload(self, message: Message) -> Buffer:
        return self.part(message.block) if isinstance(message, Average) else b""


class LeanMember(_Reducing):
    """A worker's hands, of a star or a mesh: one shard, whose gradient is there already."""

    def __init__(self, num_elements: int, num_blocks: int, num_shards: int) -> None:
        super().__init__(num_elements, num_blocks, num_shards)
        self._num_elements = num_elements
        self._gradient = np.ones(num_elements, np.float32)
        self._rank = 0

    def sizes(self) -> dict[type[Message], int]:
        longest = self.blocks.num_bytes_max
        return {Welcome: 0, Average: longest, TreeNode: longest}

    def require(self, message: Message, payload: Buffer) -> None: ...

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        self._rank = welcome.rank

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode]:
        return [
            TreeNode(step=step, round=0, block=block, level=0, index=shard, loss=0.0, weight=1.0)
            for block in self.blocks.order()
            for shard in shards
        ]

    def hold(self, message: Average | Weights, payload: Buffer) -> None: ...

    def make_held(self, step: int) -> None:
        assert self.mean[0] == self.mean[-1] == 1.0

    def contribute(self, node: TreeNode) -> None:
        vector = self._gradient[self.blocks.part(node.block)]
        vector.flags.writeable = False
        self.take(self._rank, node, vector, None)

    def reduce(self, block: int) -> tuple[float, float]:
        return self.average(block)

    def regroup(self, number: int) -> None:
        self.sums.clear()

    def payload(self, message: Message) -> Buffer:
        if isinstance(message, TreeNode):
            return blocks.payload_of(self._gradient[self.blocks.part(message.block)])
        return self.part(message.block) if isinstance(message, Average) else b""


class LeanRing(LeanMember):
    """The same in a ring."""

    def __init__(self, num_elements: int, num_blocks: int, num_shards: int) -> None:
        super().__init__(num_elements, num_blocks, num_shards)
        self._passing: dict[int, reduction.Node] = {}

    def combine(self, block: int, message: Partial | None, payload: Buffer) -> tuple[float, float]:
        vector, weight = self._gradient[self.blocks.part(block)], 1.0
        if message is not None:
            came = blocks.vector_of(payload)
            vector, weight = np.add(came, vector, out=came), 1.0 + message.weight
        self._passing[block] = reduction.Node(0, 0, vector, 0.0, weight)
        return 0.0, weight

    def complete(self, block: int) -> None: ...

    def reduce(self, block: int) -> tuple[float, float]:
        total = self._passing[block]
        assert blocks.average(total, 1.0, out=self.mean[self.blocks.part(block)])
        return total.loss, total.weight

    def sizes(self) -> dict[type[Message], int]:
        return {**super().sizes(), Partial: self.blocks.num_bytes_max}

    def payload(self, message: Message) -> Buffer:
        if isinstance(message, Partial):
            return blocks.payload_of(self._passing[message.block].vector)
        return super().payload(message)


WORKERS: dict[str, tuple[type[Worker], type[LeanMember]]] = {
    "parameter_server": (Worker, LeanMember),
    "mesh": (MeshWorker, LeanMember),
    "ring": (RingWorker, LeanRing),
}


def main(pipe: Connection) -> None:
    """Does jobs: each one stay in one run."""
    desk = Job(pipe)
    while (given := desk.next()) is not None:
        job: dict[str, Any] = json.loads(given)
        kind, of = WORKERS[job["system"]]
        hands = of(job["num_elements"], job["num_blocks"], job["world_size"])
        kept: dict[str, Any] = {"secret": SECRET, "backend": "cpu", "rank": job["rank"]}
        machine = kind(TERMS, timing=TIMING, port=None, **kept)
        client = (
            MeshClient(machine, hands)
            if isinstance(machine, MeshWorker)
            else WorkerClient(machine, hands)
        )
        finish = asyncio.run(client.run(LOOPBACK, job["port"], patience_s=20.0))
        desk.answer(f"{finish.status} {finish.reason}".encode())


async def coordinate(
    hands: LeanServer, job: dict[str, Any], give: Callable[[bytes], object], num_steps: int
) -> Finish:
    """One run: `give` gets each worker's job."""
    world_size = job["world_size"]
    run = Run(
        terms=TERMS,
        world_size=world_size,
        num_shards=world_size,
        num_steps=num_steps,
        num_blocks=job["num_blocks"],
        awaited={0: range(world_size)},
    )
    kind = Coordinator if job["system"] == "parameter_server" else MeshCoordinator
    server = CoordinatorServer(run, hands, timing=TIMING, secret=SECRET, kind=kind)
    _, port = await server.listen(LOOPBACK, 0)
    for rank in range(world_size):
        give(json.dumps({**job, "rank": rank, "port": port}).encode())
    return await server.finish()
