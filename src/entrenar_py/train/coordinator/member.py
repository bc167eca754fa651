"""The work of one worker: it loads a state, computes shards, applies steps and records them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrenar_py.compute import Stepping
from entrenar_py.shared import trace, workers
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.faults import SILENT, Fault
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import (
    blocks,
    checkpoint,
    engine,
    on_device,
    reduction,
    sharding,
)
from entrenar_py.train.arithmetic.tensors import Array, Workload
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.coordinator import audits, models, recorder, topology
from entrenar_py.train.coordinator.replicas import Clipped, Replicas, Worker
from entrenar_py.train.coordinator.topology import Held, RingExchange, TreeExchange
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Average,
    Message,
    NonFinite,
    Partial,
    State,
    TreeNode,
    Weights,
    Welcome,
)


@dataclass(frozen=True)
class _Ahead:
    """A step taken before the average arrived; `gradient` waits for the average used there."""

    clipped: Clipped
    gradient: Callable[[], Array]


class Member:
    """One worker of a run. The run's other workers are in other processes. `load` sets `rank`."""

    def __init__(
        self,
        plan: TrainingPlan,
        backend_of: Callable[[int], Stepping] | None = None,
        workload: Workload | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.plan, self.faults = plan, faults
        self.replicas = Replicas(plan, backend_of, workload, faults)
        self.recorder = self.replicas.recorder
        self.rank = -1
        self.nodes: dict[tuple[int, int], reduction.Node] = {}  # nodes of this step, computed here
        self.held = Held(self.replicas.layout.num_elements)
        self._exchange: TreeExchange | RingExchange | None = None
        if (kind := topology.of(plan).exchange) is not None:
            num_shards, scale = plan.num_shards, self.replicas.scale
            self._exchange = kind(self.held, self.nodes, num_shards=num_shards, scale=scale)
        self.shards: list[sharding.Ids] = []
        self.step = 0
        self._first: int | None = None  # the first shard that was computed in this step
        self._placed: list[reduction.Node] = []  # this step's nodes on the device, if complete
        self._ahead: _Ahead | None = None  # the step, if it was taken before the average arrived
        self._comes: type[Average | Weights] = Weights if workers.by_server(plan) else Average
        self._sizes = self.sizes()
        self._applied: tuple[int, bytes] | None = None  # the last applied step, and its payload
        self._suffered: set[Fault] = set()  # faults that were injected
        self._is_wanted = True

    @property
    def worker(self) -> Worker:
        """This worker's replica and optimizer state, which exist after `load`."""
        return self.replicas.workers[self.rank]

    @property
    def exchange(self) -> TreeExchange | RingExchange:
        """The object that adds blocks from other workers, in a mesh or a ring; a star has none."""
        assert self._exchange is not None, "nobody else sends anything in a star"
        return self._exchange

    def sizes(self) -> dict[type[Message], int]:
        """Return the largest payload, in bytes, that each type of message may have."""
        optimizer = workers.optimizer_of_workers(self.plan)
        state_bytes = checkpoint.state_bytes(self.replicas.layout.specs, optimizer)
        kinds = (self._comes, *(self._exchange.carriers if self._exchange is not None else ()))
        return {Welcome: state_bytes, **dict.fromkeys(kinds, self.replicas.vector_bytes)}

    def require(self, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError if `message` is impossible here or its payload is incomplete."""
        due = self._sizes.get(type(message), 0)
        most = self.replicas.layout.num_elements
        if isinstance(message, Welcome) and message.blocks > most:
            raise ProtocolError(f"Welcome blocks={message.blocks}: use 1 to {most}")
        if isinstance(message, Average | Weights) and not isinstance(message, self._comes):
            raise ProtocolError(
                f"{type(message).__name__}: this run's coordinator sends {self._comes.__name__}"
            )
        if isinstance(message, Average | Weights | TreeNode | Partial):
            known = message.block < self.held.blocks.count
            due = self.held.blocks.num_bytes(message.block) if known else due
        if len(payload) != due:
            raise ProtocolError(
                f"{type(message).__name__} with a payload of {len(payload)} bytes: expected {due}"
            )
        if isinstance(message, Assign):
            shards, all_shards = set(message.shards), range(self.plan.num_shards)
            if len(shards) < len(message.shards) or not shards.issubset(all_shards):
                raise ProtocolError(
                    f"Assign shards={message.shards}: use each once, of 0 to {all_shards[-1]}"
                )
        if isinstance(message, Average | Weights):
            weight, loss = message.weight, message.loss
            if not (0 < weight < math.inf and math.isfinite(loss)):
                name = type(message).__name__
                raise ProtocolError(f"{name} {weight=} {loss=}: use finite numbers, a weight > 0")
        if isinstance(message, TreeNode | Partial):
            self.replicas.require_sum(message)

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Return memory for the payload of `message`, which may never arrive completely.

        If possible, the memory is the payload's final place.
        """
        if isinstance(message, TreeNode) and isinstance(self._exchange, TreeExchange):
            return self._exchange.room(num_bytes)
        if not isinstance(message, self._comes) or message.step != self.step:
            return new_room(message, num_bytes)
        # `require` refuses a payload of a different size after it is read.
        if self.held.lacks(message) and self.held.blocks.num_bytes(message.block) == num_bytes:
            return blocks.payload_of(self.held.part(message.block))
        return new_room(message, num_bytes)

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Load the state before `welcome.step`; raise ProtocolError if it does not fit."""
        self.rank = welcome.rank
        self.recorder.drain()  # drops the events of an earlier session
        self._applied = None
        self.replicas.workers = {self.rank: self.replicas.take_over(self.rank, payload)}
        self._first = self._ahead = None
        self._placed = []
        if (device := self.worker.on_device) is not None:
            self.held.vector = device.new_vector(self.held.vector.size)
        self.nodes.clear()
        self.held.begin(welcome.blocks)
        if self._exchange is not None:
            self._exchange.clear()
        self._begin(welcome.step)
        self.replicas.record_start(self.worker, welcome.step, resumed=welcome.resumed)

    def work(self, step: int, shards: Sequence[int]) -> list[TreeNode] | NonFinite:
        """Return every block of the tree nodes of `shards` of `step`, in sending order.

        If a shard is not finite, return a NonFinite for the first such shard instead. After
        `give_up` the rest is missing.
        """
        assert self._ahead is None, "the weights are those after the step"
        problems: list[NonFinite] = []

        def leaves() -> Iterator[reduction.Node]:
            for place, shard in enumerate(shards):
                if not self._is_wanted:
                    return
                for soon in shards[place : place + 2]:  # a device computes while the host records
                    self.replicas.begin(self.worker, step, soon, self.shards[soon])
                if self._has_all(shards):
                    self._go_ahead(step, shard)
                ids = self.shards[shard]
                leaf = self.replicas.compute(self.worker, step, shard, ids)
                halt = self.replicas.guard(leaf, self.worker, step, shard, ids)
                if halt is not None:
                    problems.append(self.problem(halt, leaf))
                    return
                self.go_wrong(leaf, step, len(ids))
                yield leaf

        if self._first is None:
            self._first = next(iter(shards), None)
        nodes = reduction.fold(leaves(), self.plan.num_shards)
        return problems[0] if problems else self.named(step, nodes)

    def give_up(self) -> None:
        """Let `work` return after its current shard, for good; may be called in any thread."""
        self._is_wanted = False

    def _has_all(self, shards: Sequence[int]) -> bool:
        """Return whether the average is certain to be the average of `shards` alone."""
        return (
            self._comes is Average
            and self._exchange is None
            and len(shards) == self.plan.num_shards
            and not (self.faults or self.replicas.layout.buffers or audits.share_of(self.plan))
        )

    def _go_ahead(self, step: int, shard: int) -> None:
        """Add `shard` to the step's sum on the device; take the step there once the sum is whole.

        So the device begins the next step's first shard before the host has the last gradient of
        this step. `make_held` compares the average that arrives with the one used here.
        """
        worker, plan = self.worker, self.plan
        device, begun = worker.on_device, worker.begun.get((step, shard))
        if device is None or begun is None:
            return
        leaf = on_device.leaf(shard, begun.gradients, begun.weight)
        self._placed = reduction.fold([*self._placed, leaf], plan.num_shards, device.add)
        total = self._placed[0]
        if total.level < reduction.height(plan.num_shards):
            return
        gradient = device.mean(total, self.replicas.scale)
        clipped = self.replicas.clipped(gradient, device)
        self.replicas.move(worker, clipped, self.held.vector)
        self._ahead = _Ahead(clipped, device.download(gradient))
        position = self.replicas.position_after(sum(map(len, self.shards)))
        following = sharding.cut(self.replicas.batch(position), plan.num_shards)
        self._begin_first(step + 1, following)

    def _begin_first(self, step: int, shards: Sequence[sharding.Ids]) -> None:
        """Begin the shard of `step` that this worker probably computes first."""
        if self._first is not None and step < self.plan.num_steps:
            self.replicas.begin(self.worker, step, self._first, shards[self._first])

    def named(self, step: int, nodes: Sequence[reduction.Node]) -> list[TreeNode]:
        """Return the messages with all blocks of `nodes`, in sending order; keep the nodes."""
        self.nodes.update({(node.level, node.index): node for node in nodes})
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
            for block in self.held.blocks.order()
            for node in nodes
        ]

    def go_wrong(self, leaf: reduction.Node, step: int, count: int) -> None:
        """Corrupt `leaf` if a fault requires that; its correct gradient is already recorded.

        `count` is the number of samples in the shard.
        """
        for fault in self.faults:
            if fault.kind not in SILENT or fault.rank != self.rank:
                continue
            assert fault.step is not None, "faults.NEEDED has it"
            assert fault.value is not None, "faults.NEEDED has it"
            lasting = fault.kind == "corrupt_worker"
            once = (fault.step, fault.shard) == (step, leaf.index) and fault not in self._suffered
            if (step >= fault.step) if lasting else once:
                self._suffered.add(fault)
                tensor, element = models.place_of(fault, self.replicas.workload)
                wrong = float(fault.value) * max(count, 1) * self.replicas.scale
                leaf.vector[self.replicas.layout.trainable[tensor].start + element] = wrong
                self.replicas.record_fault(fault, step, self.rank, leaf.index)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keep a block of the averaged gradient, or of new weights, until its step is applied."""
        self.held.hold(message, payload)

    def regroup(self, number: int) -> None:
        """Forget the blocks that arrived for the current step.

        Round `number` begins or restarts.
        """
        self.exchange.clear()
        self.held.regroup(number)

    def make_held(self, step: int) -> None:
        """Apply `step` with the averaged gradient, or the new weights, that arrived."""
        if self._comes is Weights:
            self.recorder.emit(self._use(self.worker, step))
            self._go_on(step + 1)
            return
        mean, workload, ids = self.held.vector, self.replicas.workload, self.replicas.batch()
        gradient = mean[: self.replicas.layout.num_trainable]
        if self._ahead is not None:
            clipped = self._ahead.clipped
            if not np.array_equal(self._ahead.gradient(), gradient):
                raise ProtocolError(
                    f"Average of step {step}: it differs from the average of all shards, which "
                    "this worker computed alone"
                )
        else:
            device = self.worker.on_device
            placed = gradient if device is None else device.upload(gradient)
            clipped = self.replicas.clipped(placed, device)
            self.replicas.move(self.worker, clipped, mean)
        average = self.replicas.averaged(mean, *self.held.total, clipped)
        self._go_on(step + 1)
        # What a device computes from here on, it computes while the host records the step.
        self._begin_first(step + 1, self.shards)
        self._first = None
        self.recorder.emit(self.replicas.update(self.worker, step, average))
        if isinstance(workload, GivenVectors):
            self.recorder.emit(recorder.reduced(step, self.rank, mean, workload, ids))

    def _go_on(self, step: int) -> None:
        self.nodes.clear()
        begun = self.worker.begun
        self.worker.begun = {key: begun[key] for key in begun if key[0] >= step}
        self._placed, self._ahead = [], None
        self.held.there.clear()
        self.replicas.advance(sum(map(len, self.shards)))
        self._begin(step)

    def _use(self, worker: Worker, step: int) -> trace.Update:
        """Load the new weights that arrived; return an Update with the worker's own values."""
        worker.replica.copy_from(self.held.vector)
        loss, weight = self.held.total
        return trace.Update(
            step=step,
            rank=worker.rank,
            loss=loss / weight,
            weight=weight,
            learning_rate=self.replicas.rate(),
            finite=engine.non_finite(worker.replica.parameters) is None,
            **self.replicas.state(worker),
        )

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`: a block, a state, or the events not yet sent."""
        match message:
            case TreeNode():
                vector = self.nodes[message.level, message.index].vector
                return blocks.payload_of(vector[self.held.blocks.part(message.block)])
            case Partial() if isinstance(self._exchange, RingExchange):
                return blocks.payload_of(self._exchange.passing[message.block].vector)
            case Average():
                return blocks.payload_of(self.held.part(message.block))
            case State():
                return self.replicas.dump(self.worker)
            case Applied() if self._applied is not None and self._applied[0] == message.step:
                return self._applied[1]  # kept for a resend after a connection breaks
            case Applied():
                self._applied = message.step, trace.dump_events(self.recorder.drain())
                return self._applied[1]
        return trace.dump_events(self.recorder.drain()) if message.carries == "events" else b""

    def _begin(self, step: int) -> None:
        self.step = step
        self.shards = sharding.cut(self.replicas.batch(), self.plan.num_shards)

    def problem(self, halt: trace.Halt, leaf: reduction.Node) -> NonFinite:
        """Return the message that reports `halt`, for the non-finite value in `leaf`."""
        assert halt.shard is not None
        place = engine.non_finite(leaf.vector)
        tensor, element = (None, None) if place is None else self.replicas.layout.locate(place)
        return NonFinite(
            step=halt.step,
            shard=halt.shard,
            tensor=tensor,
            element=element,
            loss=leaf.loss,
            ids=halt.ids,
        )
