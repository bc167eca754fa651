"""The original system's second wire layout, written from its description with `struct` alone.

Nothing of the package's codec is used here: these are the bytes of a client that is not ours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

Read = Callable[[int], bytes]


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def floats(values: Sequence[float]) -> bytes:
    return struct.pack("<Q", len(values)) + struct.pack(f"<{len(values)}f", *values)


def sizes(values: Sequence[int], *, count: str = "<Q") -> bytes:
    """The upstream program counts these with a u32 (`<I`), the description with a u64."""
    return struct.pack(count, len(values)) + struct.pack(f"<{len(values)}I", *values)


# --- what a worker says -----------------------------------------------------------------------


def join(node: str = "node", *, gpus: int = 1, backend: str = "cpu") -> bytes:
    return frame(b"\x01" + text(node) + struct.pack("<I", gpus) + text(backend))


def gradient(
    step: int,
    worker: int,
    values: Sequence[float],
    *,
    loss: float = 0.5,
    correct: int = 0,
    total: int = 1,
) -> bytes:
    head = b"\x04" + struct.pack("<QI", step, worker) + floats(values)
    return frame(head + struct.pack("<fQQ", loss, correct, total))


def heartbeat(node: str = "node", *, at_ms: int = 0) -> bytes:
    return frame(b"\x06" + text(node) + struct.pack("<Q", at_ms))


def block(
    step: int,
    worker: int,
    number: int,
    num_blocks: int,
    components: Sequence[int],
    values: Sequence[float],
    *,
    count: str = "<Q",
) -> bytes:
    head = b"\x08" + struct.pack("<QIII", step, worker, number, num_blocks)
    return frame(head + sizes(components, count=count) + floats(values))


def non_block(step: int, worker: int, component: int, values: Sequence[float]) -> bytes:
    return frame(b"\x0a" + struct.pack("<QIB", step, worker, component) + floats(values))


# --- what a coordinator says ------------------------------------------------------------------


def accepted(worker: int, total: int) -> bytes:
    return frame(b"\x02" + struct.pack("<II", worker, total))


def assignment(step: int, start: int, end: int) -> bytes:
    return frame(b"\x03" + struct.pack("<QQQ", step, start, end))


def averaged(step: int, values: Sequence[float], loss: float) -> bytes:
    return frame(b"\x05" + struct.pack("<Q", step) + floats(values) + struct.pack("<f", loss))


SHUTDOWN = frame(b"\x07")


def averaged_block(
    step: int,
    number: int,
    components: Sequence[int],
    values: Sequence[float],
    *,
    count: str = "<Q",
) -> bytes:
    head = b"\x09" + struct.pack("<QI", step, number)
    return frame(head + sizes(components, count=count) + floats(values))


def averaged_non_block(step: int, component: int, values: Sequence[float]) -> bytes:
    return frame(b"\x0b" + struct.pack("<QB", step, component) + floats(values))


# --- reading ----------------------------------------------------------------------------------


def body(read: Read) -> bytes:
    """Return the next frame without its length; `read` returns exactly so many bytes."""
    (length,) = struct.unpack(">I", read(4))
    return read(length)


def parsed(data: bytes, *, count: str = "<Q") -> tuple[Any, ...]:
    """Return the tag of a coordinator's message, and its fields; vectors are tuples."""
    tag, at = data[0], 1

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return found

    def vector(form: str, counted: str = "<Q") -> tuple[Any, ...]:
        (number,) = take(counted)
        return take(f"<{number}{form}")

    fields: list[Any] = [tag, *take({2: "<II", 3: "<QQQ", 9: "<QI", 11: "<QB"}.get(tag, "<"))]
    if tag == 5:
        fields += [*take("<Q"), vector("f"), *take("<f")]
    if tag == 9:
        fields.append(vector("I", count))
    if tag in (9, 11):
        fields.append(vector("f"))
    assert at == len(data), f"{len(data) - at} bytes are left of a message with tag {tag}"
    return tuple(fields)
