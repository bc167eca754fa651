"""The coordinator's work in a layer pipeline: it has the whole state, and makes every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`; a worker gets the state of its stage alone."""
        if isinstance(message, Welcome):
            return self._stage_state(self.cut.stage_of_rank(message.rank))
        return super().payload(message)

    def _stage_state(self, stage: int) -> Buffer:
        arrays: Mapping[str, Any] = self.replica.replica.arrays
        progress = state.Progress(position=self.position, schedule_step=self.schedule_step)
        return state.dump(self.cut.specs[stage], updates.held(self.scenario), progress, arrays, {})
