"""The protocol over TCP."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest.mock import AsyncMock

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import FIELDS, MAGIC, PREFIX_BYTES
from entrenar_py.train.wire.messages import VERSION, NonFinite, TreeNode, WorkerPhase
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import sockets, tcp
from entrenar_py.train.wire_io.door import TAKEN_UP_MAX, Door
from entrenar_py.train.wire_io.endpoints import Saving
from entrenar_py.train.wire_io.link import Link
from entrenar_py.train.wire_io.tcp import CoordinatorServer, WorkerClient
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
    listening,
    run_of,
    swallowing,
    take_part,
    until,
    worker_of,
)
from tests.train.wire_io.misdeeds import RESETS

ALL = [0, 1, 2]
LEFT = do.Finish("failed", "left: stopped by SIGTERM")
IMPATIENT = Timing(heartbeat_s=0.05, dead_after_s=5.0, hello_s=0.2, gather_s=5.0)


@pytest.mark.parametrize(
    ("size", "num_blocks"), [(1, 1), (1, 100), (2**20, 1), (2**20 + 1, 3), (5 * 2**20, 1)]
)
@pytest.mark.parametrize("by_server", [False, True])
def test_a_run_by_two_workers(size: int, num_blocks: int, by_server: bool) -> None:
    """All make every step, with blocks of any size and number, and all finish."""

    async def story() -> None:
        content = random.Random(size).randbytes(size)
        hands, members = FakeServer(content), [FakeMember(content), FakeMember(content)]
        server, port = await listening(
            run_of(num_blocks=num_blocks, server_updates=by_server), hands
        )
        clients = [client_of(rank, member) for rank, member in enumerate(members)]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]
        assert hands.reduced == [[*reversed(range(num_blocks))] for _ in ALL] + [[]]
        assert hands.prepared == (ALL if by_server else [])
        assert hands.made == members[0].made == members[1].made == ALL
        assert sorted(hands.told) == ["0 joined", "1 joined"]

    go(story())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_names_and_both_families(host: str) -> None:
    """A worker finds the coordinator by name, by IPv4 and by IPv6 address."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 loopback here")

    async def story() -> None:
        server, port = await listening(run_of(awaited={}), FakeServer(), host=host)
        finishes = asyncio.ensure_future(take_part([client_of(None)], port, host))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED]

    go(story())


class _Writes(FakeServer):
    """Takes `seconds` to write a checkpoint."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def save(self, step: int) -> Saving:
        record = super().save(step)

        def work() -> Callable[[], None]:
            time.sleep(self._seconds)
            return record()

        return work


def test_a_slow_disk_disconnects_nobody() -> None:
    """Workers hear from a coordinator that writes for longer than they wait for a silent one."""

    async def story() -> None:
        timing = replace(TIMING, dead_after_s=0.4)
        hands = _Writes(seconds=3 * timing.dead_after_s)
        run = run_of(saves={1, 3})
        server, port = await listening(run, hands, timing=timing)
        clients = [client_of(rank, timing=timing) for rank in (0, 1)]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]
        assert sorted(hands.told) == ["0 joined", "1 joined", "saved 1", "saved 3"]

    go(story())


# --- when nobody is there -----------------------------------------------------------------------


def test_a_worker_may_come_first() -> None:
    """It retries, and takes part when the coordinator is there."""

    async def story() -> None:
        came = asyncio.Event()

        async def turn_away(_: object, writer: asyncio.StreamWriter) -> None:
            writer.close()
            came.set()

        other = await asyncio.start_server(turn_away, LOOPBACK, 0)
        port = other.sockets[0].getsockname()[1]
        worker = asyncio.ensure_future(take_part([client_of(0)], port))
        await came.wait()
        other.close()
        await other.wait_closed()
        server, _ = await listening(run_of(awaited={}), FakeServer(), port=port)
        assert await server.finish() == COMPLETED
        assert await worker == [COMPLETED]

    go(story())


def test_nobody_listens() -> None:
    """After `patience_s` a worker fails with the address and the error."""

    async def story() -> None:
        port = free_port()
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1)
        assert finish.status == "failed"
        assert f"not admitted at {LOOPBACK}:{port}: " in finish.reason
        assert "Connect call failed" in finish.reason

    go(story())


def test_nobody_takes_the_connection_up() -> None:
    """A connection without an answer fails in time, like a refused one."""

    async def story() -> None:
        with swallowing(LOOPBACK) as port:
            client = client_of(0, timing=replace(IMPATIENT, hello_s=0.2))
            finish = await client.run(LOOPBACK, port, patience_s=0.1)
        where = f"not admitted at {LOOPBACK}:{port}"
        assert finish == do.Finish("failed", f"{where}: no answer from {LOOPBACK} within 0.2 s")

    go(story())


def test_a_name_of_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reaches the second one, though the first swallows its packets."""

    async def story() -> None:
        with swallowing("127.0.0.2") as port:
            two = [(socket.AF_INET, (host, port)) for host in ("127.0.0.2", LOOPBACK)]
            resolve = AsyncMock(return_value=two)
            server, _ = await listening(run_of(awaited={}), FakeServer(), port=port)
            monkeypatch.setattr(sockets, "resolve", resolve)
            running = asyncio.ensure_future(server.finish())
            client = client_of(0, timing=replace(TIMING, hello_s=0.4))
            assert await take_part([client], port, "trainer") == [COMPLETED]
            assert await running == COMPLETED

    go(story())


