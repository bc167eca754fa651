"""The work of one stage's worker: passes, the sum of its gradients, and new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute import Backend
from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.scenario import Scenario, backend_kind
from entrenar_py.train.arithmetic import engine, reduction
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator.exchanges import Held
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.stages.stage_blocks import OwnBlocks, StageBlocks
from entrenar_py.train.stages.stage_step import Backward, Hidden, StageStep, TorchStage
from entrenar_py.train.stages.stage_workload import Received, StageWorkload
from entrenar_py.train.stages.wgpu_stage import WgpuStage
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import (
    Activation,
    ActivationGradient,
    Message,
    NonFinite,
    Summed,
    Welcome,
)
from entrenar_py.train.wire.pipeline_peers import Passed
from entrenar_py.train.wire.terms import Terms

_DTYPES = {
    str(one).removeprefix("torch."): one for one in (torch.float32, torch.bfloat16, torch.float16)
}
DRAWS_MAX = 2**31  # of random numbers in one pass of the model


class StageBackend:
    """The part of a backend that a replica uses, for one that has a stage of the model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def stepper(self, workload: Any, tensors: Mapping[str, Tensor], *, scale: float) -> Any:
        """Return a `StageStep` for the stage `workload`, on this very device.

        Raises UsageError for a backend that no `StageStep` knows.
        """
        backend: Any = self._backend
        match backend_kind(backend.name):
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


class HeldStage(Held):
    """The blocks that have arrived of a stage's new weights."""

    def __init__(self, num_elements: int, own: OwnBlocks) -> None:
        super().__init__(num_elements)
        self.blocks = cast(Any, own)

    def begin(self, num_blocks: int) -> None:
        """Start a session; the blocks are those of the plan."""
        self.there.clear()
        self.round = 0


@dataclass
class _Round:
    """The tensors and sums of one round of a step at one worker, by shard."""

    step: int
    came: dict[int, tuple[Buffer, str, int]] = field(default_factory=dict)  # hidden states
    gradients: dict[int, Buffer] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of hidden states sent on
    nodes: list[reduction.Node] = field(default_factory=list)
    events: list[trace.Event] = field(default_factory=list)  # of its shards, not yet sent
    is_begun: bool = False


