"""Asking for a run over real sockets: the answers, and the reasons for none."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message, Offer
from entrenar_py.train.wire_io import run_query
from entrenar_py.train.wire_io.run_query import Told
from entrenar_py.train.wire_io.tcp import CoordinatorServer
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import LOOPBACK, SECRET, TIMING, FakeServer, free_port, go, run_of

SCENARIO = {"seed": 0, "note": "é" * 100}


class Knowing(FakeServer):
    """Hands that send the run's scenario."""

    def payload(self, message: Message) -> Buffer:
        known = json.dumps(SCENARIO).encode()
        return known if isinstance(message, Offer) else super().payload(message)


class Talkative(FakeServer):
    """Hands whose scenario is too long."""

    def payload(self, message: Message) -> Buffer:
        return bytes(run_query.SCENARIO_BYTES_MAX + 1) if isinstance(message, Offer) else b""


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
    return await run_query.ask(
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
        assert json.loads(told.scenario) == SCENARIO
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
        assert f"{run_query.SCENARIO_BYTES_MAX} are allowed now" in told.reason

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
        monkeypatch.setattr(run_query, "ANSWER_S", 0.05)
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


def test_over_tls(tmp_path: Path) -> None:
    """Only a client that trusts the certificate and shows its own gets an answer."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")

    async def story() -> None:
        async with serving(Knowing(), context=server_context(ours)) as (_, port):
            told = await ask(port, context=client_context(ours, ours))
            assert isinstance(told, Told)
            assert json.loads(told.scenario) == SCENARIO
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
