"""A connection's codecs count messages, their payloads, and all bytes."""

from __future__ import annotations

from entrenar_py.train.wire.frames import (
    CHUNK_BYTES,
    FROM_COORDINATOR,
    PREFIX_BYTES,
    TO_COORDINATOR,
    new_room,
)
from entrenar_py.train.wire.frames import dump_header as dump
from entrenar_py.train.wire.messages import Heartbeat, Message, TreeNode
from entrenar_py.train.wire_io.stream import Count, Meter, Stream

NODE = TreeNode(step=1, round=0, block=0, level=0, index=0, loss=1.0, weight=2.0)


def stream(meter: Meter, direction: int) -> Stream:
    """Return a stream that accepts payloads of any size."""
    made = Stream({TreeNode: 2**30}, new_room, direction, meter)
    made.secure(bytes(range(32)))
    return made


def told(one: Stream, message: Message, payload: bytes = b"") -> bytes:
    """Return all bytes of a message."""
    return b"".join(one.encode(message, payload))


def heard(one: Stream, data: bytes) -> None:
    """Feed `data` to the decoder, as much at a time as it takes."""
    left = memoryview(data)
    while left.nbytes:
        place = one.decoder.buffer()
        num_bytes = min(place.nbytes, left.nbytes)
        place[:num_bytes] = left[:num_bytes]
        left = left[num_bytes:]
        one.filled(num_bytes)


def test_both_ends_count_the_same() -> None:
    """For each kind: messages, payload bytes, and bytes with prefixes and headers."""
    here, there = Meter(), Meter()
    ours, theirs = stream(here, TO_COORDINATOR), stream(there, FROM_COORDINATOR)
    payload = bytes(2 * CHUNK_BYTES + 5)
    for message, carried in ((NODE, b"1234"), (Heartbeat(), b""), (NODE, payload)):
        heard(theirs, told(ours, message, carried))
    headers = 2 * len(dump(NODE))
    assert (
        here.sent
        == there.got
        == {
            "TreeNode": Count(2, len(payload) + 4, len(payload) + 4 + headers + 4 * PREFIX_BYTES),
            "Heartbeat": Count(1, 0, PREFIX_BYTES + len(dump(Heartbeat()))),
        }
    )
    assert not here.got
    assert not there.sent


def test_what_is_not_whole_counts_as_bytes_alone() -> None:
    """A broken message counts in bytes at the sender, not at the receiver."""
    here, there = Meter(), Meter()
    ours, theirs = stream(here, TO_COORDINATOR), stream(there, FROM_COORDINATOR)
    first = next(iter(ours.encode(NODE, b"1234")))
    heard(theirs, bytes(first))
    assert here.sent == {"TreeNode": Count(0, 0, PREFIX_BYTES + len(dump(NODE)))}
    assert not there.got