class StageMember(Member):
    """The worker of stage `stage`, whose trainable tensors are the workload's."""

    workload: StageWorkload

    def __init__(
        self,
        scenario: Scenario,
        backend: Backend,
        workload: StageWorkload,
        *,
        terms: Terms,
        every: StageBlocks,
        stage: int,
        attempts: Sequence[trace.Attempt] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attempts` to open a backend are recorded whenever the stage is loaded.

        `clock` is that of the worker's driver.
        """
        self._terms, self._own = terms, OwnBlocks(every, stage)
        stages = StageBackend(backend)
        super().__init__(scenario, lambda rank: stages, cast(Workload, workload))
        self.held = HeldStage(self.layout.num_elements, self._own)
        self._round = _Round(0)
        self._bound: dict[do.Pass, _Round] = {}  # of passes that were asked for, and are not begun
        self._attempts, self._clock = attempts, clock
        self._out: dict[tuple[type[Message], int], Buffer] = {}  # tensors that are to be sent

    @property
    def terms(self) -> Terms:
        """Those of the whole run, which a stage alone can't know."""
        return self._terms

    def require(self, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError unless `message` is possible here and its payload is complete."""
        if not isinstance(message, Activation | ActivationGradient):
            super().require(message, payload)
            return
        name = type(message).__name__
        if isinstance(message, Activation) and not 0 <= message.draws < DRAWS_MAX:
            raise ProtocolError(f"{name} draws={message.draws}: use 0 to {DRAWS_MAX - 1}")
        if isinstance(message, Activation) and message.dtype not in _DTYPES:
            raise ProtocolError(f"{name} dtype={message.dtype}: use {' or '.join(_DTYPES)}")
        # A gradient of a round that is over may still come; `receive` gets none of these.
        is_due = isinstance(message, Activation) or message.shard in self._round.dtypes
        if message.step == self._step and is_due:
            self._require_size(message, payload)

    def _require_size(self, message: Activation | ActivationGradient, payload: Buffer) -> None:
        """Raise ProtocolError unless the payload is hidden states of its shard."""
        shard, name = message.shard, type(message).__name__
        if not 0 <= shard < len(self._shards):
            raise ProtocolError(f"{name} shard={shard}: use 0 to {len(self._shards) - 1}")
        due = int(np.prod(self.workload.hidden_shape(self._shards[shard])))
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
        """Take over the stage's state before `welcome.step`."""
        super().load(welcome, payload)
        for attempt in self._attempts:
            self.recorder.emit(attempt)
        self._round = _Round(welcome.step)

    def regroup(self, number: int) -> None:
        """Forget all tensors of the step: round `number` begins, or goes on with the next step."""
        self.held.there.clear()
        self.held.round = number
        self.nodes.clear()
        self._out.clear()
        self.recorder.drain()
        self._round = _Round(self._step)  # a pass of the old one may still be running

    def receive(self, message: Message, payload: Buffer) -> None:
        """Keep a tensor from another stage for the pass that it is for."""
        assert isinstance(message, Activation | ActivationGradient)
        self._require_size(message, payload)
        if isinstance(message, Activation):
            self._round.came[message.shard] = payload, message.dtype, message.draws
        else:
            self._round.gradients[message.shard] = payload

    def bind(self, asked: do.Pass) -> None:
        """Note that the pass `asked` is of the present round, which may be over when it begins."""
        self._bound[asked] = self._round

    def run(self, asked: do.Pass) -> Passed | NonFinite:
        """Make the pass `asked`, in any thread."""
        began_s = self._clock()
        found = self._run(asked)
        if isinstance(found, Passed):
            found = replace(found, began_s=began_s, ended_s=self._clock())
        return found

    def _run(self, asked: do.Pass) -> Passed | NonFinite:
        current, shard = self._bound.pop(asked), asked.shard
        if current is not self._round:
            return Passed()  # nobody waits for it, and its tensors are gone
        worker, ids = self.workers[self.rank], self._shards[shard]
        step = cast(StageStep, worker.replica.stepper)
        if not current.is_begun:
            current.is_begun = True
            step.begin()
        found: Hidden | Backward
        drawn: str | None = None
        if not ids:
            found = self._nothing(asked.is_forward)
        elif asked.is_forward:
            rng = self.scenario.rng("dropout", asked.step, shard)
            drop = engine.Dropout(self.scenario.dropout, rng)
            found = step.forward(shard, ids, self._received(current, shard), drop)
            drawn = drop.digest()
        else:
            gradient = _tensor(
                current.gradients.pop(shard),
                *(current.dtypes[shard], self.workload.hidden_shape(ids)),
            )
            found = step.backward(shard, gradient)
        if isinstance(found, Hidden):
            current.dtypes[shard] = found.tensor.dtype
            self._out[Activation, shard] = _payload(found.tensor)
            return Passed(str(found.tensor.dtype).removeprefix("torch."), found.draws)
        if found.hidden is not None:
            self._out[ActivationGradient, shard] = _payload(found.hidden)
        return self._add(current, asked, found, drawn)

    def _received(self, current: _Round, shard: int) -> Received | None:
        if self.workload.stage.is_first:
            return None
        payload, dtype, draws = current.came.pop(shard)
        shape = self.workload.hidden_shape(self._shards[shard])
        return Received(_tensor(payload, _DTYPES[dtype], shape), draws)

    def _nothing(self, is_forward: bool) -> Hidden | Backward:
        """Return the outcome of a pass of a shard without samples."""
        empty = torch.zeros(0)
        if is_forward and not self.workload.stage.is_last:
            return Hidden(empty, 0)
        zeros = [np.zeros(self.layout.num_elements, np.float32)]
        return Backward(zeros, None if self.workload.stage.is_first else empty)

    def _add(
        self, current: _Round, asked: do.Pass, found: Backward, drawn: str | None
    ) -> Passed | NonFinite:
        """Add a shard's gradient along the tree; `drawn` identifies its random numbers."""
        worker, shard, ids = self.workers[self.rank], asked.shard, self._shards[asked.shard]
        vector = engine.as_one(found.gradients)
        weight = float(self.workload.weight(ids)) if ids else 0.0
        loss = self.inject(vector, found.loss, worker, asked.step, shard, len(ids))
        leaf = reduction.Node(0, shard, vector, loss, weight)
        halt = self.guard(leaf, worker, asked.step, shard, ids)
        if self.workload.stage.is_last:  # the one that knows the loss
            current.events.append(
                trace.Shard(
                    step=asked.step,
                    epoch=self.position.epoch,
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
            return self._problem(halt, leaf)
        self._go_wrong(leaf, asked.step, len(ids))
        current.nodes = reduction.fold([*current.nodes, leaf], self.scenario.num_shards)
        if not asked.is_last:
            return Passed()
        self.nodes.update({(node.level, node.index): node for node in current.nodes})
        return Passed(nodes=self.named(asked.step, current.nodes))

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`."""
        if isinstance(message, Activation | ActivationGradient):
            return self._out.pop((type(message), message.shard))
        if isinstance(message, Summed | NonFinite):
            # Not when they happen: a pass of a round that is over may be running still.
            for event in self._round.events:
                self.recorder.emit(event)
            self._round.events.clear()
        return super().payload(message)


def _payload(tensor: Tensor) -> Buffer:
    if not tensor.numel():
        return b""
    return cast(Buffer, tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _tensor(payload: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(payload, dtype=dtype).reshape(list(shape))