def test_another_service_listens() -> None:
    """A service that is no coordinator is given up, though it accepts connections."""

    async def story() -> None:
        async def answer(_: object, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n" + b"\r\n" * 99)
            writer.close()

        other = await asyncio.start_server(answer, LOOPBACK, 0)
        port = other.sockets[0].getsockname()[1]
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1)
        assert finish.status == "failed"
        assert "magic=b'HTTP': not a frame of this protocol" in finish.reason
        other.close()

    go(story())


def test_the_run_is_over() -> None:
    """A worker that comes then finds no coordinator, even in the last moment."""

    async def story() -> None:
        server, port = await listening(run_of(awaited={}), FakeServer())
        finishes = asyncio.ensure_future(take_part([client_of(0)], port))
        await until(lambda: server.end.finished is not None)
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        late = asyncio.ensure_future(reader.read())
        late.add_done_callback(lambda _: writer.close())
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED]
        assert await late == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, port)

    go(story())


def test_the_patience_of_a_worker_that_waited_for_its_welcome() -> None:
    """It begins anew when the connection breaks, even after a wait that was longer."""

    async def story() -> None:
        patience_s, member = 0.2, _Slow()
        server, port = await listening(run_of(awaited={}), FakeServer())
        running = asyncio.ensure_future(server.finish())
        first = asyncio.ensure_future(take_part([client_of(0, member)], port))
        await until(member.begun.is_set)
        late = client_of(1)
        waits = asyncio.ensure_future(late.run(LOOPBACK, port, patience_s=patience_s))
        enough = 2 * patience_s / TIMING.heartbeat_s
        await until(lambda: late.end.meter.got["Heartbeat"].messages > enough)
        peers = server.end.machine.peers
        (broken,) = [peer for peer, one in peers.items() if one.rank == 1]
        assert isinstance(broken, Link)
        broken.abort()
        await until(lambda: any(peers[one].rank == 1 and one != broken for one in peers))
        member.goes_on.set()
        assert await running == COMPLETED
        assert [*await first, await waits] == [COMPLETED, COMPLETED]

    go(story())


# --- a worker that leaves without a connection --------------------------------------------------


class _Connects(WorkerClient):
    """Leaves the run when it has connected, before it talks."""

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
        sock = await super().connect(host, port, context)
        self.leave("stopped by SIGTERM")
        return sock


