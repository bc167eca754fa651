"""Questions to a coordinator over TCP: which run it has, and the files of its package."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.applicant import Fetcher
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Buffer, Decoder, Encoder
from entrenar_py.train.wire.messages import Heartbeat, Message, Offer, Piece, Want
from entrenar_py.train.wire.terms import PIECE_BYTES, WANTED_MAX, Package, Part, piece_bytes
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.endpoints import CoordinatorEnd
from entrenar_py.train.wire_io.queries import Source, Told
from entrenar_py.train.wire_io.tcp import CoordinatorServer
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import (
    LOOPBACK,
    SECRET,
    TIMING,
    AtOnce,
    FakeServer,
    free_port,
    go,
    run_of,
    swallowing,
)

SCENARIO = {"seed": 0, "note": "é" * 100}


class Knowing(FakeServer):
    """Hands that send the run's scenario."""

    def payload(self, message: Message) -> Buffer:
        known = json.dumps(SCENARIO).encode()
        return known if isinstance(message, Offer) else super().payload(message)


class Talkative(FakeServer):
    """Hands whose scenario is too long."""

    def payload(self, message: Message) -> Buffer:
        return bytes(queries.SCENARIO_BYTES_MAX + 1) if isinstance(message, Offer) else b""


async def ask(
    port: int,
    *,
    host: str = LOOPBACK,
    secret: bytes = SECRET,
    context: ssl.SSLContext | None = None,
    patience_s: float = 5.0,
    alone: Callable[[str], None] = lambda problem: None,
) -> Told | do.Finish:
    """Ask the coordinator at `host`:`port`."""
    return await queries.ask(
        host,
        port,
        secret=secret,
        backend="cpu",
        context=context,
        patience_s=patience_s,
        alone=alone,
    )


@asynccontextmanager
async def serving(
    hands: FakeServer, *, port: int = 0, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[CoordinatorServer, int]]:
    """A coordinator that listens and waits for workers, and its port."""
    server = CoordinatorServer(run_of(), hands, timing=TIMING, secret=SECRET)
    _, port = await server.listen(LOOPBACK, port, context=context)
    running = asyncio.ensure_future(server.finish())
    yield server, port
    running.cancel()
    await asyncio.wait([running])


def test_the_scenario_and_the_times_are_told() -> None:
    """An applicant with the secret gets them, and takes no part in the run."""

    async def story() -> None:
        hands = Knowing()
        async with serving(hands) as (server, port):
            told = await ask(port)
            assert server.end.machine.peers == {}
        assert isinstance(told, Told)
        assert json.loads(told.plan) == SCENARIO
        assert (told.heartbeat_s, told.dead_after_s) == (0.05, 5.0)
        assert hands.told == []

    go(story())


def test_a_wrong_secret_is_refused() -> None:
    """It does not try again."""

    async def story() -> None:
        async with serving(Knowing()) as (_, port):
            told = await ask(port, secret=b"open barley")
        assert told == do.Finish("failed", "refused: wrong secret")

    go(story())


def test_a_scenario_without_end_is_not_taken() -> None:
    """A payload that is too long is refused before any allocation."""

    async def story() -> None:
        async with serving(Talkative()) as (_, port):
            told = await ask(port, patience_s=0.01)
        assert isinstance(told, do.Finish)
        assert f"{queries.SCENARIO_BYTES_MAX} are allowed now" in told.reason

    go(story())


def test_a_coordinator_may_come_later() -> None:
    """It is asked again until it answers."""

    async def story() -> None:
        port = free_port()
        alone = asyncio.Event()
        problems: list[str] = []

        def hear(problem: str) -> None:
            problems.append(problem)
            alone.set()

        asked = asyncio.ensure_future(ask(port, alone=hear))
        await alone.wait()
        async with serving(Knowing(), port=port):
            assert isinstance(await asked, Told)
        assert "Connect call failed" in problems[0]

    go(story())


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no.such.host.invalid", "unknown host 'no.such.host.invalid' ("),
        (LOOPBACK, "Connect call failed"),
    ],
)
def test_nobody_is_there(host: str, reason: str) -> None:
    """After `patience_s` the error names the address, and the part of it that is wrong."""

    async def story() -> None:
        port = free_port()
        told = await ask(port, host=host, patience_s=0.01)
        assert isinstance(told, do.Finish)
        assert told.reason.startswith(f"not admitted at {host}:{port}: ")
        assert reason in told.reason

    go(story())


