"""A worker's end in a layer pipeline: what comes from other stages, and its passes."""

from __future__ import annotations

from typing import Any, Protocol

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.frames import Buffer, Received
from entrenar_py.train.wire.messages import Message, NonFinite, Welcome
from entrenar_py.train.wire.pipeline_peers import Passed, PipelineWorker
from entrenar_py.train.wire_io.endpoints import Follow, payload_of
from entrenar_py.train.wire_io.mesh_end import MeshEnd, MeshHands


class PipelineHands(MeshHands, Protocol):
    """The arithmetic of one stage (`pipeline.member`)."""

    def receive(self, message: Message, payload: Buffer) -> None: ...
    def take(self, welcome: Welcome, payload: Buffer) -> None: ...
    def load_taken(self) -> None: ...
    def bind(self, asked: do.Pass) -> None: ...
    def run(self, asked: do.Pass) -> Passed | NonFinite: ...


class PipelineEnd(MeshEnd):
    """A stage's end; its work is passes."""

    machine: PipelineWorker
    hands: PipelineHands

    def work(self, asked: Any) -> Any:
        """Make the pass `asked`, or load the stage, in any thread; return the outcome."""
        return self.hands.load_taken() if isinstance(asked, do.Load) else self.hands.run(asked)

    def computed(self, asked: Any, outcome: Any) -> None:
        """Take the `outcome` of `asked`."""
        if isinstance(asked, do.Load):
            self._do(self.machine.loaded(asked))
        else:
            self._do(self.machine.passed(asked, outcome))

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Load():
                assert received is not None, "a state was received"
                assert isinstance(received.message, Welcome), "with a welcome"
                self.num_stays += 1
                self.hands.take(received.message, received.payload)
                self._compute(effect)
            case do.Pass():
                self.hands.bind(effect)
                self._compute(effect)
            case do.Receive(message):
                self.hands.receive(message, payload_of(received))
            case _:
                return super()._one(effect, received)
        return []