class _Slow(FakeMember):
    """Computes until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        self.begun.set()
        assert self.goes_on.wait(10.0)
        return super().work(step, shards)


def test_a_worker_may_leave_while_it_connects() -> None:
    """It does not take part, though the connection was made."""

    async def story() -> None:
        hands = FakeServer()
        server, port = await listening(run_of(awaited={}), hands)
        running = asyncio.ensure_future(server.finish())
        leaving = _Connects(worker_of(0), FakeMember())
        assert await take_part([leaving], port) == [LEFT]
        assert await take_part([client_of(0)], port) == [COMPLETED]
        assert await running == COMPLETED
        assert hands.told.count("0 joined") == 1

    go(story())


def test_a_worker_may_leave_while_it_computes_for_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not reconnect."""
    monkeypatch.setattr(sockets, "BACKOFF_S", (0.0, 0.0))

    async def story() -> None:
        member = _Slow()
        server, port = await listening(run_of(awaited={}), FakeServer())
        running = asyncio.ensure_future(server.finish())
        client = client_of(0, member)
        taking_part = asyncio.ensure_future(take_part([client], port))
        await until(member.begun.is_set)
        server.die()
        assert await running == tcp.DIED
        await until(lambda: client.end.machine.phase is WorkerPhase.AWAY)
        for _ in range(9):
            await asyncio.sleep(0)  # from the lost connection to the wait for the computation
        again, _ = await listening(run_of(awaited={}), FakeServer(), port=port)
        running = asyncio.ensure_future(again.finish())
        client.leave("stopped by SIGTERM")
        assert await taking_part == [LEFT]
        member.goes_on.set()
        assert again.strangers == (0, [])
        assert not again.end.machine.peers
        again.die()
        assert await running == tcp.DIED

    go(story())


# --- who is not let in --------------------------------------------------------------------------


