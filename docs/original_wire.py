"""The tables of docs/original-workers.md, drawn from the messages, machine and keys."""

from __future__ import annotations

import dataclasses

from entrenar_py.train.service.averaging import KEYS
from entrenar_py.train.service.averaging import TIMING_KEYS as TIMING
from entrenar_py.train.upstream import frames
from entrenar_py.train.upstream.averager import IGNORED_MAX, MAY_SEND
from entrenar_py.train.upstream.frames import WIRE_MESSAGES
from entrenar_py.train.upstream.terms import BLOCKS_MAX, Patience
from entrenar_py.train.wire_io import door

Rows = list[tuple[str, ...]]

FORMS = {
    "U8": "u8",
    "U32": "u32",
    "U64": "u64",
    "F32": "f32",
    "Text": "text: u32 bytes, UTF-8",
    "Sizes": "u64 count, then u32 each",
    "Gradients": "u64 count, then f32 each",
}
MESSAGE_HEAD = ("tag", "message", "sent by", "fields, in order", "meaning")
LEGAL_HEAD = ("a connection that is", "may send")
KEY_HEAD = ("key", "holds", "default", "means")
BOUND_HEAD = ("bound", "at most, unless set otherwise")


def messages() -> Rows:
    """Return a row per message."""
    return [
        (
            *(f"`{tag:02X}`", f"`{kind.__name__}`", kind.sender),
            "<br>".join(
                f"`{field.name}` {FORMS[str(field.type)]}" for field in dataclasses.fields(kind)
            ),
            " ".join((kind.__doc__ or "").split()),
        )
        for tag, kind in WIRE_MESSAGES.items()
    ]


def legal() -> Rows:
    """Return a row per phase of a connection: what it may send."""
    return [
        (str(phase), ", ".join(f"`{kind.__name__}`" for kind in kinds))
        for phase, kinds in MAY_SEND.items()
    ]


def keys() -> Rows:
    """Return a row per key of a configuration."""
    return [(f"`{name}`", *row) for name, row in KEYS.items()]


def timing() -> Rows:
    """Return a row per timeout."""
    return [
        (f"`{name}`", "seconds > 0", f"`{getattr(Patience(), name):g}`", meaning)
        for name, meaning in TIMING.items()
    ]


def bounds() -> Rows:
    """Return a row per bound."""
    return [
        ("frame of a connection that has not joined", f"{frames.SHORT_BYTES_MAX} bytes"),
        ("frame of a worker", f"{frames.FRAME_BYTES_MAX} bytes (`frame_bytes_max`)"),
        ("all parts of one shard's gradient", "`gradient_bytes_max`"),
        ("a text", f"{frames.TEXT_BYTES_MAX} bytes"),
        ("components of a block", str(frames.COMPONENTS_MAX)),
        ("blocks", str(BLOCKS_MAX)),
        ("connections that have not joined", str(door.STRANGERS_MAX)),
        ("workers", "`world_size`"),
        ("messages of a worker that come twice or late", str(IGNORED_MAX)),
    ]
