"""Sockets by host name, and TLS over them."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.sockets import Address
from entrenar_py.train.wire_io.tcp import CoordinatorServer
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import (
    COMPLETED,
    LOOPBACK,
    SECRET,
    TIMING,
    FakeMember,
    FakeServer,
    client_of,
    free_port,
    go,
    run_of,
    until,
)

HERE: Address = (socket.AF_INET, (LOOPBACK, 0))
ALSO_HERE: Address = (socket.AF_INET, ("127.0.0.2", 0))
ELSEWHERE: Address = (socket.AF_INET, ("192.0.2.1", 0))  # kept for documentation: nobody has it


def test_one_port_for_all() -> None:
    """A free port is chosen once; an address that this machine lacks is skipped."""
    listeners = sockets.listen([ELSEWHERE, HERE, ALSO_HERE])
    names = [one.getsockname() for one in listeners]
    for one in listeners:
        one.close()
    assert [host for host, _ in names] == [LOOPBACK, "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_no_address_is_left() -> None:
    """The error has the reason for each address."""
    with pytest.raises(OSError, match=r"192\.0\.2\.1: .*Cannot assign"):
        sockets.listen([ELSEWHERE])


def test_an_address_that_is_taken() -> None:
    """An error, and listeners that were opened before are closed."""
    with socket.create_server((ALSO_HERE[1][0], 0)) as other:
        port = other.getsockname()[1]
        here, also_here = ((family, (host, port)) for family, (host, _) in (HERE, ALSO_HERE))
        with pytest.raises(OSError, match="in use"):
            sockets.listen([here, also_here])
        sockets.listen([here])[0].close()


def test_every_address_is_tried() -> None:
    """If none accepts, the error has the reason for each."""

    async def story() -> None:
        port = free_port()
        with pytest.raises(OSError, match=rf"Connect call failed \('{LOOPBACK}', {port}\)"):
            await sockets.connect("localhost", port, patience_s=5.0)

    go(story())


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up in time."""

    async def never(host: str, port: int) -> list[Address]:
        await asyncio.Event().wait()
        return []

    async def story() -> None:
        monkeypatch.setattr(sockets, "resolve", never)
        with pytest.raises(TimeoutError):
            await sockets.connect("trainer", 1, patience_s=0.05)

    go(story())


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("192.0.2.1", False)],
)
def test_what_is_this_machine_alone(host: str, alone: bool) -> None:
    """Only loopback addresses can't be reached from other machines."""
    assert sockets.is_loopback((socket.AF_INET, (host, 0))) == alone


@pytest.mark.parametrize(("host", "alone"), [("::1", True), ("::", False), ("fe80::1%eth0", False)])
def test_the_same_of_ipv6(host: str, alone: bool) -> None:
    """An address may name its interface."""
    assert sockets.is_loopback((socket.AF_INET6, (host, 0, 0, 0))) == alone


def test_each_address_of_a_name_once() -> None:
    """Other fields of the resolver's answer don't matter."""

    async def story() -> None:
        assert await sockets.resolve(LOOPBACK, 80) == [(socket.AF_INET, (LOOPBACK, 80))]
        found = await sockets.resolve("localhost", 80)
        assert len(found) == len(set(found)) > 0
        assert all(map(sockets.is_loopback, found))

    asyncio.run(story())


@pytest.mark.parametrize("wanted", [8_192, sockets.BUFFER_BYTES])
def test_how_much_the_kernel_may_hold(wanted: int) -> None:
    """Both ends get the requested size; the kernel doubles or limits it."""

    async def story() -> None:
        (listener,) = sockets.listen([HERE], buffer_bytes=wanted)
        with listener:
            port = listener.getsockname()[1]
            there = await sockets.connect(LOOPBACK, port, patience_s=5.0, buffer_bytes=wanted)
            here, _ = await asyncio.get_running_loop().sock_accept(listener)
        with there, here:
            for sock in (there, here):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    assert 0 < sock.getsockopt(socket.SOL_SOCKET, option) <= 2 * wanted

    go(story())


# For what comes too late on purpose; a handshake takes milliseconds.
IMPATIENT = replace(TIMING, hello_s=0.5)


Disturb = Callable[[int], Coroutine[Any, Any, None]]


