"""The codec of the original system's wire: its bytes, its refusals, its memory."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.upstream import frames as say
from entrenar_py.train.upstream.frames import (
    COMPONENTS_MAX,
    COUNT,
    LAYOUTS,
    SHORT_BYTES_MAX,
    TEXT_BYTES_MAX,
    WIRE_MESSAGES,
    Decoder,
    Received,
    WireMessage,
    encode,
)
from tests.train.upstream import original

NARROW = struct.Struct("<I")
FLOATS = (1.5, -0.0, 2.0**-149)
PAYLOAD = struct.pack("<3f", *FLOATS)

# Each message, its payload, and its bytes as the description has them.
GOLDEN: list[tuple[WireMessage, bytes, bytes]] = [
    (
        say.JoinRequest(node_id="nöde", gpu_count=2, backend="cuda"),
        b"",
        original.join("nöde", gpus=2, backend="cuda"),
    ),
    (say.JoinAccepted(worker_id=1, total_workers=3), b"", original.accepted(1, 3)),
    (say.ShardAssignment(step=2**40, start=5, end=9), b"", original.assignment(2**40, 5, 9)),
    (
        say.GradientPayload(step=7, worker_id=1, gradients=3, loss=0.5, correct=2, total=2**40),
        PAYLOAD,
        original.gradient(7, 1, FLOATS, correct=2, total=2**40),
    ),
    (
        say.AveragedGradient(step=7, gradients=3, loss=0.25),
        PAYLOAD,
        original.averaged(7, FLOATS, 0.25),
    ),
    (say.Heartbeat(node_id="n", timestamp_ms=9), b"", original.heartbeat("n", at_ms=9)),
    (say.Shutdown(), b"", original.SHUTDOWN),
    (
        say.BlockGradient(
            step=1, worker_id=2, block=0, num_blocks=4, component_sizes=(1, 0, 2), gradients=3
        ),
        PAYLOAD,
        original.block(1, 2, 0, 4, (1, 0, 2), FLOATS),
    ),
    (
        say.AveragedBlock(step=1, block=0, component_sizes=(1, 2), gradients=3),
        PAYLOAD,
        original.averaged_block(1, 0, (1, 2), FLOATS),
    ),
    (
        say.NonBlock(step=1, worker_id=2, component=255, gradients=3),
        PAYLOAD,
        original.non_block(1, 2, 255, FLOATS),
    ),
    (
        say.AveragedNonBlock(step=1, component=2, gradients=3),
        PAYLOAD,
        original.averaged_non_block(1, 2, FLOATS),
    ),
]
IDS = [type(message).__name__ for message, _, _ in GOLDEN]


def new(*, bytes_max: int = 2**20, keep: bool = True) -> Decoder:
    def room(message: WireMessage, num_bytes: int) -> memoryview | None:
        return memoryview(bytearray(num_bytes)) if keep else None

    return Decoder(bytes_max=bytes_max, kinds=tuple(WIRE_MESSAGES.values()), room=room)


def read(data: bytes, **how: Any) -> list[Received]:
    return list(new(**how).feed(data))


def read_bytewise(data: bytes) -> None:
    decoder = new()
    for at in range(len(data)):
        list(decoder.feed(data[at : at + 1]))


def test_every_message_has_golden_bytes() -> None:
    """A new message needs a row here."""
    assert [message.tag for message, _, _ in GOLDEN] == list(WIRE_MESSAGES) == list(range(1, 12))


@pytest.mark.parametrize(("message", "payload", "data"), GOLDEN, ids=IDS)
def test_the_bytes_are_those_of_the_description(
    message: WireMessage, payload: bytes, data: bytes
) -> None:
    """Written and read by the codec, they equal what `struct` makes of the description."""
    assert b"".join(encode(message, payload)) == data
    (received,) = read(data)
    assert received.message == message
    assert bytes(received.gradients or b"") == payload


@pytest.mark.parametrize(("message", "payload", "data"), GOLDEN, ids=IDS)
def test_one_byte_at_a_time(message: WireMessage, payload: bytes, data: bytes) -> None:
    """Pieces of one byte give the same message, and nothing before the last of them."""
    decoder = new()
    got = [list(decoder.feed(data[at : at + 1])) for at in range(len(data))]
    assert not any(got[:-1])
    assert [one.message for one in got[-1]] == [message]
    assert bytes(got[-1][0].gradients or b"") == payload


def test_frames_follow_each_other() -> None:
    """A stream of all messages is read as what it is, also if gradients are discarded."""
    stream = b"".join(data for _, _, data in GOLDEN)
    messages = [message for message, _, _ in GOLDEN]
    assert [one.message for one in read(stream)] == messages
    discarded = read(stream, keep=False)
    assert [one.message for one in discarded] == messages
    assert [one.gradients for one in discarded] == [None] * len(GOLDEN)


@given(data=st.data())
def test_any_message_survives(data: st.DataObject) -> None:
    """Whatever the fields hold, in whatever pieces it comes, it is read as it was written."""
    kind = data.draw(st.sampled_from(list(WIRE_MESSAGES.values())))
    values = {
        "U8": st.integers(0, 2**8 - 1),
        "U32": st.integers(0, 2**32 - 1),
        "U64": st.integers(0, 2**64 - 1),
        "F32": st.floats(width=32, allow_nan=False),
        "Text": st.text(max_size=40),
        "Sizes": st.lists(st.integers(0, 5), max_size=6).map(tuple),
        "Gradients": st.integers(0, 40),
    }
    message = kind(**{f.name: data.draw(values[str(f.type)]) for f in fields(kind)})
    if isinstance(message, say.BlockGradient | say.AveragedBlock):
        message = replace(message, gradients=sum(message.component_sizes))
    num_floats = getattr(message, "gradients", 0)
    payload = data.draw(st.binary(min_size=4 * num_floats, max_size=4 * num_floats))
    counts = data.draw(st.sampled_from([COUNT, NARROW]))
    frame = b"".join(encode(message, payload, counts=counts))
    decoder, got = new(), list[Received]()
    while frame:
        cut = data.draw(st.integers(1, len(frame)))
        got += decoder.feed(frame[:cut])
        frame = frame[cut:]
    assert [one.message for one in got] == [message]
    assert bytes(got[0].gradients or b"") == payload
    if LAYOUTS[kind].has_sizes:
        assert decoder.counts.format == counts.format


def test_both_counts_of_components_are_told_apart() -> None:
    """The original program counts them with a u32: it is read, and remembered for the answer."""
    for components in ((2, 1), (0, 3), (3, 0), (0, 0, 3), (3,)):
        for form in ("<Q", "<I"):
            decoder = new()
            data = original.block(1, 2, 0, 4, components, FLOATS, count=form)
            (received,) = decoder.feed(data)
            assert isinstance(received.message, say.BlockGradient)
            assert received.message.component_sizes == components
            assert bytes(received.gradients or b"") == PAYLOAD
            assert decoder.counts.format == form


# --- what is refused --------------------------------------------------------------------------

HUGE = struct.pack("<Q", 2**62)


def _block_head(rest: bytes) -> bytes:
    return original.frame(b"\x08" + struct.pack("<QIII", 1, 2, 0, 4) + rest)


REFUSED = {
    "no tag": (struct.pack(">I", 0), "length=0"),
    "longer than the cap": (struct.pack(">I", 2**20 + 1), "a frame may have 1048576 bytes"),
    "an unknown tag": (original.frame(b"\x0c"), "tag=0x0c: no message has it"),
    "tag 0": (original.frame(b"\x00"), "tag=0x00"),
    "2^62 gradients": (
        original.frame(b"\x04" + bytes(12) + HUGE + bytes(20)),
        f"gradients={2**62}: its frame would have",
    ),
    "2^62 gradients, 4 times wraps to 0": (
        original.frame(b"\x0a" + bytes(13) + HUGE),
        f"gradients={2**62}",
    ),
    "2^62 components": (
        _block_head(HUGE + bytes(8)),
        f"component_sizes has {2**62}: use {COMPONENTS_MAX} at most",
    ),
    "2^32 - 1 components": (_block_head(b"\xff" * 4 + bytes(12)), "component_sizes has 4294967295"),
    "too many components": (
        _block_head(
            struct.pack("<Q", COMPONENTS_MAX + 1) + bytes(4 * (COMPONENTS_MAX + 1)) + bytes(8)
        ),
        f"component_sizes has {COMPONENTS_MAX + 1}",
    ),
    "sizes of another sum": (
        original.block(1, 2, 0, 4, (2, 2), FLOATS),
        "gradients=3: its component_sizes add up to 4",
    ),
    "more gradients than the frame has": (
        original.frame(b"\x04" + bytes(12) + struct.pack("<Q", 3) + bytes(8) + bytes(20)),
        "gradients=3: its frame would have 53 bytes, but it has 49",
    ),
    "fewer gradients than the frame has": (
        original.frame(b"\x05" + bytes(8) + struct.pack("<Q", 1) + bytes(8) + bytes(4)),
        "gradients=1",
    ),
    "a gradient without its end": (original.frame(b"\x04" + bytes(20)), "use at least 41"),
    "bytes after the last field": (original.frame(b"\x07\x00"), "use 1"),
    "a long text": (
        original.frame(b"\x01" + struct.pack("<I", TEXT_BYTES_MAX + 1) + bytes(1500)),
        f"1025 bytes: use {TEXT_BYTES_MAX}",
    ),
    "a text of 4 GiB": (original.frame(b"\x01" + b"\xff" * 4 + bytes(8)), "4294967295 bytes"),
    "a text past its frame": (
        original.frame(b"\x01" + struct.pack("<I", 100) + bytes(50)),
        "use more",
    ),
    "text that is not UTF-8": (
        original.frame(b"\x06" + struct.pack("<I", 2) + b"\xff\xfe" + bytes(8)),
        "Heartbeat.node_id: not UTF-8",
    ),
    "a join that is too long": (original.frame(b"\x01" + bytes(SHORT_BYTES_MAX)), "use at most"),
    "a request of another protocol": (b"GET / HTTP/1.1\r\n\r\n", "length=1195725856"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_malformed_is_refused(case: str) -> None:
    """It gives a ProtocolError that says what is wrong, in whatever pieces it comes."""
    data, said = REFUSED[case]
    with pytest.raises(ProtocolError) as raised:
        read(data)
    assert said in str(raised.value)
    with pytest.raises(ProtocolError):
        read_bytewise(data)


@pytest.mark.parametrize("case", REFUSED)
def test_refusing_takes_little_memory(case: str) -> None:
    """Nothing is set aside for what was only claimed."""
    data, _ = REFUSED[case]
    decoder = new()
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        list(decoder.feed(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**19


def test_a_length_is_refused_before_anything_else_comes() -> None:
    """Four bytes are enough to be refused."""
    decoder = new(bytes_max=100)
    decoder.buffer()[:] = struct.pack(">I", 101)
    with pytest.raises(ProtocolError, match="length=101: a frame may have 100 bytes now"):
        decoder.filled(4)


def test_a_kind_is_refused_by_its_tag() -> None:
    """What may not come now is refused before its fields are read."""
    decoder = new()
    decoder.kinds = (say.JoinRequest,)
    with pytest.raises(ProtocolError, match="GradientPayload is not allowed now"):
        list(decoder.feed(original.gradient(0, 0, FLOATS)[:5]))


def test_half_a_frame_is_nothing() -> None:
    """No part of a message is a message."""
    for _, _, data in GOLDEN:
        for end in range(len(data)):
            assert read(data[:end]) == []


def test_gradients_are_received_where_they_stay() -> None:
    """The memory that `room` returns is filled directly; the fields after them are not known."""
    begun: list[WireMessage] = []
    place = memoryview(bytearray(12))

    def room(message: WireMessage, num_bytes: int) -> memoryview:
        begun.append(message)
        assert num_bytes == 12
        return place

    decoder = Decoder(bytes_max=100, kinds=(say.GradientPayload,), room=room)
    data = original.gradient(7, 1, FLOATS, loss=0.5, correct=2, total=3)
    list(decoder.feed(data[: 4 + 1 + 20]))
    (message,) = begun
    assert message == say.GradientPayload(
        step=7, worker_id=1, gradients=3, loss=0, correct=0, total=0
    )
    assert decoder.buffer().nbytes == 12
    (received,) = decoder.feed(data[4 + 1 + 20 :])
    assert received.gradients is not None
    assert received.gradients.obj is place.obj
    assert bytes(place) == PAYLOAD
