"""The work of one stage's worker: passes, the sum of its gradients, and new weights.

A pass is bound to the round in which it was requested. A pass of a void round may still be running
in a thread when the next round begins. Each round's tensors are therefore in a separate object: the
old pass finishes with the old object, and its outcome is dropped. The worker has no optimizer: the
coordinator applies each step and sends the new weights of the stage.

`StageHands` represents the worker until the coordinator has assigned it a stage. It loads the stage
in the background, because a connection that is silent for too long counts as dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute import Backend
from entrenar_py.shared import scenario, trace
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import checkpoint, engine, reduction
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.topology import Held
from entrenar_py.train.stages.cut import Cut, OwnBlocks, StageBlocks
from entrenar_py.train.stages.stage_model import Received, StageWorkload
from entrenar_py.train.stages.stage_step import Backward, Hidden, StageStep, TorchStage, WgpuStage
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Activation,
    ActivationGradient,
    Average,
    Message,
    NonFinite,
    Summed,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.pipeline_peers import Passed

_DTYPES = {
    str(one).removeprefix("torch."): one for one in (torch.float32, torch.bfloat16, torch.float16)
}
DRAWS_MAX = 2**31  # the most random numbers in one pass of the model


class StageBackend:
    """The part of a backend that a replica uses, for a replica of one stage."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def stepper(self, workload: Any, tensors: Mapping[str, Tensor], *, scale: float) -> Any:
        """Return a `StageStep` for the stage `workload` on this device.

        Raises UsageError for a backend without a `StageStep`.
        """
        backend: Any = self._backend
        match scenario.backend_kind(backend.name):
            case "cpu":
                return TorchStage(workload, tensors, place=torch.device("cpu"), scale=scale)
            case "cuda":
                return TorchStage(workload, tensors, place=backend.place, scale=scale)
            case "wgpu":
                return WgpuStage(backend.programs, workload, tensors, scale=scale)
            case kind:
                raise UsageError(
                    f"strategy=layer_pipeline with backend={backend.name}: a stage computes on "
                    f"cuda, wgpu or cpu, and not on {kind}; use one of these"
                )


@dataclass
class _Round:
    """The tensors and sums of one round of a step at one worker, by shard."""

    step: int
    came: dict[int, tuple[Buffer, str, int]] = field(default_factory=dict)  # hidden states
    gradients: dict[int, Buffer] = field(default_factory=dict)
    # gradients of the hidden states sent on
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    nodes: list[reduction.Node] = field(default_factory=list)
    events: list[trace.Event] = field(default_factory=list)  # events of its shards, not yet sent
    is_begun: bool = False