async def run_with(context: ssl.SSLContext, good: ssl.SSLContext, disturb: Disturb) -> None:
    """Run with two workers, the second of which connects when `disturb` has ended."""
    hands, members = FakeServer(), [FakeMember(), FakeMember()]
    run = run_of(awaited={0: [0], 2: [1]})
    server = CoordinatorServer(run, hands, timing=IMPATIENT, secret=SECRET)
    _, port = await server.listen(LOOPBACK, 0, context=context)
    running = asyncio.ensure_future(server.finish())

    async def take_part(rank: int) -> do.Finish:
        client = client_of(rank, members[rank])
        return await client.run(LOOPBACK, port, patience_s=5.0, context=good)

    first = asyncio.ensure_future(take_part(0))
    await until(lambda: server.end.machine.step == 2)
    await disturb(port)
    assert [one.rank for one in server.end.machine.peers.values()] == [0]
    second = asyncio.ensure_future(take_part(1))
    assert await running == COMPLETED
    assert [await first, await second] == [COMPLETED, COMPLETED]
    assert hands.made == members[0].made == members[1].made == [0, 1, 2]
    assert hands.told == ["0 joined", "1 joined"]


@pytest.mark.parametrize("size", [1, 5 * 2**20])
@pytest.mark.parametrize("mutual", [True, False])
def test_a_run_over_tls(authority: Authority, size: int, mutual: bool) -> None:
    """All make every step, with vectors of any size, and all finish."""

    async def story() -> None:
        content = random.Random(size).randbytes(size)
        hands, members = FakeServer(content), [FakeMember(content), FakeMember(content)]
        server = CoordinatorServer(run_of(), hands, timing=TIMING, secret=SECRET)
        context = server_context(authority, mutual=mutual)
        _, port = await server.listen(LOOPBACK, 0, context=context)
        good = client_context(authority, authority if mutual else None)
        finishes = asyncio.gather(
            *(
                client_of(rank, member).run(LOOPBACK, port, patience_s=5.0, context=good)
                for rank, member in enumerate(members)
            )
        )
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]
        assert hands.made == members[0].made == members[1].made == [0, 1, 2]

    go(story())


# --- who is not let in --------------------------------------------------------------------------


@pytest.mark.parametrize("signed_by_stranger", [False, True])
def test_a_worker_without_a_right_certificate(
    authority: Authority, stranger: Authority, signed_by_stranger: bool
) -> None:
    """It is refused with the reason; the run continues without it."""
    wrong = client_context(authority, stranger if signed_by_stranger else None)
    finishes: list[do.Finish] = []

    async def disturb(port: int) -> None:
        finishes.append(await client_of(1).run(LOOPBACK, port, patience_s=0.1, context=wrong))

    good = client_context(authority, authority)
    go(run_with(server_context(authority), good, disturb))
    assert finishes[0].status == "failed"
    alert = "unknown ca" if signed_by_stranger else "certificate required"
    assert alert in finishes[0].reason.lower()


def test_a_coordinator_that_nobody_trusts(authority: Authority, stranger: Authority) -> None:
    """A worker sends it no message, and reports the reason."""

    async def story() -> None:
        server = CoordinatorServer(run_of(), FakeServer(), timing=TIMING, secret=SECRET)
        _, port = await server.listen(LOOPBACK, 0, context=server_context(stranger))
        running = asyncio.ensure_future(server.finish())
        context = client_context(authority, authority)
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1, context=context)
        assert finish.status == "failed"
        assert "certificate verify failed" in finish.reason
        await _stop(running)

    go(story())


def test_a_coordinator_of_another_name(authority: Authority) -> None:
    """A trusted certificate for another address is refused."""

    async def story() -> None:
        elsewhere = authority.signed("elsewhere", "192.0.2.1")
        context = sockets.server_context(cert=elsewhere.cert, key=elsewhere.key)
        server = CoordinatorServer(run_of(), FakeServer(), timing=TIMING, secret=SECRET)
        _, port = await server.listen(LOOPBACK, 0, context=context)
        running = asyncio.ensure_future(server.finish())
        trusting = client_context(authority, None)
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1, context=trusting)
        assert "IP address mismatch" in finish.reason
        await _stop(running)

    go(story())


