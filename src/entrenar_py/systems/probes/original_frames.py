"""The original system's frames, valid and malformed, for the probe `wire`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from blake3 import blake3

from entrenar_py.train.upstream.frames import LAYOUTS, Decoder, Received, encode
from entrenar_py.train.upstream.messages import WIRE_MESSAGES, WireMessage

PREFIX = "original: "  # of the names of messages and cases
NARROW = struct.Struct("<I")
BYTES_MAX = 2**20  # of a frame
_HUGE = struct.pack("<Q", 2**62)
_VALUES: dict[str, Any] = {
    "U8": 2**8 - 1,
    "U32": 2**32 - 1,
    "U64": 2**64 - 1,
    "F32": -0.0,
    "Text": "é\n",
    "Sizes": (),
    "Gradients": 0,
}


def letters(odd_floats: bytes) -> Iterator[tuple[WireMessage, bytes]]:
    """Yield every message, and with `odd_floats` as gradients where it has any."""
    count = len(odd_floats) // 4
    for kind in WIRE_MESSAGES.values():
        message = kind(**{field.name: _VALUES[str(field.type)] for field in fields(kind)})
        yield message, b""
        if LAYOUTS[kind].has_gradients:
            changes: dict[str, Any] = {"gradients": count}
            if LAYOUTS[kind].has_sizes:
                changes["component_sizes"] = (0, 1, count - 1)
            yield replace(message, **changes), odd_floats


def frames_of(message: WireMessage, gradients: bytes) -> Iterator[bytes]:
    """Yield the frame of a message, and the one that the original program writes if it differs."""
    yield b"".join(encode(message, gradients))
    if LAYOUTS[type(message)].has_sizes:
        yield b"".join(encode(message, gradients, counts=NARROW))


def decoder() -> Decoder:
    """Return a decoder of all messages, which takes memory for what a room is asked for."""

    def room(message: WireMessage, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    return Decoder(bytes_max=BYTES_MAX, kinds=tuple(WIRE_MESSAGES.values()), room=room)


def digest(received: Received) -> str:
    """Return a digest of a message and its gradients."""
    text = repr(received.message).encode()
    return str(blake3(text + b"\n").update(received.gradients or b"").hexdigest(16))


def malformed() -> Iterator[tuple[str, bytes, int]]:
    """Yield the name of a defect, bytes that have it, and the bytes of memory that they claim."""
    claimed = 2**64
    yield "a frame of 4 GiB", struct.pack(">I", 2**32 - 1) + b"\x04", 2**32 - 1
    yield "2^62 gradients", _frame(b"\x04" + bytes(12) + _HUGE + bytes(20)), claimed
    yield "2^62 gradients of a component", _frame(b"\x0a" + bytes(13) + _HUGE), claimed
    sized = b"\x08" + struct.pack("<QIII", 1, 2, 0, 4)
    yield "2^62 components", _frame(sized + _HUGE + bytes(8)), claimed
    yield "2^32 - 1 components", _frame(sized + b"\xff" * 4 + bytes(12)), 2**34
    wrong_sum = sized + struct.pack("<QIIQ", 2, 1, 1, 3) + bytes(12)
    yield "components of another sum", _frame(wrong_sum), 12
    yield "a text of 4 GiB", _frame(b"\x01" + b"\xff" * 4 + bytes(8)), 2**32
    yield "text that is not UTF-8", _frame(b"\x06" + struct.pack("<I", 1) + b"\xff" + bytes(8)), 1
    yield "no tag", _frame(b""), 0
    yield "an unknown tag", _frame(b"\x0c" + bytes(20)), 0
    yield "bytes after the last field", _frame(b"\x07\x00"), 0
    yield "a field too few", _frame(b"\x02" + bytes(4)), 0
    short = b"\x05" + bytes(8) + struct.pack("<Q", 2) + bytes(4) + bytes(4)
    yield "a gradient too few", _frame(short), 8
    yield "a request of another protocol", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body