def test_a_wrong_secret() -> None:
    """The worker is refused and says so; the run continues without it."""

    async def story() -> None:
        hands = FakeServer()
        server, port = await listening(run_of(awaited={0: [0]}), hands)
        finish = await client_of(1, secret=b"open barley").run(LOOPBACK, port, patience_s=5.0)
        assert finish == do.Finish("failed", "refused: wrong secret")
        finishes = asyncio.ensure_future(take_part([client_of(0)], port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED]
        assert hands.told == ["0 joined"]

    go(story())


def test_a_rank_that_is_taken() -> None:
    """A worker that requests it is refused while its owner lives, and gives up in time."""

    async def story() -> None:
        server, port = await listening(run_of(), FakeServer())
        first = asyncio.ensure_future(take_part([client_of(0)], port))
        await until(lambda: any(one.rank == 0 for one in server.end.machine.peers.values()))
        finish = await client_of(0).run(LOOPBACK, port, patience_s=0.1)
        assert finish.status == "failed"
        assert "refused: rank=0: a live worker has it" in finish.reason
        second = asyncio.ensure_future(take_part([client_of(1)], port))
        assert await server.finish() == COMPLETED
        assert [*await first, *await second] == [COMPLETED, COMPLETED]

    go(story())


def _claim(payload_bytes: int) -> bytes:
    """Return a prefix that announces a large message."""
    return FIELDS.pack(MAGIC, VERSION, 2, 1, 0, 0, 100, 2**20, payload_bytes) + bytes(16)


async def _stranger(port: int, says: bytes, pace_s: float | None = None) -> None:
    """Connect, send bytes at once or one at a time, and stay until disconnected."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    talking = asyncio.ensure_future(_say(writer, says, pace_s))
    try:
        while await reader.read(2**16):
            pass
    except ConnectionResetError:
        pass
    talking.cancel()
    writer.close()


async def _say(writer: asyncio.StreamWriter, says: bytes, pace_s: float | None) -> None:
    for piece in [says] if pace_s is None else [says[at : at + 1] for at in range(len(says))]:
        writer.write(piece)
        await asyncio.sleep(pace_s or 0)  # a pace, and nothing that anybody waits for


def test_one_that_is_reset_before_it_is_taken_up() -> None:
    """As port scanners do: the run continues, and has the reason."""

    async def story() -> None:
        server, port = await listening(run_of(awaited={}), FakeServer())
        running = asyncio.ensure_future(server.finish())
        sock = socket.create_connection((LOOPBACK, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
        sock.close()
        await until(lambda: bool(server.strangers[0]) or running.done())
        assert await take_part([client_of(0)], port) == [COMPLETED]
        assert await running == COMPLETED
        ((host, reason),) = server.strangers[1]
        assert host == LOOPBACK
        assert "reset" in reason.lower() or "pipe" in reason.lower()

    go(story())


def test_strangers_disturb_nobody() -> None:
    """200 strangers are dropped in time, and the run that was under way completes.

    They send nothing, garbage, HTTP, announcements of large messages, or a byte at a time.
    """

    async def story() -> None:
        hands, members = FakeServer(), [FakeMember(), FakeMember()]
        awaited = {0: [0], 2: [1]}
        server, port = await listening(run_of(awaited=awaited), hands, timing=IMPATIENT)
        running = asyncio.ensure_future(server.finish())
        first = asyncio.ensure_future(take_part([client_of(0, members[0])], port))
        await until(lambda: server.end.machine.step == 2)
        noise = random.Random(0)
        strangers = [
            *(_stranger(port, b"") for _ in range(200)),
            *(_stranger(port, noise.randbytes(size)) for size in (1, 47, 48, 49, 4096, 2**20)),
            _stranger(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            _stranger(port, _claim(0)),
            _stranger(port, _claim(2**62)),
            _stranger(port, _claim(0)[: PREFIX_BYTES - 7]),
            _stranger(port, _claim(0) * 99, pace_s=0.01),
        ]
        await asyncio.gather(*strangers)
        assert [one.rank for one in server.end.machine.peers.values()] == [0]
        second = asyncio.ensure_future(take_part([client_of(1, members[1])], port))
        assert await running == COMPLETED
        assert [*await first, *await second] == [COMPLETED, COMPLETED]
        assert hands.made == members[0].made == members[1].made == ALL
        assert hands.told == ["0 joined", "1 joined"]

    go(story())


def test_a_thousand_that_say_nothing() -> None:
    """A worker that comes after 1,000 silent strangers gets a place after their grace.

    At most 256 of them are accepted at a time. The run completes.
    """

    async def story() -> None:
        hands, members = FakeServer(), [FakeMember(), FakeMember()]
        timing = replace(IMPATIENT, hello_s=10.0, gather_s=20.0)
        server, port = await listening(run_of(awaited={0: [0], 2: [1]}), hands, timing=timing)
        running = asyncio.ensure_future(server.finish())
        first = asyncio.ensure_future(take_part([client_of(0, members[0])], port))
        await until(lambda: server.end.machine.step == 2)
        with ExitStack() as stack:
            for _ in range(1000):
                stack.enter_context(socket.create_connection((LOOPBACK, port)))
            second = asyncio.ensure_future(take_part([client_of(1, members[1])], port))
            most = 0
            while not running.done():
                most = max(most, len(server.end.machine.peers))
                await asyncio.sleep(0)
            # Who was just sent away is gone after the turn in which another one came.
            assert 256 <= most <= 256 + 2 + 2 * TAKEN_UP_MAX
        assert await running == COMPLETED
        assert [*await first, *await second] == [COMPLETED, COMPLETED]
        assert hands.made == members[0].made == members[1].made == ALL
        assert server.strangers[0] >= 1000 - 256

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
    try:
        go(story())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("secured", [False, True])
def test_a_worker_joins_beside_a_flood(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    """It waits for a place, then has time for its proof.

    The flood comes from its own address. It is three times as large as the number of places, and
    replaces every connection that is dropped.
    """

    monkeypatch.setattr(tcp, "Door", partial(Door, strangers_max=8))

    async def story() -> None:
        server_side = server_context(authority, mutual=False) if secured else None
        client_side = client_context(authority, None) if secured else None
        timing = replace(IMPATIENT, hello_s=2.0, gather_s=20.0)
        server = CoordinatorServer(run_of(awaited={}), FakeServer(), timing=timing, secret=SECRET)
        _, port = await server.listen(LOOPBACK, 0, context=server_side)
        running = asyncio.ensure_future(server.finish())
        flood = asyncio.ensure_future(_refill(port, 24))
        await until(lambda: server.strangers[0] > 8)
        finish = await client_of(0).run(LOOPBACK, port, patience_s=20.0, context=client_side)
        assert [finish, await running] == [COMPLETED, COMPLETED]
        flood.cancel()
        await asyncio.wait([flood])

    go(story())


async def _refill(port: int, number: int) -> None:
    """Keep so many silent connections open."""
    with ExitStack() as stack:
        there: list[socket.socket] = []
        while True:
            while len(there) < number:
                there.append(stack.enter_context(socket.create_connection((LOOPBACK, port))))
                there[-1].setblocking(False)
            await asyncio.sleep(0)
            there = [one for one in there if not _is_closed(one)]


def _is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(2**12):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    sock.close()
    return True


# --- where a coordinator may listen -------------------------------------------------------------


def _server(secret: bytes) -> CoordinatorServer:
    return CoordinatorServer(run_of(), FakeServer(), timing=TIMING, secret=secret)


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes.."])
@pytest.mark.parametrize("mutual", [None, False])
def test_nobody_listens_unprotected(
    authority: Authority, secret: bytes, mutual: bool | None
) -> None:
    """Other machines need a long secret, or TLS with workers' certificates."""

    async def story() -> None:
        context = None if mutual is None else server_context(authority, mutual=mutual)
        with pytest.raises(UsageError) as caught:
            await _server(secret).listen("0.0.0.0", 0, context=context)
        assert str(caught.value).startswith("host=0.0.0.0: other machines can connect there")
        assert f"the secret of {len(secret)} bytes is too short to stop them" in str(caught.value)

    go(story())


@pytest.mark.parametrize(
    ("host", "secret", "mutual"),
    [("0.0.0.0", b"of sixteen bytes", False), ("0.0.0.0", b"", True), ("localhost", b"", False)],
)
def test_a_protected_run_listens_anywhere(
    authority: Authority, host: str, secret: bytes, mutual: bool
) -> None:
    """A protected run listens at any address, an unprotected one at loopback."""

    async def story() -> None:
        server = _server(secret)
        context = server_context(authority) if mutual else None
        _, port = await server.listen(host, 0, context=context)
        running = asyncio.ensure_future(server.finish())
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.close()
        running.cancel()
        await asyncio.wait([running])

    go(story())


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


class Clumsy(FakeServer):
    """Hands of a coordinator that fail in the middle of a step."""

    def reduce(self, block: int) -> tuple[float, float] | str:
        raise ZeroDivisionError("no weight")


class Tired(FakeMember):
    """Hands of a worker that fail while it computes."""

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        raise ZeroDivisionError("no samples")


def _elsewhere(hands: FakeMember, rank: int, port: int) -> asyncio.Future[do.Finish]:
    """Run a worker in a loop of its own, so that its errors are not the coordinator's."""

    def work() -> do.Finish:
        return asyncio.run(client_of(rank, hands).run(LOOPBACK, port, patience_s=0.1))

    return asyncio.ensure_future(asyncio.to_thread(work))


def test_a_defect_of_the_coordinator_ends_the_run() -> None:
    """`finish` raises the exception of its hands."""

    async def story() -> None:
        server, port = await listening(run_of(awaited={}), Clumsy())
        worker = _elsewhere(FakeMember(), 0, port)
        with pytest.raises(ZeroDivisionError, match="no weight"):
            await server.finish()
        assert (await worker).status == "failed"

    go(story())


class _FailsLate(_Slow):
    """Fails when `goes_on` is set."""

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        super().work(step, shards)
        raise ZeroDivisionError("no samples")


def test_a_defect_in_work_for_a_lost_connection_ends_the_worker() -> None:
    """It does not reconnect before `run` raises the exception."""

    async def story() -> None:
        member, lost = _FailsLate(), threading.Event()
        server, port = await listening(run_of(awaited={}), FakeServer())
        running = asyncio.ensure_future(server.finish())
        client = WorkerClient(worker_of(0), member, alone=lambda problem: lost.set())

        def take_part() -> do.Finish:
            return asyncio.run(client.run(LOOPBACK, port, patience_s=5.0))

        ill = asyncio.ensure_future(asyncio.to_thread(take_part))
        await until(member.begun.is_set)
        server.die()
        assert await running == tcp.DIED
        await until(lost.is_set)
        hands = FakeServer()
        again, _ = await listening(run_of(awaited={}), hands, port=port)
        running = asyncio.ensure_future(again.finish())
        member.goes_on.set()
        with pytest.raises(ZeroDivisionError, match="no samples"):
            await ill
        again.die()
        assert await running == tcp.DIED
        assert (again.strangers, hands.told) == ((0, []), [])

    go(story())


def test_a_defect_of_a_worker_ends_the_worker() -> None:
    """`run` raises the exception, and the others compute its shards."""

    async def story() -> None:
        hands = FakeServer()
        server, port = await listening(run_of(), hands)
        well, ill = _elsewhere(FakeMember(), 0, port), _elsewhere(Tired(), 1, port)
        assert await server.finish() == COMPLETED
        with pytest.raises(ZeroDivisionError, match="no samples"):
            await ill
        assert await well == COMPLETED
        assert hands.made == [0, 1, 2]
        assert any(one.startswith("1 left") for one in hands.told)

    go(story())
