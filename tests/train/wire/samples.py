"""A fixed sample of every message, and its frame as bytes, for any reader of the format.

`python -m tests.train.wire.samples` prints the current vectors. They are stored in
`tests/golden/frames.json`; a change there requires a new version of the protocol.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from entrenar_py.train.wire import frames
from entrenar_py.train.wire.frames import UNKEYED, Encoder
from entrenar_py.train.wire.messages import (
    VERSION,
    Accept,
    Activation,
    ActivationGradient,
    Applied,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Fetch,
    Group,
    Halt,
    Heartbeat,
    Hello,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Offer,
    Overflow,
    Partial,
    Piece,
    Refuse,
    Shutdown,
    Staged,
    State,
    Summed,
    TreeNode,
    Unreachable,
    Want,
    Weights,
    Welcome,
)
from tests.train.wire.speech import KEY, written

GOLDEN = Path(__file__).parents[2] / "golden" / "frames.json"

# -0.0, a NaN with a payload, the least denormal and -inf: a vector's bits are not its numbers.
VECTOR = struct.pack("<4I", 0x80000000, 0x7FC00123, 0x00000001, 0xFF800000)
EVENTS = b'{"kind": "end"}\n'

SAMPLES: dict[type[Message], tuple[Message, bytes]] = {
    type(message): (message, payload)
    for message, payload in (
        (Challenge(version=VERSION, nonce="00112233445566778899aabbccddeeff"), b""),
        (
            Hello(
                version=VERSION,
                run="run-7",
                manifest="5eed" * 16,
                data="da7a" * 16,
                backend="cpu",
                rank=None,
                port=None,
                nonce="ffeeddccbbaa99887766554433221100",
                proof="0123456789abcdef" * 4,
            ),
            b"",
        ),
        (Welcome(rank=2, step=0, blocks=3, resumed=False, proof="fedcba9876543210" * 4), VECTOR),
        (Refuse(reason="run='x': this run has 'é'", retry=False), b""),
        (Loaded(step=0), EVENTS),
        (
            Offer(
                heartbeat_s=5.0,
                dead_after_s=30.0,
                package="0123456789abcdef" * 4,
                proof="0f1e2d3c4b5a6978" * 4,
            ),
            b'{"seed": 0}',
        ),
        (Want(file="0123456789abcdef" * 4, offset=2**20), b""),
        (Piece(file="0123456789abcdef" * 4, offset=2**20), b"any bytes\x00"),
        (Fetch(step=3), b""),
        (State(step=3), VECTOR),
        (Accept(proof="00ff" * 16), b""),
        (Assign(step=0, shards=(0, 1, 5)), b""),
        (Computed(step=0, shards=(0, 1, 5)), EVENTS),
        (
            TreeNode(step=0, round=1, block=2, level=1, index=0, loss=float("nan"), weight=8.0),
            VECTOR,
        ),
        (
            NonFinite(
                step=0, shard=5, tensor="head.weight", element=17, loss=float("inf"), ids=(3, 9)
            ),
            EVENTS,
        ),
        (Average(step=0, round=1, block=2, loss=-0.0, weight=24.0), VECTOR),
        (Weights(step=0, block=2, loss=0.5, weight=24.0), VECTOR),
        (Staged(step=0, round=1), b""),
        (Commit(step=0), b""),
        (Applied(step=0), EVENTS),
        (
            Group(
                step=3,
                round=1,
                holders=(0, 0, 2, 2),
                ranks=(0, 2),
                addresses=("[::1]:7000", "w2:7000"),
            ),
            b"",
        ),
        (Partial(step=3, round=1, block=2, hops=1, loss=2.5, weight=8.0), VECTOR),
        (Unreachable(round=1, rank=2, reason="refused"), b""),
        (Overflow(step=3, block=2), b""),
        (Heartbeat(), b""),
        (Leave(reason="asked to"), b""),
        (Halt(step=2**63 - 1, reason="non-finite"), b""),
        (Shutdown(problem=None), b""),
        (Activation(step=3, round=1, shard=2, dtype="bfloat16", draws=4), VECTOR),
        (ActivationGradient(step=3, round=1, shard=2), VECTOR),
        (Summed(step=3, round=1, shards=(0, 1), times_us=(1, 5, 9, 3, 9, 12)), EVENTS),
    )
}


def vectors() -> list[dict[str, Any]]:
    """Return the samples as sent in one direction of a connection, in the order of `MESSAGES`."""
    encoder, rows = Encoder(KEY), []
    for number, (message, payload) in enumerate(SAMPLES.values()):
        (frame,) = written(encoder, message, payload)
        rows.append(
            {
                "message": type(message).__name__,
                "number": number,
                "key": None if isinstance(message, UNKEYED) else KEY.hex(),
                "header": frames.dump_header(message).decode(),
                "payload": payload.hex(),
                "frame": frame.hex(),
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