class StageMember:
    """The worker of one `stage`: a Member of the run for the stage's trainable tensors."""

    def __init__(
        self,
        plan: TrainingPlan,
        backend: Backend,
        workload: StageWorkload,
        *,
        every: StageBlocks,
        stage: int,
        attempts: Sequence[trace.Attempt] = (),
        faults: Sequence[Fault] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a state.

        `attempts` to open a backend are recorded whenever the stage is loaded. `clock` is the clock
        of the worker's driver.
        """
        stages = StageBackend(backend)
        self.plan, self.workload = plan, workload
        self.member = Member(plan, lambda rank: stages, cast(Workload, workload), faults)
        self.replicas = self.member.replicas
        own = cast(Any, OwnBlocks(every, stage))
        self.member.held = Held(self.replicas.layout.num_elements, own)
        self._round = _Round(0)
        # rounds of passes that were requested and are not begun
        self._bound: dict[do.Pass, _Round] = {}
        self._attempts, self._clock = attempts, clock
        self._out: dict[tuple[type[Message], int], Buffer] = {}  # tensors to send

    def require(self, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError unless `message` is possible here and its payload is complete."""
        if not isinstance(message, Activation | ActivationGradient):
            self.member.require(message, payload)
            return
        name = type(message).__name__
        if isinstance(message, Activation) and not 0 <= message.draws < DRAWS_MAX:
            raise ProtocolError(f"{name} draws={message.draws}: use 0 to {DRAWS_MAX - 1}")
        if isinstance(message, Activation) and message.dtype not in _DTYPES:
            raise ProtocolError(f"{name} dtype={message.dtype}: use {' or '.join(_DTYPES)}")
        # A gradient of an ended round may still arrive, but is not passed to `receive`.
        is_due = isinstance(message, Activation) or message.shard in self._round.dtypes
        if message.step == self.member.step and is_due:
            self._require_size(message, payload)

    def _require_size(self, message: Activation | ActivationGradient, payload: Buffer) -> None:
        """Raise ProtocolError if the payload doesn't have the size of its shard's hidden states."""
        shard, name = message.shard, type(message).__name__
        if not 0 <= shard < len(self.member.shards):
            raise ProtocolError(f"{name} shard={shard}: use 0 to {len(self.member.shards) - 1}")
        due = int(np.prod(self.workload.hidden_shape(self.member.shards[shard])))
        dtype: torch.dtype | None = None
        if isinstance(message, Activation):
            dtype = _DTYPES[message.dtype]
        else:
            dtype = self._round.dtypes.get(shard)
        if dtype is None:
            raise ProtocolError(f"{name} shard={shard}: its hidden states were not sent")
        if len(payload) != due * dtype.itemsize:
            raise ProtocolError(
                f"{name} shard={shard} with {len(payload)} bytes: expected {due * dtype.itemsize}"
            )

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Load the stage's state before `welcome.step`."""
        self.member.load(welcome, payload)
        self.member.recorder.record(self._attempts)
        self._round = _Round(welcome.step)

    def regroup(self, number: int) -> None:
        """Forget all tensors of the step: round `number` begins, or its next step."""
        self.member.held.there.clear()
        self.member.held.round = number
        self.member.nodes.clear()
        self._out.clear()
        self.member.recorder.drain()
        self._round = _Round(self.member.step)  # a pass of the old round may still be running

    def receive(self, message: Message, payload: Buffer) -> None:
        """Keep a tensor from another stage for the pass that needs it."""
        assert isinstance(message, Activation | ActivationGradient)
        self._require_size(message, payload)
        if isinstance(message, Activation):
            self._round.came[message.shard] = payload, message.dtype, message.draws
        else:
            self._round.gradients[message.shard] = payload

    def bind(self, asked: do.Pass) -> None:
        """Bind the pass `asked` to the current round, which may have ended when the pass begins."""
        self._bound[asked] = self._round

    def run(self, request: do.Pass) -> Passed | NonFinite:
        """Make the pass that `request` names, in any thread."""
        began_s = self._clock()
        outcome = self._run(request)
        if isinstance(outcome, Passed):
            outcome = replace(outcome, began_s=began_s, ended_s=self._clock())
        return outcome

    def _run(self, request: do.Pass) -> Passed | NonFinite:
        current, shard = self._bound.pop(request), request.shard
        if current is not self._round:
            return Passed()  # nobody waits for it, and its tensors no longer exist
        ids = self.member.shards[shard]
        step = cast(StageStep, self.member.worker.replica.stepper)
        if not current.is_begun:
            current.is_begun = True
            step.begin()
        outcome: Hidden | Backward
        drawn: str | None = None
        if not ids:
            outcome = self._nothing(request.is_forward)
        elif request.is_forward:
            rng = self.plan.rng("dropout", request.step, shard)
            drop = engine.Dropout(self.plan.dropout, rng)
            outcome = step.forward(shard, ids, self._received(current, shard), drop)
            drawn = drop.digest()
        else:
            gradient = _tensor(
                current.gradients.pop(shard),
                *(current.dtypes[shard], self.workload.hidden_shape(ids)),
            )
            outcome = step.backward(shard, gradient)
        if isinstance(outcome, Hidden):
            current.dtypes[shard] = outcome.tensor.dtype
            self._out[Activation, shard] = _payload(outcome.tensor)
            return Passed(str(outcome.tensor.dtype).removeprefix("torch."), outcome.draws)
        if outcome.hidden is not None:
            self._out[ActivationGradient, shard] = _payload(outcome.hidden)
        return self._add(current, request, outcome, drawn)

    def _received(self, current: _Round, shard: int) -> Received | None:
        if self.workload.stage.is_first:
            return None
        payload, dtype, draws = current.came.pop(shard)
        shape = self.workload.hidden_shape(self.member.shards[shard])
        return Received(_tensor(payload, _DTYPES[dtype], shape), draws)

    def _nothing(self, is_forward: bool) -> Hidden | Backward:
        empty = torch.zeros(0)
        if is_forward and not self.workload.stage.is_last:
            return Hidden(empty, 0)
        zeros = [np.zeros(self.replicas.layout.num_elements, np.float32)]
        return Backward(zeros, None if self.workload.stage.is_first else empty)

    def _add(
        self, current: _Round, request: do.Pass, outcome: Backward, drawn: str | None
    ) -> Passed | NonFinite:
        """Add a shard's gradient along the tree; `drawn` identifies its random numbers."""
        worker, shard = self.member.worker, request.shard
        ids = self.member.shards[shard]
        vector = engine.as_one(outcome.gradients)
        weight = float(self.workload.weight(ids)) if ids else 0.0
        loss = self.replicas.inject(vector, outcome.loss, worker, request.step, shard, len(ids))
        leaf = reduction.Node(0, shard, vector, loss, weight)
        halt = self.replicas.guard(leaf, worker, request.step, shard, ids)
        if self.workload.stage.is_last:  # the stage that knows the loss
            current.events.append(
                trace.Shard(
                    step=request.step,
                    epoch=self.replicas.position.epoch,
                    rank=worker.rank,
                    shard=shard,
                    ids=tuple(ids),
                    loss_sum=loss,
                    weight=weight,
                    finite=halt is None,
                    draws=drawn,
                )
            )
        if halt is not None:
            return self.member.problem(halt, leaf)
        self.member.go_wrong(leaf, request.step, len(ids))
        current.nodes = reduction.fold([*current.nodes, leaf], self.plan.num_shards)
        if not request.is_last:
            return Passed()
        return Passed(nodes=self.member.named(request.step, current.nodes))

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`."""
        if isinstance(message, Activation | ActivationGradient):
            return self._out.pop((type(message), message.shard))
        if isinstance(message, Summed | NonFinite):
            # Not when they happen: a pass of an ended round may still be running.
            self.member.recorder.record(self._round.events)
            self._round.events.clear()
        return self.member.payload(message)


def _payload(tensor: Tensor) -> Buffer:
    if not tensor.numel():
        return b""
    return cast(Buffer, tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _tensor(payload: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(payload, dtype=dtype).reshape(list(shape))


_OPTIMIZER = "sgd"  # promise of workers: the coordinator applies their steps


class StageHands:
    """A worker's arithmetic. It loads, with `make`, the stage that the coordinator assigns.

    `hidden_bytes` is the largest size of one shard's hidden states.
    """

    def __init__(self, cut: Cut, make: Callable[[int], StageMember], *, hidden_bytes: int) -> None:
        self._cut, self._make, self._hidden_bytes = cut, make, hidden_bytes
        self._stages: dict[int, StageMember] = {}  # at most one
        self._taken: tuple[Welcome, Buffer] | None = None
        self._is_loaded = False

    @property
    def stage(self) -> StageMember:
        """The loaded stage's work."""
        return next(iter(self._stages.values()))

    @property
    def exchange(self) -> None:
        """None: only the coordinator adds gradients."""
        raise AssertionError("workers of a pipeline send each other no nodes")

    def sizes(self) -> dict[type[Message], int]:
        """Return the largest payload, in bytes, that each type of message may have."""
        states = [checkpoint.state_bytes(specs, _OPTIMIZER) for specs in self._cut.specs]
        return {
            Welcome: max(states),
            Weights: self._cut.blocks.num_bytes_max,
            Activation: self._hidden_bytes,
            ActivationGradient: self._hidden_bytes,
        }

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Return memory for the payload of `message`."""
        if self._is_loaded:
            return self.stage.member.room(message, num_bytes)
        return new_room(message, num_bytes)

    def require(self, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError unless `message` is possible here and its payload is complete."""
        if isinstance(message, Welcome):
            if message.rank >= self._cut.places.num_ranks:
                raise ProtocolError(f"Welcome rank={message.rank}: the run has no such rank")
            specs = self._cut.specs[self._cut.stage_of_rank(message.rank)]
            due = checkpoint.state_bytes(specs, _OPTIMIZER)
            if len(payload) != due or message.blocks != self._cut.blocks.count:
                raise ProtocolError(
                    f"Welcome with {len(payload)} bytes, blocks={message.blocks}: expected {due} "
                    f"and {self._cut.blocks.count}"
                )
        elif self._is_loaded:
            self.stage.require(message, payload)
        elif len(payload):
            raise ProtocolError(f"{type(message).__name__} before the stage is loaded")

    def take(self, welcome: Welcome, payload: Buffer) -> None:
        """Keep a state until `load_taken`."""
        self._taken, self._is_loaded = (welcome, payload), False

    def load_taken(self) -> None:
        """Load the stage, unless it is already loaded, and its state; may run in any thread.

        Meanwhile the connection may end, and a new connection may bring the next state.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return  # an earlier call has loaded the state that this call was for
        welcome, payload = taken
        stage = self._cut.stage_of_rank(welcome.rank)
        if stage not in self._stages:
            self._stages.clear()
            self._stages[stage] = self._make(stage)
        self.stage.load(welcome, payload)
        self._is_loaded = self._taken is None

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Raise AssertionError, because a stage is loaded by `take` and `load_taken`."""
        raise AssertionError("a stage is loaded in the background")

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        """Raise AssertionError, because a stage's work is passes."""
        raise AssertionError(f"shards {shards} of step {step} pass through stages one by one")

    def receive(self, message: Message, payload: Buffer) -> None:
        """Keep a tensor from another stage."""
        self.stage.receive(message, payload)

    def bind(self, asked: do.Pass) -> None:
        """Bind the pass `asked` to the current round."""
        self.stage.bind(asked)

    def run(self, asked: do.Pass) -> Passed | NonFinite:
        """Make the pass `asked`, in any thread."""
        return self.stage.run(asked)

    def regroup(self, number: int) -> None:
        """Begin round `number`, or continue it with the next step."""
        self.stage.regroup(number)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keep a block of new weights until its step is applied."""
        self.stage.member.hold(message, payload)

    def make_held(self, step: int) -> None:
        """Apply `step` with the new weights that arrived."""
        self.stage.member.make_held(step)

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`."""
        return self.stage.payload(message) if self._is_loaded else b""
