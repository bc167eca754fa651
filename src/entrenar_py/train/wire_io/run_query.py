"""Asks a coordinator over TCP which run it has, and tries again until one answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import dataclass

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.applicant import Applicant
from entrenar_py.train.wire.frames import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Decoder,
    Encoder,
    Received,
)
from entrenar_py.train.wire.messages import Message, Offer
from entrenar_py.train.wire.terms import NONCE_BYTES
from entrenar_py.train.wire_io import sockets

ANSWER_S = 10.0  # from connecting to the answer
CLOSE_S = 1.0  # for closing a connection
SCENARIO_BYTES_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The answer of a coordinator that knows the secret. `scenario` is a JSON object.

    `package` is the digest of the run's files; None if there are none to fetch.
    """

    scenario: bytes
    heartbeat_s: float
    dead_after_s: float
    package: str | None


async def ask(
    host: str,
    port: int,
    *,
    secret: bytes,
    backend: str,
    context: ssl.SSLContext | None,
    patience_s: float,
    alone: Callable[[str], None],
) -> Told | do.Finish:
    """Return the coordinator's answer; a `failed` Finish if it refuses, or after `patience_s`.

    A `context` is for TLS. `alone` is called with the problem before each new try.
    """
    since = time.monotonic()
    wait_s = sockets.BACKOFF_S[0]
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await _connect(host, port, context, secret, backend)
        except TimeoutError:
            problem = f"no answer within {ANSWER_S:g} s"
            if context is None:
                problem += "; a coordinator with TLS does not answer plain TCP: give --tls-ca"
        except (OSError, ProtocolError) as error:
            problem = reason(error, host)
        if time.monotonic() - since > patience_s:
            return do.Finish("failed", f"not admitted at {host}:{port}: {problem}")
        alone(problem)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, sockets.BACKOFF_S[1])


def reason(error: Exception, host: str) -> str:
    """Return why `host` could not be asked; an unknown host is named."""
    if isinstance(error, socket.gaierror):
        return f"unknown host {host!r} ({error.strerror})"
    return str(error) or "closed by the other end"  # asyncio may give no text


async def _connect(
    host: str, port: int, context: ssl.SSLContext | None, secret: bytes, backend: str
) -> Told | do.Finish:
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        nonce = secrets.token_hex(NONCE_BYTES)
        return await _talk(reader, writer, Applicant(0, nonce, secret=secret, backend=backend))
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):  # why it ended, which asyncio would log otherwise
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()


async def _talk(reader: StreamReader, writer: StreamWriter, machine: Applicant) -> Told | do.Finish:
    """Carry out the effects of `machine` until it is finished; return the answer."""
    decoder = Decoder(_limit, direction=FROM_COORDINATOR)
    encoder = Encoder(direction=TO_COORDINATOR)
    while data := await reader.read(SCENARIO_BYTES_MAX):
        for received in decoder.feed(data):
            for effect in machine.receive(received.message):
                match effect:
                    case do.Send(_, message):
                        writer.writelines(encoder.encode(message))
                    case do.Secure(_, key):
                        decoder.key = encoder.key = key
                    case do.Finish():
                        offer = machine.offer
                        return effect if offer is None else _told(offer, received)
    raise ConnectionError("closed by the other end")


def _limit(kind: type[Message]) -> int:
    return SCENARIO_BYTES_MAX if kind is Offer else 0


def _told(offer: Offer, received: Received) -> Told:
    return Told(
        scenario=bytes(received.payload),
        heartbeat_s=offer.heartbeat_s,
        dead_after_s=offer.dead_after_s,
        package=offer.package,
    )
