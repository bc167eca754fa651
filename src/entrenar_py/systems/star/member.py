"""What a worker does besides talking: takes the state, computes shards, makes steps, records it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from entrenar_py import faults, trace
from entrenar_py.errors import ProtocolError
from entrenar_py.faults import Fault
from entrenar_py.protocol.frames import Buffer, new_room
from entrenar_py.protocol.messages import (
    Assign,
    Average,
    Message,
    NonFinite,
    Partial,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.scenario import Scenario
from entrenar_py.systems import models, updates
from entrenar_py.systems.replicas import Replicas, Worker
from entrenar_py.systems.star import reduction_measures
from entrenar_py.training import blocks, engine, reduction, sharding, state
from entrenar_py.training.vectors import GivenVectors


class Member(Replicas):
    """One worker of a run whose others live elsewhere; `rank` is known once it was welcomed."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.rank = -1
        self._shards: list[sharding.Ids] = []
        self._blocks = blocks.Blocks(self.layout.num_elements, 1)
        self._nodes: dict[tuple[int, int], reduction.Node] = {}  # of this step, computed here
        # What came down, as far as it is held: never the memory that is in use.
        self._vector = np.empty(self.layout.num_elements, np.float32)
        self._comes: type[Average | Weights] = Weights if updates.by_server(scenario) else Average
        self._total = (0.0, 0.0)  # the step's summed loss and its weight
        self._held: set[int] = set()  # blocks of it
        self._round = 0  # of a mesh, whose blocks `_vector` is for
        self._step = 0
        self._suffered: set[Fault] = set()  # of those that strike once

    def sizes(self) -> dict[type[Message], int]:
        """The most payload bytes that a message of each kind may bring."""
        state_bytes = state.num_bytes(self.workload.specs, updates.held(self.scenario))
        return {Welcome: state_bytes, self._comes: self.vector_bytes}

    def require(self, message: Message, payload: Buffer) -> None:
        """Returns if `message` can be done here and has its payload; ProtocolError if not."""
        due = self.sizes().get(type(message), 0)
        if isinstance(message, Welcome) and message.blocks > self.layout.num_elements:
            num_elements = self.layout.num_elements
            raise ProtocolError(
                f"Welcome blocks={message.blocks}: there are {num_elements} elements"
            )
        if isinstance(message, Average | Weights) and not isinstance(message, self._comes):
            raise ProtocolError(
                f"{type(message).__name__}: in this run {self._comes.__name__} come down"
            )
        if isinstance(message, Average | Weights | TreeNode | Partial):
            known = message.block < self._blocks.count
            due = self._blocks.num_bytes(message.block) if known else due
        if len(payload) != due:
            raise ProtocolError(
                f"{type(message).__name__} with a payload of {len(payload)} bytes: {due} are due"
            )
        if isinstance(message, Assign):
            shards, all_shards = set(message.shards), range(self.scenario.num_shards)
            if len(shards) < len(message.shards) or not shards.issubset(all_shards):
                raise ProtocolError(
                    f"Assign shards={message.shards}: use each once, of 0 to {all_shards[-1]}"
                )
        if isinstance(message, Average | Weights):
            weight, loss = message.weight, message.loss
            if not (0 < weight < math.inf and math.isfinite(loss)):
                name = type(message).__name__
                raise ProtocolError(f"{name} {weight=} {loss=}: use finite numbers, a weight > 0")

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Memory for the payload of `message`, which may never be whole: where it is to lie."""
        if isinstance(message, self._comes) and self._is_due(message):
            place = blocks.payload_of(self._vector[self._blocks.part(message.block)])
            if place.nbytes == num_bytes:  # `require` refuses any other number, when it is read
                return place
        return new_room(message, num_bytes)

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Takes over the state before `welcome.step`; ProtocolError if it is of no such run."""
        self.rank = welcome.rank
        self._blocks = blocks.Blocks(self.layout.num_elements, welcome.blocks)
        self.recorder.drain()  # of a stay before
        worker = self.take_over(self.rank, payload)
        self.workers = {self.rank: worker}
        self._nodes.clear()
        self._held.clear()
        self._step, self._round = welcome.step, 0
        self._cut()
        self.record_start(worker, welcome.step, resumed=welcome.resumed)

    def work(self, step: int, shards: Sequence[int]) -> list[TreeNode] | NonFinite:
        """Computes `shards` of `step`: every block of their tree nodes, in the order they go.

        Or the first shard that is not finite.
        """
        worker, leaves = self.workers[self.rank], []
        for shard in shards:
            ids = self._shards[shard]
            leaf = self.compute(worker, step, shard, ids)
            halt = self.guard(leaf, worker, step, shard, ids)
            if halt is not None:
                return self._problem(halt, leaf)
            self._go_wrong(leaf, step, len(ids))
            leaves.append(leaf)
        nodes = reduction.fold(leaves, self.scenario.num_shards)
        self._nodes |= {(node.level, node.index): node for node in nodes}
        return [
            TreeNode(
                step=step,
                round=0,
                block=block,
                level=node.level,
                index=node.index,
                loss=node.loss,
                weight=node.weight,
            )
            for block in self._blocks.order()
            for node in nodes
        ]

    def _go_wrong(self, leaf: reduction.Node, step: int, count: int) -> None:
        """Silent corruption, where the scenario wants it: what was recorded of `leaf` looks right.

        Its shard has `count` samples.
        """
        for fault in self.scenario.faults:
            if fault.kind not in faults.SILENT or fault.rank != self.rank:
                continue
            assert fault.step is not None, "faults.NEEDED has it"
            assert fault.value is not None, "faults.NEEDED has it"
            lasting = fault.kind == "corrupt_worker"
            once = (fault.step, fault.shard) == (step, leaf.index) and fault not in self._suffered
            if (step >= fault.step) if lasting else once:
                self._suffered.add(fault)
                tensor, element = models.place_of(fault, self.workload)
                wrong = float(fault.value) * max(count, 1) * self.scale
                leaf.vector[self.layout.trainable[tensor].start + element] = wrong
                self.record_fault(fault, step, self.rank, leaf.index)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keeps a block of the averaged gradient, or of new weights, until its step is made."""
        held = self._vector[self._blocks.part(message.block)]
        came = blocks.vector_of(payload)
        if not np.may_share_memory(held, came):
            held[:] = came
        self._held.add(message.block)
        self._total = message.loss, message.weight

    def make_held(self, step: int) -> None:
        """Makes `step` with the gradient held, or uses the weights held."""
        self._step = step + 1
        worker = self.workers[self.rank]
        if self._comes is Weights:
            self.recorder.emit(self._use(worker, step))
        else:
            average = self.averaged(self._vector, *self._total)
            self.recorder.emit(self.make(worker, step, average))
            if isinstance(self.workload, GivenVectors):
                ids, mean = self.batch(), self._vector
                self.recorder.emit(
                    reduction_measures.reduced(step, self.rank, mean, self.workload, ids)
                )
        self._nodes.clear()
        self._held.clear()
        self.advance(sum(map(len, self._shards)))
        self._cut()

    def _use(self, worker: Worker, step: int) -> trace.Update:
        """Takes the weights held into use; the event of it, as far as a worker knows it."""
        worker.replica.copy_from(self._vector)
        loss, weight = self._total
        held = self.state(worker)
        return trace.Update(
            step=step,
            rank=worker.rank,
            loss=loss / weight,
            weight=weight,
            learning_rate=self.rate(),
            finite=engine.non_finite(worker.replica.parameters) is None,
            weights=held["weights"],
            optimizer=held["optimizer"],
            buffers=held["buffers"],
        )

    def payload(self, message: Message) -> Buffer:
        """What `message` carries: a node's vector, or what happened since it was last told."""
        if isinstance(message, TreeNode):
            vector = self._nodes[message.level, message.index].vector
            return blocks.payload_of(vector[self._blocks.part(message.block)])
        return trace.dump_events(self.recorder.drain()) if message.carries == "events" else b""

    def _is_due(self, message: Average | Weights) -> bool:
        """Whether this block is still to come, and of this round: another's can come beside it."""
        known = message.block < self._blocks.count and message.block not in self._held
        due = message.step == self._step
        return known and due and (isinstance(message, Weights) or message.round == self._round)

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
