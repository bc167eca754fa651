"""The codecs of one connection, and how much of what goes through them: see `Meter`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from entrenar_py.protocol.frames import Buffer, Decoder, Encoder, Received
from entrenar_py.protocol.messages import Message


@dataclass(slots=True)
class Count:
    """Whole messages of one kind, their payloads, and all of their bytes, prefixes and headers
    included.
    """

    messages: int = 0
    payload_bytes: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Meter:
    """What went over connections, by the name of the message.

    Counted where frames meet the socket: what was sent when its bytes are taken for writing, what
    was got when they were read. A message that was not whole is in no count but that of bytes.
    """

    sent: defaultdict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    got: defaultdict[str, Count] = field(default_factory=lambda: defaultdict(Count))


class Stream:
    """One connection's codecs; what goes through them is counted in `meter`."""

    def __init__(self, decoder: Decoder, encoder: Encoder, meter: Meter) -> None:
        self.decoder, self.encoder, self._meter = decoder, encoder, meter
        self._came_bytes = 0  # of the message in work

    def secure(self, key: bytes) -> None:
        """All later frames are keyed, in both directions."""
        self.decoder.key = self.encoder.key = key

    def encode(self, message: Message, payload: Buffer) -> Iterator[Buffer]:
        """The bytes of `message`, in order, each to be taken when it can be sent."""
        count = self._meter.sent[type(message).__name__]
        for buffer in self.encoder.encode(message, payload):
            count.bytes += memoryview(buffer).nbytes
            yield buffer
        count.messages += 1
        count.payload_bytes += memoryview(payload).nbytes

    def filled(self, num_bytes: int) -> Received | None:
        """As the decoder's."""
        self._came_bytes += num_bytes
        received = self.decoder.filled(num_bytes)
        if received is not None:
            count = self._meter.got[type(received.message).__name__]
            count.messages += 1
            count.payload_bytes += received.payload.nbytes
            count.bytes += self._came_bytes
            self._came_bytes = 0
        return received
