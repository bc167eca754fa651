"""Strangers that do anything but prove themselves, each action at a chosen turn of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st

from entrenar_py.shared.faults import Fault
from entrenar_py.systems.star import scenario_run
from entrenar_py.train.wire.frames import FIELDS, MAGIC
from entrenar_py.train.wire.messages import VERSION, Hello
from tests.train.wire_io.fakes import LOOPBACK, SECRET, TERMS

TURNS_MAX = 5  # of the loop: more than lie between any two moves of a door
FLOOD_BYTES = 2**18
RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed is reset


class End(StrEnum):
    """The end of a stranger's connection."""

    RESET = "reset"
    CLOSE = "close"
    HALF_CLOSE = "half_close"  # says that nothing more will come, and stays
    STAY = "stay"


@dataclass(frozen=True)
class Misdeed:
    """One stranger: after `first` turns it sends bytes, after `then` more it ends. `secured` is the
    number of turns that it takes part in a TLS handshake; None for one that speaks plain TCP.
    """

    first: int
    says: bytes
    answers: bool
    then: int
    end: End
    secured: int | None = None


def speeches() -> Mapping[str, bytes]:
    """Return the bytes that an uninvited client sends."""
    claim = FIELDS.pack(MAGIC, VERSION, Hello.tag, 1, 0, 0, 100, 0, 0) + bytes(16)
    return {
        "nothing": b"",
        "a byte": b"E",
        "garbage": bytes(range(256)),
        "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "a prefix": claim,
        "a hello that is none": claim + bytes(100),
        "a flood": bytes(FLOOD_BYTES),
        "a record of TLS": bytes.fromhex("1603010200"),
    }


def misdeeds(*, over_tls: bool) -> st.SearchStrategy[Misdeed]:
    """Generate strangers."""
    turns = st.integers(0, TURNS_MAX)
    return st.builds(
        Misdeed,
        first=turns,
        says=st.sampled_from(list(speeches().values())),
        answers=st.booleans(),
        then=turns,
        end=st.sampled_from(End),
        secured=st.none() | st.integers(0, 2 * TURNS_MAX) if over_tls else st.none(),
    )


async def commit(deed: Misdeed, port: int, context: ssl.SSLContext | None) -> socket.socket:
    """Do it; return the socket, which may still be open. This waits for no answer."""
    sock = socket.socket()
    sock.connect((LOOPBACK, port))  # the kernel answers, whatever the loop does meanwhile
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # sent away before it was done
        if context is not None and deed.secured is not None:
            sock = context.wrap_socket(
                sock, do_handshake_on_connect=False, server_hostname=LOOPBACK
            )
            await _shake_hands(sock, deed.secured)
        await _turns(deed.first)
        sock.send(deed.says or b"")
        if deed.answers:
            sock.send(_answer(sock))
        await _turns(deed.then)
        if deed.end is End.HALF_CLOSE:
            socket.socket.shutdown(sock, socket.SHUT_WR)
    if deed.end is End.RESET:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
    if deed.end in (End.RESET, End.CLOSE):
        sock.close()
    return sock


async def _shake_hands(sock: ssl.SSLSocket, turns: int) -> None:
    for _ in range(turns):
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await asyncio.sleep(0)


def _answer(sock: socket.socket) -> bytes:
    """Return a hello with a wrong secret, if there is a challenge already."""
    wrong = Fault(kind="stranger", step=0, value="wrong_secret")
    return b"".join(scenario_run.stranger_of(wrong, TERMS, SECRET).heard(sock.recv(2**12)))


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
