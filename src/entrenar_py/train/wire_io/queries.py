"""Requests to a coordinator over TCP: the terms of its run, and the files of its package."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.applicant import Applicant, Fetcher
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.frames import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Buffer,
    Decoder,
    Encoder,
    Received,
)
from entrenar_py.train.wire.messages import Message, Offer, Piece
from entrenar_py.train.wire.terms import NONCE_BYTES, PIECE_BYTES, Part, Timing, piece_bytes
from entrenar_py.train.wire_io import sockets

ANSWER_S = 10.0  # for connecting, and then for the answer
NEXT_ADDRESS_S = 0.25  # from trying one address of a host to trying the next one, too
CLOSE_S = 1.0  # for closing a connection
SCENARIO_BYTES_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The answer of a coordinator that knows the secret. `plan` is a JSON object.

    `package` is the digest of the list of the run's files; None if the run has no files to fetch.
    """

    plan: bytes
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

    `context` is for TLS; None for plain TCP. `alone` is called with the problem before each new
    attempt.
    """
    since = time.monotonic()
    wait_s = sockets.BACKOFF_S[0]
    while True:
        try:
            nonce = secrets.token_hex(NONCE_BYTES)
            applicant = Applicant(0, nonce, secret=secret, backend=backend)
            async with _connected(host, port, context) as streams, asyncio.timeout(ANSWER_S):
                return await _talk(*streams, applicant)
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
    """Return the reason why `host` could not be reached; an unknown host is named."""
    if isinstance(error, socket.gaierror):
        return f"unknown host {host!r} ({error.strerror})"
    return str(error) or "closed by the other end"  # asyncio may give no text


@contextlib.asynccontextmanager
async def _connected(
    host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    """Connect within ANSWER_S; at the end, disconnect without sending the rest."""
    connecting = asyncio.open_connection(
        host, port, ssl=context, happy_eyeballs_delay=NEXT_ADDRESS_S
    )
    try:
        reader, writer = await asyncio.wait_for(connecting, ANSWER_S)
    except TimeoutError as error:
        raise ConnectionError(str(error) or f"no connection within {ANSWER_S:g} s") from error
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        # the reason why it ended, which asyncio would log otherwise
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()


async def _talk(reader: StreamReader, writer: StreamWriter, machine: Applicant) -> Told | do.Finish:
    """Return the answer, after carrying out the effects of `machine` until it is finished."""
    decoder = Decoder(
        lambda kind: SCENARIO_BYTES_MAX if kind is Offer else 0, direction=FROM_COORDINATOR
    )
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
                        if offer is None:
                            return effect
                        return Told(
                            plan=bytes(received.payload),
                            heartbeat_s=offer.heartbeat_s,
                            dead_after_s=offer.dead_after_s,
                            package=offer.package,
                        )
    raise ConnectionError("closed by the other end")


READ_BYTES = 2**18
LOOKS_A_HEARTBEAT = 4


@dataclass(frozen=True, kw_only=True)
class Source:
    """A coordinator's address and credentials. `alone` is called if it can't be reached."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    backend: str
    context: ssl.SSLContext | None
    timing: Timing
    package: str
    patience_s: float
    alone: Callable[[str], None]


async def fetch(
    source: Source, missing: Callable[[], Sequence[Part]], store: Callable[[str, int, Buffer], None]
) -> do.Finish:
    """Fetch the parts that `missing` returns, which is called before each connection.

    `store` is called with the file, the offset and the bytes of each piece; its exceptions end the
    fetching. Returns a `failed` Finish if the coordinator refuses, or after `patience_s` without a
    byte of a piece.
    """
    since, wait_s = time.monotonic(), sockets.BACKOFF_S[0]
    while True:
        parts = missing()
        try:
            return await _fetched(source, parts, store)
        except (OSError, ProtocolError) as error:
            problem = reason(error, source.host)
        if [part.start for part in missing()] != [part.start for part in parts]:
            since, wait_s = time.monotonic(), sockets.BACKOFF_S[0]
        elif time.monotonic() - since >= source.patience_s:
            return do.Finish("failed", f"no files from {source.host}:{source.port}: {problem}")
        source.alone(problem)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, sockets.BACKOFF_S[1])


async def _fetched(
    source: Source, parts: Sequence[Part], store: Callable[[str, int, Buffer], None]
) -> do.Finish:
    sizes = {part.file: part.num_bytes for part in parts}
    async with _connected(source.host, source.port, source.context) as streams:
        machine = Fetcher(
            0,
            secrets.token_hex(NONCE_BYTES),
            secret=source.secret,
            backend=source.backend,
            package=source.package,
            parts=parts,
            timing=source.timing,
            patience_s=source.patience_s,
            now=time.monotonic(),
        )
        return await _Talk(machine, *streams, sizes, store, source.package).to_the_end()


class _Talk:
    """One connection: carries out the effects of its machine."""

    def __init__(
        self,
        machine: Fetcher,
        reader: StreamReader,
        writer: StreamWriter,
        sizes: dict[str, int],
        store: Callable[[str, int, Buffer], None],
        list_file: str,
    ) -> None:
        self._machine, self._reader, self._writer = machine, reader, writer
        self._sizes, self._store, self._list = sizes, store, list_file
        self._decoder = Decoder(_piece_limit, direction=FROM_COORDINATOR)
        self._encoder = Encoder(direction=TO_COORDINATOR)
        self._finish: do.Finish | None = None

    async def to_the_end(self) -> do.Finish:
        """Return the Finish of the machine, after talking until then.

        Raises OSError if the connection breaks, and ProtocolError for an illegal message.
        """
        look_s = self._machine.timing.heartbeat_s / LOOKS_A_HEARTBEAT
        reading = asyncio.ensure_future(self._reader.read(READ_BYTES))
        try:
            while self._finish is None:
                await asyncio.wait([reading], timeout=look_s)
                if reading.done():
                    self._take(reading.result())
                    reading = asyncio.ensure_future(self._reader.read(READ_BYTES))
                self._do(self._machine.tick(time.monotonic()))
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reading
        return self._finish

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionError("closed by the other end")
        num_frames = self._decoder.num_frames
        for received in self._decoder.feed(data):
            if self._finish is None:
                self._do(self._machine.receive(received.message), received)
            if isinstance(received.message, Piece):
                self._machine.progressed(time.monotonic())
        if self._decoder.in_work is Piece:
            self._machine.progressed(time.monotonic())
        if self._decoder.num_frames > num_frames:
            self._machine.heard(time.monotonic())

    def _do(self, effects: Sequence[Effect], received: Received | None = None) -> None:
        for effect in effects:
            match effect:
                case do.Send(_, message):
                    self._writer.writelines(self._encoder.encode(message))
                case do.Secure(_, key):
                    self._decoder.key = self._encoder.key = key
                case do.Store(file, offset):
                    assert received is not None, "a piece was received"
                    self._keep(file, offset, received.payload)
                case do.Finish():
                    self._finish = effect

    def _keep(self, file: str, offset: int, payload: memoryview) -> None:
        due = piece_bytes(self._sizes[file], offset)
        # The length of the list of files isn't known beforehand; the list is one piece.
        if payload.nbytes != due and file != self._list:
            raise ProtocolError(f"Piece of {payload.nbytes} bytes: {due} are due at {offset}")
        self._store(file, offset, payload)


def _piece_limit(kind: type[Message]) -> int:
    return {Offer: SCENARIO_BYTES_MAX, Piece: PIECE_BYTES}.get(kind, 0)
