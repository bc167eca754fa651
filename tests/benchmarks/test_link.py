"""A connection's cost above the kernel's: one message of 64 MB, one way, to another process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import tests
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Decoder, Encoder
from entrenar_py.train.wire.messages import TreeNode
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.link import Link
from tests.benchmarks.receiver import KEY
from tests.train.wire_io.certificates import Authority

NUM_BYTES = 64_000_000
CONTENT = os.urandom(NUM_BYTES)
NODE = TreeNode(step=0, round=0, block=0, level=0, index=0, loss=0.0, weight=1.0)
LOOPBACK = "127.0.0.1"
TOP = Path(next(iter(tests.__path__))).parent
ROUNDS = 25

Send = Callable[[], None]


@contextmanager
def receiver(kind: str, authority: Authority | None) -> Iterator[int]:
    """A process that receives; its port."""
    command = [sys.executable, "-m", "tests.benchmarks.receiver", kind, str(NUM_BYTES)]
    if authority is not None:
        own = authority.signed(kind)
        command += [str(own.cert), str(own.key)]
    path = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextmanager
def looping(authority: Authority | None) -> Iterator[Send]:
    """Sends with a blocking socket, and waits until all is there."""
    with receiver("loop", authority) as port:
        sock = asyncio.run(sockets.connect(LOOPBACK, port, patience_s=5.0))
        sock.setblocking(True)
        if authority is not None:
            context = sockets.client_context(ca=authority.ca)
            sock = context.wrap_socket(sock, server_hostname=LOOPBACK)

        def send() -> None:
            sock.sendall(CONTENT)
            assert sock.recv(1)

        with sock:
            yield send


@contextmanager
def linking(authority: Authority | None) -> Iterator[Send]:
    """Sends a message as an end of the protocol does, and waits for the answer."""
    with receiver("link", authority) as port, asyncio.Runner() as runner:
        answered = asyncio.Event()
        decoder, encoder = Decoder(lambda _: 0, KEY, direction=FROM_COORDINATOR), Encoder(KEY)

        def filled(_: Link, num_bytes: int) -> None:
            if decoder.filled(num_bytes) is not None:
                answered.set()

        async def connect() -> Link:
            sock = await sockets.connect(LOOPBACK, port, patience_s=5.0)
            if authority is not None:
                context = sockets.client_context(ca=authority.ca)
                sock = await sockets.secured(
                    sock, context, server_side=False, host=LOOPBACK, patience_s=10.0
                )
            return Link(
                sock, buffer=lambda _: decoder.buffer(), filled=filled, lost=lambda *_: None
            )

        link = runner.run(connect())

        async def send() -> None:
            answered.clear()
            link.write(encoder.encode(NODE, CONTENT))
            await answered.wait()

        async def close() -> None:
            link.close()
            await link.ended

        yield lambda: runner.run(send())
        runner.run(close())


@pytest.mark.parametrize(
    ("name", "ours", "peer"),
    [
        ("a link / a plain socket (goal 1.5x)", False, False),
        ("a link over TLS / a plain socket", True, False),
        ("a link over TLS / Python's ssl alone", True, True),
    ],
)
def test_link_against_sockets(
    beside: Callable[..., list[float]], tmp_path: Path, name: str, ours: bool, peer: bool
) -> None:
    """64 MB, checksums and all, beside the same bytes through a socket in a loop."""
    authority = Authority(tmp_path, "authority")
    with ExitStack() as ends:
        sends = [
            ends.enter_context(linking(authority if ours else None)),
            ends.enter_context(looping(authority if peer else None)),
        ]
        beside(name, ours=sends[0], peer=sends[1], rounds=ROUNDS)