def test_another_service_is_there() -> None:
    """Garbage, or a connection that closes without an answer, is the reason."""

    async def story() -> None:
        answers = [b"HTTP/1.1 400 Bad Request\r\n" + b"\r\n" * 99, b""]
        reasons = []

        async def answer(_: object, writer: asyncio.StreamWriter) -> None:
            writer.write(answers[0])
            writer.close()

        other = await asyncio.start_server(answer, LOOPBACK, 0)
        port = other.sockets[0].getsockname()[1]
        while answers:
            told = await ask(port, patience_s=0.01)
            assert isinstance(told, do.Finish)
            reasons.append(told.reason)
            del answers[0]
        assert "magic=b'HTTP': not a frame of this protocol" in reasons[0]
        assert "closed by the other end" in reasons[1]
        other.close()

    go(story())


def test_silence_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that accepts the connection and sends nothing is given up after ANSWER_S."""

    async def story() -> None:
        monkeypatch.setattr(queries, "ANSWER_S", 0.05)
        held: list[asyncio.StreamWriter] = []
        other = await asyncio.start_server(lambda _, writer: held.append(writer), LOOPBACK, 0)
        port = other.sockets[0].getsockname()[1]
        told = await ask(port, patience_s=0.01)
        assert isinstance(told, do.Finish)
        assert ": no answer within 0.05 s; a coordinator with TLS does not answer" in told.reason
        for writer in held:
            writer.close()
        other.close()

    go(story())


def test_no_connection_is_not_a_matter_of_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens that might want TLS."""
    monkeypatch.setattr(queries, "ANSWER_S", 0.05)

    async def story() -> None:
        with swallowing(LOOPBACK) as port:
            told = await ask(port, patience_s=0.01)
        assert isinstance(told, do.Finish)
        assert told.reason.endswith(f"{port}: no connection within 0.05 s")

    go(story())


def test_a_name_of_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one answers, though the first swallows packets."""

    async def story() -> None:
        with swallowing("127.0.0.2") as port:
            async with serving(Knowing(), port=port):
                found = [socket.getaddrinfo(host, port)[0] for host in ("127.0.0.2", LOOPBACK)]
                monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
                told = await ask(port, host="trainer", patience_s=0.01)
        assert isinstance(told, Told)

    go(story())


def test_over_tls(tmp_path: Path) -> None:
    """Only a client that trusts the certificate and shows its own gets an answer."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")

    async def story() -> None:
        async with serving(Knowing(), context=server_context(ours)) as (_, port):
            told = await ask(port, context=client_context(ours, ours))
            assert isinstance(told, Told)
            assert json.loads(told.plan) == SCENARIO
            for context in (
                client_context(theirs, ours),
                client_context(ours, None),
                client_context(ours, theirs),
                None,
            ):
                told = await ask(port, context=context, patience_s=0.01)
                assert isinstance(told, do.Finish)

    go(story())


def test_closed_in_the_handshake(tmp_path: Path) -> None:
    """As a proxy does if the coordinator is missing; the error still has a reason."""
    authority = Authority(tmp_path, "ca")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(2**16)
        writer.close()

    async def story() -> None:
        async with await asyncio.start_server(hang_up, LOOPBACK) as server:
            port = server.sockets[0].getsockname()[1]
            context = client_context(authority, None)
            finished = await ask(port, context=context, patience_s=0.0)
        assert isinstance(finished, do.Finish)
        assert finished.reason.endswith(f"{LOOPBACK}:{port}: closed by the other end")

    go(story())