def test_strangers_at_a_tls_port(authority: Authority) -> None:
    """Plain text, old versions, silence, half a handshake: dropped, and the run completes."""
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.load_verify_locations(authority.ca)
    older.maximum_version = ssl.TLSVersion.TLSv1_2

    async def disturb(port: int) -> None:
        finish = await client_of(1).run(LOOPBACK, port, patience_s=0.1)
        assert finish.status == "failed"
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol version"):
            await asyncio.open_connection(LOOPBACK, port, ssl=older, server_hostname=LOOPBACK)
        says = (b"", b"\x16\x03\x01\x02\x00", b"ENTP" * 99, b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.gather(*(_dropped(port, one) for one in says))

    good = client_context(authority, authority)
    go(run_with(server_context(authority), good, disturb))


def test_tls_at_a_plain_port(authority: Authority) -> None:
    """A worker with TLS does not fall back to plain TCP."""

    async def story() -> None:
        server = CoordinatorServer(run_of(), FakeServer(), timing=TIMING, secret=SECRET)
        _, port = await server.listen(LOOPBACK, 0)
        running = asyncio.ensure_future(server.finish())
        context = client_context(authority, None)
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1, context=context)
        assert finish.status == "failed"
        assert "SSL" in finish.reason
        await _stop(running)

    go(story())


def test_a_coordinator_that_says_nothing(authority: Authority) -> None:
    """A handshake that makes no progress times out at the worker, too."""

    async def story() -> None:
        with socket.create_server((LOOPBACK, 0)) as silent:
            port = silent.getsockname()[1]
            impatient = client_of(0, timing=IMPATIENT)
            context = client_context(authority, None)
            finish = await impatient.run(LOOPBACK, port, patience_s=0.1, context=context)
        assert "no answer within 0.5 s" in finish.reason

    go(story())


async def _dropped(port: int, says: bytes) -> None:
    """Send bytes, and read until disconnected."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(says)
    try:
        while await reader.read(2**16):
            pass
    except ConnectionResetError:
        pass
    writer.close()


async def _stop(running: asyncio.Future[do.Finish]) -> None:
    running.cancel()
    await asyncio.wait([running])


# --- contexts -----------------------------------------------------------------------------------


def test_only_one_version(authority: Authority) -> None:
    """TLS 1.3 at both ends; a coordinator requires certificates only with a CA for workers."""
    ends = [server_context(authority, mutual=mutual) for mutual in (True, False)]
    ends.append(client_context(authority, None))
    assert {one.minimum_version for one in ends} == {ssl.TLSVersion.TLSv1_3}
    assert [sockets.proves_identity(one) for one in ends] == [True, False, True]


def test_files_that_are_missing_or_unfit(authority: Authority, tmp_path: Path) -> None:
    """The error names the file and what it should be."""
    own, other = authority.signed("own"), authority.signed("other")
    absent, garbage = tmp_path / "absent.pem", tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    locked = authority.locked_key()
    for cert, key, ca, complaint in (
        (absent, own.key, None, f"cert={absent}: No such file"),
        (own.cert, absent, None, f"key={absent}: No such file"),
        (own.cert, own.key, absent, f"ca={absent}: No such file"),
        (tmp_path, own.key, None, f"cert={tmp_path}: Is a directory"),
        (garbage, own.key, None, f"cert={garbage}, key={own.key}: "),
        (own.cert, garbage, None, f"cert={own.cert}, key={garbage}: "),
        (own.cert, other.key, None, "key values mismatch"),
        (own.cert, locked, None, "the key is encrypted; use a PEM certificate and the private key"),
        (own.cert, own.key, garbage, f"ca={garbage}: "),
    ):
        with pytest.raises(UsageError) as caught:
            sockets.server_context(cert=cert, key=key, ca=ca)
        assert complaint in str(caught.value)


@pytest.mark.parametrize("given", ["cert", "key"])
def test_half_an_identity(authority: Authority, given: str) -> None:
    """A certificate without its key is refused."""
    own: dict[str, Any] = {given: authority.signed("own").cert}
    with pytest.raises(UsageError, match=f"TLS {given} without .*: give both, or neither"):
        sockets.client_context(ca=authority.ca, **own)
