"""Messages between the processes, over Unix sockets: a JSON object, with open files."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_LENGTH_BYTES = 8
_FDS_MAX = 8


def send(channel: socket.socket, message: Mapping[str, object], files: Sequence[int] = ()) -> None:
    """Send a message, and the descriptors `files`."""
    text = json.dumps(message).encode()
    socket.send_fds(channel, [len(text).to_bytes(_LENGTH_BYTES, "big")], [*files])
    channel.sendall(text)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if there will be no more."""
    try:
        head, files, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _FDS_MAX)
        if len(head) < _LENGTH_BYTES:
            return None
        left = int.from_bytes(head, "big")
        text = b""
        while len(text) < left and (piece := socket.socket.recv(channel, left - len(text))):
            text += piece
    except OSError:
        return None
    return (json.loads(text), files) if len(text) == left else None


def tell(file: int, line: str, *, closes: bool = True) -> None:
    """Write a line to who may still read it."""
    with suppress(OSError):
        os.write(file, line.encode())
    if closes:
        os.close(file)
