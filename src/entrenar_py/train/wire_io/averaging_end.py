"""The averaging coordinator without the network: its machine, codecs, and the gradients it holds.

A gradient is held from its first byte until its part is averaged, an average until it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from blake3 import blake3

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic.reduction import Vector
from entrenar_py.train.arithmetic.weighted_average import first_not_finite, weighted_mean
from entrenar_py.train.upstream import wire_effects as wire
from entrenar_py.train.upstream.averager import Averager
from entrenar_py.train.upstream.wire_frames import SHORT_BYTES_MAX, Decoder, Received, encode
from entrenar_py.train.upstream.wire_messages import (
    FROM_WORKERS,
    UPLOADS,
    JoinRequest,
    Part,
    WireMessage,
)
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire_io.endpoints import Beside, Notify, unnoticed


class Wire(Protocol):
    """The place to which the end writes its messages."""

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        """Send `message`, which is encoded in `buffers`, after all earlier messages."""
        ...

    def admit(self, peer: Peer) -> None:
        """Note that `peer` takes part."""
        ...

    def close(self, peer: Peer, reason: str) -> None:
        """Close the connection once everything is sent; the end gets no more events of it."""
        ...


class Average(NamedTuple):
    """The average of a part, float32 [num_gradients], the BLAKE3 digest of its bytes, and how long
    it took.
    """

    vector: Vector
    digest: str
    seconds: float


class AveragingEnd:
    """Carries out the effects of `machine`. `finished` is its Finish effect, None until then.

    Frames of workers may have `frame_bytes_max`. Averages are computed `beside` the caller.
    `averages` has those of the current step, by part.
    """

    def __init__(
        self,
        machine: Averager,
        to: Wire,
        clock: Callable[[], float],
        beside: Beside,
        *,
        frame_bytes_max: int,
        notify: Notify = unnoticed,
    ) -> None:
        self.machine = machine
        self.finished: do.Finish | None = None
        self.averages: dict[Part, Average] = {}
        self._wire, self._clock, self._beside = to, clock, beside
        self._frame_bytes_max, self._notify = frame_bytes_max, notify
        self._decoders: dict[Peer, Decoder] = {}
        self._kept: defaultdict[Part, dict[int, Vector]] = defaultdict(dict)  # by shard

    # --- events -----------------------------------------------------------------------------------

    def connected(self, peer: Peer, host: str) -> None:
        """Take a new connection."""

        def room(message: WireMessage, num_bytes: int) -> memoryview | None:
            assert isinstance(message, UPLOADS), "a worker sends no other gradients"
            kept = self.machine.keeps(peer, message)
            return np.empty(num_bytes, np.uint8).data if kept else None

        self._decoders[peer] = Decoder(bytes_max=SHORT_BYTES_MAX, kinds=(JoinRequest,), room=room)
        self._follow(self.machine.connected(peer, host, self._clock()))

    def buffer(self, peer: Peer) -> memoryview | None:
        """Return the memory for the next bytes of `peer`; None to discard them."""
        decoder = self._decoders.get(peer)
        return None if decoder is None else decoder.buffer()

    def filled(self, peer: Peer, num_bytes: int) -> None:
        """Take `num_bytes` that were written to `buffer(peer)`."""
        decoder, now = self._decoders.get(peer), self._clock()
        if decoder is None:
            return
        self.machine.heard(peer, now)
        try:
            received = decoder.filled(num_bytes)
        except ProtocolError as error:
            self._follow(self.machine.lost(peer, str(error), now))
            return
        if received is not None:
            self._follow(self._receive(peer, received, now), received)

    def lost(self, peer: Peer, reason: str) -> None:
        """Note that the connection is lost, or must end."""
        self._decoders.pop(peer, None)
        self._follow(self.machine.lost(peer, reason, self._clock()))

    def tick(self) -> None:
        """Tell the machine the time."""
        self._follow(self.machine.tick(self._clock()))

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run when the step is made, or `at_once`."""
        self._follow(self.machine.stop(reason, at_once=at_once))

    def _receive(self, peer: Peer, received: Received, now: float) -> list[Effect]:
        message, gradients = received.message, received.gradients
        if gradients is not None and isinstance(message, UPLOADS):
            vector = _vector(gradients)
            element = first_not_finite(vector)
            if element is not None:
                value = float(vector[element])
                return self.machine.not_finite(peer, message, element, value)
        return self.machine.receive(peer, message, now, kept=gradients is not None)

    # --- effects ----------------------------------------------------------------------------------

    def _follow(self, effects: Sequence[Effect], received: Received | None = None) -> None:
        """Carry out `effects`, which follow from the message `received`."""
        for effect in effects:
            match effect:
                case wire.Tell(peer, message, part):
                    self._tell(peer, message, part)
                case wire.Admit(peer):
                    decoder = self._decoders[peer]
                    decoder.bytes_max, decoder.kinds = self._frame_bytes_max, FROM_WORKERS
                    self._wire.admit(peer)
                case wire.KeepPart(_, shard, part):
                    assert received is not None, "what is kept was received"
                    assert received.gradients is not None, "what is kept has memory"
                    self._kept[part][shard] = _vector(received.gradients)
                case wire.VoidPart(shard, part):
                    del self._kept[part][shard]
                case wire.BeginStep():
                    self.averages.clear()
                case wire.AveragePart(step, part, weights):
                    self._average(step, part, weights)
                case do.Close(peer, reason):
                    self._decoders.pop(peer, None)
                    self._wire.close(peer, reason)
                case do.Finish():
                    self.finished = effect
                    self._kept.clear()
            self._notify(effect)

    def _tell(self, peer: Peer, message: WireMessage, part: Part | None) -> None:
        if peer not in self._decoders:
            return
        gradients = b"" if part is None else self.averages[part].vector.data
        counts = self._decoders[peer].counts
        self._wire.write(peer, message, list(encode(message, gradients, counts=counts)))

    def _average(self, step: int, part: Part, weights: tuple[int, ...]) -> None:
        kept = self._kept.pop(part)
        vectors = [kept[shard] for shard in sorted(kept)]
        kept.clear()

        def work() -> Average:
            since = self._clock()
            mean = weighted_mean(vectors, weights)
            vectors.clear()
            digest = str(blake3(mean.view(np.uint8).data).hexdigest(16))
            return Average(mean, digest, self._clock() - since)

        def done(average: Average) -> None:
            if self.finished is None:
                self.averages[part] = average
                self._follow(self.machine.averaged(step, part, self._clock()))

        self._beside.run(work, done)


def _vector(gradients: memoryview) -> Vector:
    return np.frombuffer(gradients, "<f4")
