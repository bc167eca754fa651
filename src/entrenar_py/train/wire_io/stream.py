"""The codecs of one connection, and counts of the messages that they encode and decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from entrenar_py.train.wire.frames import Buffer, Decoder, Encoder, Received, Room
from entrenar_py.train.wire.messages import Message


@dataclass(slots=True)
class Count:
    """Counts for one kind of message; `bytes` includes prefixes, headers and payloads."""

    messages: int = 0
    payload_bytes: int = 0
    bytes: int = 0


class Meter:
    """Counts what went over connections, by the kind of message.

    Sent bytes count when they are taken for writing, perhaps in a connection's thread. A message
    that was sent in part counts in `bytes` only.
    """

    def __init__(self) -> None:
        self.sent: defaultdict[str, Count] = defaultdict(Count)
        self.got: defaultdict[str, Count] = defaultdict(Count)
        self._lock = Lock()

    def write(self, message: Message, num_bytes: int) -> None:
        """Count `num_bytes` of `message` as sent."""
        with self._lock:
            self.sent[type(message).__name__].bytes += num_bytes

    def wrote(self, message: Message, payload_bytes: int) -> None:
        """Count `message` as sent completely."""
        with self._lock:
            count = self.sent[type(message).__name__]
            count.messages += 1
            count.payload_bytes += payload_bytes

    def read(self, received: Received, num_bytes: int) -> None:
        """Count a whole received message of `num_bytes`."""
        with self._lock:
            count = self.got[type(received.message).__name__]
            count.messages += 1
            count.payload_bytes += received.payload.nbytes
            count.bytes += num_bytes


class Stream:
    """The codecs of one connection; `meter` counts their messages."""

    def __init__(
        self, sizes: Mapping[type[Message], int], room: Room, direction: int, meter: Meter
    ) -> None:
        """`sizes` gives the most payload bytes of a kind of message, 0 for kinds not in it;
        `direction` is that of the frames to send.
        """
        self.decoder = Decoder(lambda kind: sizes.get(kind, 0), direction=1 - direction, room=room)
        self.encoder, self._meter = Encoder(direction=direction), meter
        self._came_bytes = 0  # of the message that is being received

    def secure(self, key: bytes) -> None:
        """Use `key` for all later frames, in both directions."""
        self.decoder.key = self.encoder.key = key

    def encode(self, message: Message, payload: Buffer) -> Iterator[Buffer]:
        """Yield the bytes of `message` in pieces; take each one when it can be sent."""
        for buffer in self.encoder.encode(message, payload):
            self._meter.write(message, memoryview(buffer).nbytes)
            yield buffer
        self._meter.wrote(message, memoryview(payload).nbytes)

    def filled(self, num_bytes: int) -> Received | None:
        """Take `num_bytes` as `Decoder.filled` does, and count the message that they complete."""
        self._came_bytes += num_bytes
        received = self.decoder.filled(num_bytes)
        if received is not None:
            self._meter.read(received, self._came_bytes)
            self._came_bytes = 0
        return received
