"""What a worker does besides talking: takes the state, computes shards, makes steps, records it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from entrenar_py import trace
from entrenar_py.errors import ProtocolError
from entrenar_py.protocol.messages import (
    Assign,
    Average,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)
from entrenar_py.scenario import Scenario
from entrenar_py.systems import replicas
from entrenar_py.systems.replicas import Replicas
from entrenar_py.training import engine, reduction, sharding, state


class Member(Replicas):
    """One worker of a run whose others live elsewhere; `rank` is known once it was welcomed."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.rank = -1
        self._shards: list[sharding.Ids] = []
        self._vectors: dict[tuple[int, int], reduction.Vector] = {}
        self._held: replicas.Average | None = None

    def sizes(self) -> dict[type[Message], int]:
        """How many payload bytes a message of each kind brings, exactly."""
        state_bytes = state.num_bytes(self.workload.specs, self.scenario.optimizer)
        return {Welcome: state_bytes, Average: self.vector_bytes}

    def require(self, message: Message) -> None:
        """Returns if `message` can be done here; ProtocolError if it is of no such run."""
        if isinstance(message, Assign):
            shards, all_shards = set(message.shards), range(self.scenario.num_shards)
            if len(shards) < len(message.shards) or not shards.issubset(all_shards):
                raise ProtocolError(
                    f"Assign shards={message.shards}: use each once, of 0 to {all_shards[-1]}"
                )
        if isinstance(message, Average):
            weight, loss = message.weight, message.loss
            if not (0 < weight < math.inf and math.isfinite(loss)):
                raise ProtocolError(f"Average {weight=} {loss=}: use finite numbers, a weight > 0")

    def load(self, welcome: Welcome, payload: bytearray) -> None:
        """Takes over the state before `welcome.step`; ProtocolError if it is of no such run."""
        specs, kind = self.workload.specs, self.scenario.optimizer
        progress, tensors, moments = state.load(specs, kind, payload)
        if progress.position.offset >= self.scenario.num_samples:
            raise ProtocolError(f"Welcome with {progress.position}: no sample is there")
        self.rank = welcome.rank
        self.recorder.drain()  # of a stay before
        worker = self.new_worker(self.rank, tensors)
        worker.state = moments
        self.workers = {self.rank: worker}
        self.position, self.schedule_step = progress.position, progress.schedule_step
        self._vectors.clear()
        self._cut()
        self.record_start(worker, welcome.step, resumed=welcome.resumed)

    def work(self, step: int, shards: Sequence[int]) -> list[TreeNode] | NonFinite:
        """Computes `shards` of `step`: their tree nodes, or the first shard that is not finite."""
        worker, leaves = self.workers[self.rank], []
        for shard in shards:
            ids = self._shards[shard]
            leaf = self.compute(worker, step, shard, ids)
            halt = self.guard(leaf, worker, step, shard, ids)
            if halt is not None:
                return self._problem(halt, leaf)
            leaves.append(leaf)
        nodes = reduction.fold(leaves, self.scenario.num_shards)
        self._vectors = {(node.level, node.index): node.vector for node in nodes}
        return [
            TreeNode(
                step=step, level=node.level, index=node.index, loss=node.loss, weight=node.weight
            )
            for node in nodes
        ]

    def hold(self, average: Average, payload: bytearray) -> None:
        """Keeps the averaged gradient until its step is made."""
        mean = np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
        self._held = self.averaged(mean, average.loss, average.weight)

    def make_held(self, step: int) -> None:
        """Makes `step` with the gradient held."""
        assert self._held is not None, "only what was staged is committed"
        self.recorder.emit(self.make(self.workers[self.rank], step, self._held))
        self._held = None
        self.advance(sum(map(len, self._shards)))
        self._cut()

    def payload(self, message: Message) -> memoryview | bytes:
        """What `message` carries: a node's vector, or what happened since it was last told."""
        if isinstance(message, TreeNode):
            vector = self._vectors.pop((message.level, message.index))
            return vector.astype("<f4", copy=False).data.cast("B")
        return trace.dump_events(self.recorder.drain()) if message.carries == "events" else b""

    def _cut(self) -> None:
        """The logical shards of the next step."""
        self._shards = sharding.cut(self.batch(), self.scenario.num_shards)

    def _problem(self, halt: trace.Halt, leaf: reduction.Node) -> NonFinite:
        assert halt.shard is not None
        place = engine.non_finite(leaf.vector)
        tensor, element = (None, None) if place is None else self.layout.locate(place)
        return NonFinite(
            step=halt.step,
            shard=halt.shard,
            tensor=tensor,
            element=element,
            loss=leaf.loss,
            ids=halt.ids,
        )
