"""The codecs of one connection, and how much of what goes through them: see `Meter`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from entrenar_py.protocol.frames import Buffer, Decoder, Encoder, Received, Room
from entrenar_py.protocol.messages import Message


@dataclass(slots=True)
class Count:
    """Whole messages of one kind, their payloads, and all bytes, with prefixes and headers."""

    messages: int = 0
    payload_bytes: int = 0
    bytes: int = 0


class Meter:
    """Counts of what went over connections, by the name of the message.

    What was sent counts when its bytes are taken for writing, by threads of connections. A message
    that was not whole is in no count but that of bytes.
    """

    def __init__(self) -> None:
        self.sent: defaultdict[str, Count] = defaultdict(Count)
        self.got: defaultdict[str, Count] = defaultdict(Count)
        self._lock = Lock()

    def write(self, message: Message, num_bytes: int) -> None:
        """So many bytes of `message` are taken."""
        with self._lock:
            self.sent[type(message).__name__].bytes += num_bytes

    def wrote(self, message: Message, payload_bytes: int) -> None:
        """Count a message as whole."""
        with self._lock:
            count = self.sent[type(message).__name__]
            count.messages += 1
            count.payload_bytes += payload_bytes

    def read(self, received: Received, num_bytes: int) -> None:
        """A whole message came, of so many bytes."""
        with self._lock:
            count = self.got[type(received.message).__name__]
            count.messages += 1
            count.payload_bytes += received.payload.nbytes
            count.bytes += num_bytes


class Stream:
    """One connection's codecs; what goes through them is counted in `meter`."""

    def __init__(
        self, sizes: Mapping[type[Message], int], room: Room, direction: int, meter: Meter
    ) -> None:
        """`sizes` are the most payload bytes of a message, 0 where there is none; what is sent goes
        in `direction`.
        """
        self.decoder = Decoder(lambda kind: sizes.get(kind, 0), direction=1 - direction, room=room)
        self.encoder, self._meter = Encoder(direction=direction), meter
        self._came_bytes = 0  # of the message in work

    def secure(self, key: bytes) -> None:
        """All later frames are keyed, in both directions."""
        self.decoder.key = self.encoder.key = key

    def encode(self, message: Message, payload: Buffer) -> Iterator[Buffer]:
        """The bytes of `message`, in order, each to be taken when it can be sent."""
        for buffer in self.encoder.encode(message, payload):
            self._meter.write(message, memoryview(buffer).nbytes)
            yield buffer
        self._meter.wrote(message, memoryview(payload).nbytes)

    def filled(self, num_bytes: int) -> Received | None:
        """As the decoder's."""
        self._came_bytes += num_bytes
        received = self.decoder.filled(num_bytes)
        if received is not None:
            self._meter.read(received, self._came_bytes)
            self._came_bytes = 0
        return received
