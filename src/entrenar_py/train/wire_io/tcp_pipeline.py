"""A worker of a layer pipeline over TCP."""

from __future__ import annotations

import time
from typing import cast

from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.background_thread import Thread
from entrenar_py.train.wire_io.endpoints import Notify
from entrenar_py.train.wire_io.hands import MemberHands
from entrenar_py.train.wire_io.message_faults import Speak
from entrenar_py.train.wire_io.pipeline_end import PipelineEnd, PipelineHands
from entrenar_py.train.wire_io.tcp_mesh import MeshClient


class PipelineClient(MeshClient):
    """A worker that exchanges hidden states and gradients with the stages beside its own."""

    def new_end(
        self, machine: Worker, hands: MemberHands, speak: Speak, notify: Notify
    ) -> PipelineEnd:
        """Return the end that this client drives; `machine` and `hands` are those of a pipeline."""
        assert isinstance(machine, PipelineWorker)
        clock, self._beside = time.monotonic, Thread()
        return PipelineEnd(
            *(machine, cast(PipelineHands, hands), self, clock, self.compute, self.dial),
            *(self._beside, speak),
            proved=self._proved,
            notify=notify,
        )