def test_a_refused_certificate_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the reason for no answer, and asyncio logs nothing besides.

    The test removes a finalizer of asyncio, so that the order in which objects are freed is
    irrelevant.
    """
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    listener = socket.create_server((LOOPBACK, 0))
    logged: list[object] = []

    def refuse() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection, pytest.raises(ssl.SSLError):
                server_context(ours).wrap_socket(connection, server_side=True)

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: logged.append(told))
        refusing = asyncio.create_task(asyncio.to_thread(refuse))
        for context in (client_context(ours, None), client_context(ours, theirs)):
            port = listener.getsockname()[1]
            told = await ask(port, context=context, patience_s=0.0)
            assert isinstance(told, do.Finish)
            assert " alert " in told.reason
            gc.collect()
        await refusing

    go(story())
    listener.close()
    assert logged == []


def named(*contents: bytes) -> dict[str, bytes]:
    """Return the contents by their digests."""
    return {hashlib.sha256(one).hexdigest(): one for one in contents}


FILES = named(b"x" * (5 * PIECE_BYTES + 7), b"tiny", b"y" * (2 * PIECE_BYTES))
LIST = next(iter(FILES))
LONG_S = 20.0  # a time-out of the test, not of what it tests


class Kept:
    """What a fetcher keeps: the files as far as they came."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.there: dict[str, bytes] = dict.fromkeys(files, b"")
        self.num_pieces = 0
        self.after: Callable[[], Any] = lambda: None

    def missing(self) -> Sequence[Part]:
        """Return what has not come."""
        return [
            Part(file, len(content), len(self.there[file]))
            for file, content in self.files.items()
            if len(self.there[file]) < len(content)
        ]

    def store(self, file: str, offset: int, content: Buffer) -> None:
        """Take one piece."""
        assert offset == len(self.there[file])
        self.there[file] += bytes(content)
        self.num_pieces += 1
        self.after()


def source(port: int, **changes: Any) -> Source:
    """Return the coordinator at `port`."""
    told = Source(
        host=LOOPBACK,
        port=port,
        secret=SECRET,
        backend="cpu",
        context=None,
        timing=TIMING,
        package=LIST,
        patience_s=5.0,
        alone=lambda problem: None,
    )
    return replace(told, **changes)


@asynccontextmanager
async def serving_files(
    hands: FakeServer, *, context: ssl.SSLContext | None = None, **run: Any
) -> AsyncIterator[tuple[CoordinatorServer, int]]:
    """A coordinator that serves FILES, and its port."""
    sizes = {file: len(content) for file, content in FILES.items()}
    package = Package(LIST, sizes)
    server = CoordinatorServer(run_of(package=package, **run), hands, timing=TIMING, secret=SECRET)
    _, port = await server.listen(LOOPBACK, 0, context=context)
    running = asyncio.ensure_future(server.finish())
    yield server, port
    running.cancel()
    await asyncio.wait([running])


def hands_of(files: dict[str, bytes]) -> FakeServer:
    """Return hands that have `files`."""
    hands = FakeServer()
    hands.files = dict(files)
    return hands


def test_all_files_come() -> None:
    """All bytes come in one connection, and the coordinator still waits for workers."""

    async def story() -> None:
        async with serving_files(hands_of(FILES)) as (server, port):
            kept = Kept(FILES)
            assert await queries.fetch(source(port), kept.missing, kept.store) == do.Finish(
                "completed"
            )
            assert kept.there == FILES
            assert server.end.finished is None

    go(story())


