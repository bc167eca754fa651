"""The coordinator of a mesh that may run for weeks: it steers, its workers hold the state.

It records and tells what a star's host does, of steps that its workers make. The state is here only
when one of them was asked for it.
"""

from __future__ import annotations

import math

from entrenar_py import trace
from entrenar_py.errors import ProtocolError
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Applied, Computed, Message, State
from entrenar_py.service.host import Host


class MeshHost(Host):
    """`held_step` is the step before which the state is here; the workers may be ahead of it."""

    held_step = 0
    _told_step = -1  # the last that was told to be made

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        """Also returns only if who made a step says with which loss: here nobody computes it."""
        super().require(rank, message, payload)
        if isinstance(message, Applied) and _loss_in(payload) is None:
            raise ProtocolError("Applied without the loss of its step")

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        """Also tells that a step is made, when the first worker says so."""
        super().keep(rank, message, payload)
        if isinstance(message, Computed):  # nothing else of a delivery comes by here
            self._watch.delivered(rank)
        elif isinstance(message, State):
            self.held_step = message.step
        elif isinstance(message, Applied) and message.step > self._told_step:
            self._told_step = message.step
            loss = _loss_in(payload)
            assert loss is not None, "require has seen it"
            self._tell_made(message.step, loss=loss)

    def resume(self) -> int:
        """Takes the state from the checkpoint, if there is one; the next step."""
        self.held_step = super().resume()
        return self.held_step

    def finish(self, finish: Finish) -> None:
        """Writes down how the run ended, and the last state that is here if nobody has."""
        self._step = self.held_step
        super().finish(finish)


def _loss_in(payload: Buffer) -> float | None:
    """The mean loss of the step that the events in `payload` record; None without a finite one."""
    events = trace.load_events(bytes(payload))
    losses = [one.loss for one in events if isinstance(one, trace.Update)]
    return next((loss for loss in losses if loss is not None and math.isfinite(loss)), None)
