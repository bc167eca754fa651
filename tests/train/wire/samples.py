"""A fixed sample of every message, and its frame as bytes, for any reader of the format.

Samples are stored in `tests/golden/frames.json`; a change there requires a new version of the
protocol. `python -m tests.train.wire.samples` prints the file, with a sample of each message that
it lacks.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from entrenar_py.train.wire import frames
from entrenar_py.train.wire.frames import UNKEYED, Encoder
from entrenar_py.train.wire.messages import MESSAGES, Message
from tests.train.wire.speech import KEY, written

GOLDEN = Path(__file__).parents[2] / "golden" / "frames.json"
ROWS: dict[str, dict[str, Any]] = {
    row["message"]: row for row in json.loads(GOLDEN.read_text("utf-8"))
}
# The fields of a message without a row.
_USUAL: dict[str, object] = {
    "bool": True,
    "int": 7,
    "float": 0.5,
    "str": "é",
    "tuple[int, ...]": [0, 5],
    "Nonce": "0123" * 8,
    "Proof": "0123" * 16,
    "Digest": "4567" * 16,
    "tuple[str, ...]": ["a", "b"],
}


def _sample(kind: type[Message]) -> tuple[Message, bytes]:
    row = ROWS.get(kind.__name__)
    types = {field.name: str(field.type).removesuffix(" | None") for field in fields(kind)}
    usual: dict[str, Any] = {name: _USUAL[form] for name, form in types.items()}
    values = usual if row is None else json.loads(row["header"])
    payload = b"payload" * bool(kind.carries) if row is None else bytes.fromhex(row["payload"])
    for name, value in values.items():  # read without the package's code, as others would
        if isinstance(value, list):
            values[name] = tuple(value)
        elif types[name] == "float":
            values[name] = float(value)
    return kind(**values), payload


SAMPLES = {kind: _sample(kind) for kind in MESSAGES.values()}


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