def test_files_over_tls(tmp_path: Path) -> None:
    """The files come over TLS, too, and from no coordinator whose certificate is another's."""
    ours, theirs = (Authority(tmp_path, name) for name in ("ours", "theirs"))

    async def story() -> None:
        async with serving_files(hands_of(FILES), context=server_context(ours)) as (_, port):
            kept = Kept(FILES)
            where = source(port, context=client_context(ours, ours))
            finish = await queries.fetch(where, kept.missing, kept.store)
            assert (finish, kept.there) == (do.Finish("completed"), FILES)
            kept = Kept(FILES)
            where = source(port, context=client_context(theirs, ours), patience_s=0.1)
            finish = await queries.fetch(where, kept.missing, kept.store)
            assert "CERTIFICATE_VERIFY_FAILED" in finish.reason
            assert kept.num_pieces == 0

    go(story())


def test_it_goes_on_after_a_cut() -> None:
    """After each cut a new connection fetches what is missing, and nothing that is there."""

    async def story() -> None:
        async with serving_files(hands_of(FILES)) as (server, port):
            kept, told = Kept(FILES), list[str]()

            def cut() -> None:
                if kept.num_pieces in (2, 5):
                    for link in list(server._visits):
                        link.abort()

            kept.after = cut
            where = source(port, alone=told.append)
            finish = await queries.fetch(where, kept.missing, kept.store)
            assert finish == do.Finish("completed")
            assert kept.there == FILES
            assert kept.num_pieces == 6 + 1 + 2
            assert len(told) == 2

    go(story())


def test_why_it_can_not_be_had() -> None:
    """A wrong secret, a file that has gone, and nobody there: each has its reason."""

    async def story() -> None:
        async with serving_files(hands_of({})) as (_, port):
            kept = Kept(FILES)
            finish = await queries.fetch(source(port), kept.missing, kept.store)
            assert (finish.status, "it has gone" in finish.reason) == ("failed", True)
            wrong = source(port, secret=b"another")
            finish = await queries.fetch(wrong, kept.missing, kept.store)
            assert finish == do.Finish("failed", "refused: wrong secret")
            other = source(port, package="0" * 64)
            finish = await queries.fetch(other, kept.missing, kept.store)
            assert "now has a different run" in finish.reason
        nobody = source(port, patience_s=0.1)
        finish = await queries.fetch(nobody, kept.missing, kept.store)
        assert finish.reason.startswith(f"no files from {LOOPBACK}:{port}: ")

    go(story())


class Short(FakeServer):
    """Hands whose pieces lack their last byte."""

    def piece(self, piece: Piece) -> bytes | str:
        content = super().piece(piece)
        return content if isinstance(content, str) else content[:-1]


def test_a_piece_of_another_size_is_not_kept() -> None:
    """A piece that is too short breaks the protocol."""

    async def story() -> None:
        hands = Short()
        hands.files = FILES
        async with serving_files(hands) as (_, port):
            kept, told = Kept({one: FILES[one] for one in list(FILES)[1:]}), list[str]()
            where = source(port, patience_s=0.1, alone=told.append)
            finish = await queries.fetch(where, kept.missing, kept.store)
            assert "Piece of 3 bytes: 4 are due at 0" in finish.reason
            assert kept.num_pieces == 0

    go(story())


class Stalled(FakeServer):
    """Hands whose disk never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def piece(self, piece: Piece) -> bytes | str:
        self.is_over.wait()
        return "it was too late"


def test_heartbeats_alone_are_no_files() -> None:
    """A coordinator that is alive and sends nothing is given up after the patience."""

    async def story() -> None:
        hands = Stalled()
        async with serving_files(hands) as (_, port):
            kept = Kept(FILES)
            where = source(port, patience_s=0.3)
            try:
                async with asyncio.timeout(LONG_S):
                    finish = await queries.fetch(where, kept.missing, kept.store)
            finally:
                hands.is_over.set()
            assert finish.status == "failed"
            assert "the coordinator is alive, and sent no byte for" in finish.reason

    go(story())


class Listener:
    """What a connection's machine is told: `progress` counts the bytes of pieces."""

    timing = TIMING

    def __init__(self) -> None:
        self.heard_times = self.progress = 0

    def receive(self, message: Message) -> list[do.Effect]:
        return []

    def heard(self, now: float) -> None:
        self.heard_times += 1

    def progressed(self, now: float) -> None:
        self.progress += 1


