"""The coordinator's work in a layer pipeline: it has the whole state, and makes every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from entrenar_py import trace
from entrenar_py.errors import ProtocolError
from entrenar_py.pipeline.cut import Cut
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Message, Welcome
from entrenar_py.protocol.terms import Run, Terms
from entrenar_py.scenario import Scenario
from entrenar_py.systems import updates
from entrenar_py.systems.star.server import Server
from entrenar_py.training import state
from entrenar_py.training.tensors import Workload


class PipelineServer(Server):
    """The run as its coordinator holds it; `cut` says which tensors are each stage's."""

    def __init__(self, scenario: Scenario, *, cut: Cut, workload: Workload, **named: Any) -> None:
        """Take the arguments of `Server`."""
        super().__init__(scenario, workload=workload, **named)
        self.cut = cut
        self.blocks = cast(Any, cut.blocks)
        self._loss_known = False  # of the step in work, from the last stage

    @property
    def terms(self) -> Terms:
        """The digests of the run; the manifest's is that of tensors and stages."""
        return self.cut.terms(super().terms)

    def run_between(self, first: int, last: int) -> Run:
        """See `Server`; the ranks are the places of the plan."""
        run = super().run_between(first, last)
        return self.cut.placed(run)

    def _total_after(self, block: int, loss: float, weight: float) -> tuple[float, float]:
        """Return what the last stage says, once it has: others don't know the loss."""
        if self.cut.blocks.stage_of(block) == len(self.cut.stages) - 1:
            self._loss_known = True
            return loss, weight
        return self._total if self._loss_known else (loss, weight)

    def gather(self, step: int) -> None:
        """See `Server`."""
        super().gather(step)
        self._loss_known = False

    def _completed(self, event: trace.Event) -> trace.Event:
        """Compare what a worker holds with what is held here, and record the rest of `event`.

        No two stages have the same tensors, so a judge of their events could compare nothing. The
        whole state is recorded with each checkpoint. Raises ProtocolError for other weights.
        """
        event = super()._completed(event)
        if not isinstance(event, trace.Start | trace.Update):
            return event
        arrays = self.replica.replica.arrays
        names = [spec.name for spec in self.cut.specs[self.cut.stage_of_rank(event.rank)]]
        held = self.recorder.tensors({name: arrays[name] for name in names})
        for name in names:
            theirs = event.weights.get(name)
            if theirs is None or theirs.digest != held[name].digest:
                raise ProtocolError(
                    f"rank {event.rank} holds other weights than it was sent: {name}, step "
                    f"{event.step}"
                )
        return replace(event, weights={}, optimizer={}, buffers={})

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`; a worker gets the state of its stage alone."""
        if isinstance(message, Welcome):
            return self._stage_state(self.cut.stage_of_rank(message.rank))
        return super().payload(message)

    def _stage_state(self, stage: int) -> Buffer:
        arrays: Mapping[str, Any] = self.replica.replica.arrays
        progress = state.Progress(position=self.position, schedule_step=self.schedule_step)
        return state.dump(self.cut.specs[stage], updates.held(self.scenario), progress, arrays, {})
