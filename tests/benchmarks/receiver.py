"""Run as a script, the other end of a connection whose speed is measured: takes message after
message of NUM_BYTES, and says so of each.

    receiver.py loop|link NUM_BYTES [CERT KEY]     prints its port; with CERT and KEY over TLS
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from pathlib import Path

from entrenar_py.train.wire.frames import FROM_COORDINATOR, Decoder, Encoder
from entrenar_py.train.wire.messages import Message, Staged
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.link import Link

KEY = bytes(range(32))


async def accepted(context: ssl.SSLContext | None) -> socket.socket:
    """The one connection that is made."""
    (listener,) = sockets.listen(await sockets.resolve("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    if context is None:
        return sock
    return await sockets.secured(sock, context, server_side=True, patience_s=10.0)


def loop(sock: socket.socket, num_bytes: int) -> None:
    """Reads as it comes, into memory that is there."""
    sock.setblocking(True)
    room, at = memoryview(bytearray(num_bytes)), 0
    while num_read := sock.recv_into(room[at:]):
        at += num_read
        if at == num_bytes:
            sock.sendall(b"x")
            at = 0


async def link(sock: socket.socket, num_bytes: int) -> None:
    """Reads as an end of the protocol does, into memory that is there."""
    memory = memoryview(bytearray(num_bytes))

    def room(message: Message, num_bytes: int) -> memoryview:
        return memory[:num_bytes]

    decoder = Decoder(lambda kind: num_bytes, KEY, room=room)
    encoder = Encoder(KEY, direction=FROM_COORDINATOR)

    def filled(link: Link, num_bytes: int) -> None:
        if decoder.filled(num_bytes) is not None:
            link.write(encoder.encode(Staged(step=0, round=0)))

    reading = Link(sock, buffer=lambda _: decoder.buffer(), filled=filled, lost=lambda *_: None)
    await reading.ended


async def serve(kind: str, num_bytes: int, context: ssl.SSLContext | None) -> None:
    """Until the other end has enough."""
    sock = await accepted(context)
    if kind == "link":
        await link(sock, num_bytes)
    else:
        loop(sock, num_bytes)
        sock.close()


if __name__ == "__main__":
    kind, size, *identity = sys.argv[1:]
    files = dict(zip(("cert", "key"), map(Path, identity), strict=False))
    asyncio.run(serve(kind, int(size), sockets.server_context(**files) if files else None))
