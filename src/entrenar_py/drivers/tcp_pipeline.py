"""A worker of a layer pipeline over TCP."""

from __future__ import annotations

import time
from typing import cast

from entrenar_py.drivers.background_thread import Thread
from entrenar_py.drivers.endpoints import Notify
from entrenar_py.drivers.hands import MemberHands
from entrenar_py.drivers.message_faults import Speak
from entrenar_py.drivers.pipeline_end import PipelineEnd, PipelineHands
from entrenar_py.drivers.tcp_mesh import MeshClient
from entrenar_py.protocol.pipeline_worker import PipelineWorker
from entrenar_py.protocol.worker import Worker


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