def test_a_part_of_a_piece_is_progress() -> None:
    """Bytes of a piece that is not whole yet count; those of a heartbeat don't."""
    machine, encoder = Listener(), Encoder(direction=FROM_COORDINATOR)
    talk: Any = queries._Talk(machine, None, None, {}, None, LIST)  # type: ignore[arg-type]
    encoder.key = talk._decoder.key = b"k" * 32
    beat, piece = (
        b"".join(encoder.encode(message, content))
        for message, content in ((Heartbeat(), b""), (Piece(file=LIST, offset=0), bytes(1000)))
    )
    talk._take(beat)
    assert (machine.heard_times, machine.progress) == (1, 0)
    for start in range(0, len(piece), 500):
        talk._take(piece[start : start + 500])
    assert (machine.heard_times, machine.progress) == (2, 3)


def test_what_storing_raises_ends_it() -> None:
    """A full disk is told at once, and not tried again."""

    async def story() -> None:
        async with serving_files(hands_of(FILES)) as (_, port):
            kept = Kept(FILES)

            def full() -> None:
                raise UsageError("cache: can't be used (No space left on device)")

            kept.after = full
            with pytest.raises(UsageError, match="No space left"):
                await queries.fetch(source(port), kept.missing, kept.store)
            assert kept.num_pieces == 1

    go(story())


class Stuck:
    """A wire whose messages wait, because the peer reads nothing."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.closed: list[str] = []

    def write(self, peer: do.Peer, message: Any, buffers: Any) -> None:
        self.waiting.append((message, buffers))

    def close(self, peer: do.Peer, reason: str) -> None:
        self.closed.append(reason)


def test_a_greedy_peer_costs_few_pieces() -> None:
    """A peer that wants more and more, and reads nothing, is disconnected."""
    sizes = {LIST: len(FILES[LIST])}
    run = run_of(package=Package(LIST, sizes))
    machine, wire = Coordinator(run, secret=SECRET, timing=TIMING, now=0.0), Stuck()
    end = CoordinatorEnd(machine, hands_of(FILES), wire, lambda: 0.0, AtOnce(), AtOnce())
    end.connected("down", "0" * 32)
    fetcher = Fetcher(
        "up",
        "1" * 32,
        secret=SECRET,
        backend="cpu",
        package=LIST,
        parts=[Part(LIST, sizes[LIST], 0)],
        timing=TIMING,
        patience_s=5.0,
        now=0.0,
    )
    encoder, decoder = Encoder(), Decoder(lambda kind: 2**16, direction=FROM_COORDINATOR)

    def say(data: bytes) -> None:
        for place in range(len(data)):
            if (buffer := end.buffer("down")) is not None:
                buffer[0] = data[place]
                end.filled("down", 1)

    for number in (0, 1):  # the challenge and the offer are read
        (received,) = decoder.feed(b"".join(wire.waiting[number][1]))
        for effect in fetcher.receive(received.message):
            if isinstance(effect, do.Send) and not isinstance(effect.message, Want):
                say(b"".join(encoder.encode(effect.message)))
            elif isinstance(effect, do.Secure):
                encoder.key = decoder.key = effect.key
    for _ in range(100):
        say(b"".join(encoder.encode(Want(file=LIST, offset=0))))
    pieces = [message for message, _ in wire.waiting if isinstance(message, Piece)]
    assert len(pieces) == 2 * WANTED_MAX
    assert wire.closed == [f"Want: more than {WANTED_MAX} pieces at a time"]


def test_pieces_cover_a_file() -> None:
    """The pieces of a file follow each other without gaps, and the last one is the rest."""
    for size in (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES):
        for start in (0, 1, size - 1):
            at = start
            for offset in Part("f", size, start).offsets():
                assert offset == at
                at += piece_bytes(size, offset)
            assert at == size
