"""The mesh over real sockets: links between workers, and disturbances."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.injections import Fate, Meddle, Meddling
from entrenar_py.train.wire_io.tcp import MeshClient
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import COMPLETED, LOOPBACK, TIMING, free_port, go, run_of, until
from tests.train.wire_io.mesh_fakes import (
    FakeMeshMember,
    FakeMeshServer,
    mesh_client_of,
    mesh_listening,
    mesh_worker_of,
)

ALL = [0, 1, 2]
IMPATIENT = replace(TIMING, dead_after_s=2.0)
SHORT = replace(TIMING, hello_s=1.0)


async def take_part(
    clients: Sequence[MeshClient],
    port: int,
    host: str = LOOPBACK,
    context: ssl.SSLContext | None = None,
) -> list[do.Finish]:
    """Return the Finish of each of `clients`."""
    staying = (client.run(host, port, patience_s=5.0, context=context) for client in clients)
    return await asyncio.gather(*staying)


def once(fate: Fate, kind: str) -> Meddle:
    """`fate` befalls the first message of `kind` that a worker sends."""
    struck = False

    def meddle(rank: int | None, up: bool, message: Message) -> Meddling | None:
        nonlocal struck
        if struck or type(message).__name__ != kind:
            return None
        struck = True
        return Meddling(fate)

    return meddle


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(("size", "num_blocks"), [(1, 1), (1, 20), (2**20 + 1, 2)])
def test_a_run_by_some_workers(num_workers: int, size: int, num_blocks: int) -> None:
    """All make every step in one round, and all finish."""

    async def story() -> None:
        content = random.Random(size).randbytes(size)
        hands, members = FakeMeshServer(content), [FakeMeshMember(content) for _ in ALL]
        ranks = range(num_workers)
        run = run_of(num_blocks=num_blocks, world_size=num_workers, awaited={0: ranks})
        server, port = await mesh_listening(run, hands)
        clients = [mesh_client_of(rank, members[rank]) for rank in ranks]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED] * num_workers
        assert [members[rank].made for rank in ranks] == [ALL] * num_workers
        assert [members[rank].rounds for rank in ranks] == [len(ALL) + 1] * num_workers
        assert sorted(hands.told) == [f"{rank} joined" for rank in ranks]

    go(story())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_names_and_both_families(host: str) -> None:
    """Workers reach each other at the address family of the coordinator."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 loopback here")

    async def story() -> None:
        server, port = await mesh_listening(run_of(), FakeMeshServer(), host=host)
        clients = [mesh_client_of(0), mesh_client_of(1)]
        finishes = asyncio.ensure_future(take_part(clients, port, host))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]

    go(story())


def test_who_comes_late_gets_the_state_of_another() -> None:
    """The coordinator requests it, and passes it on."""

    async def story() -> None:
        hands, late = FakeMeshServer(), FakeMeshMember()
        server, port = await mesh_listening(run_of(awaited={0: [0], 2: [1]}), hands)
        running = asyncio.ensure_future(server.finish())
        first = asyncio.ensure_future(take_part([mesh_client_of(0)], port))
        await until(lambda: server.end.machine.step == 2)
        second = asyncio.ensure_future(take_part([mesh_client_of(1, late)], port))
        assert await running == COMPLETED
        assert [*await first, *await second] == [COMPLETED, COMPLETED]
        assert late.made == ALL
        assert hands.told == ["0 joined", "0 gave the state before 2", "1 joined"]

    go(story())


# --- TLS --------------------------------------------------------------------------------------


def test_everything_over_tls(authority: Authority) -> None:
    """All connections use TLS, and all workers show certificates."""

    async def story() -> None:
        members = [FakeMeshMember(), FakeMeshMember()]
        listening = server_context(authority)
        server, port = await mesh_listening(run_of(), FakeMeshServer(), context=listening)
        clients = [
            mesh_client_of(rank, member, door_context=_door(authority))
            for rank, member in enumerate(members)
        ]
        context = client_context(authority, authority)
        finishes = asyncio.ensure_future(take_part(clients, port, context=context))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]
        assert members[0].made == members[1].made == ALL

    go(story())


def test_a_worker_that_nobody_vouches_for_is_not_reached(
    authority: Authority, stranger: Authority
) -> None:
    """Others reject its certificate; it is thrown out, and they go on."""

    async def story() -> None:
        hands, member = FakeMeshServer(), FakeMeshMember()
        listening = server_context(authority)
        server, port = await mesh_listening(run_of(), hands, context=listening)
        good = mesh_client_of(0, member, door_context=_door(authority))
        odd = mesh_client_of(1, door_context=_door(stranger))
        context = client_context(authority, authority)
        finishes = asyncio.ensure_future(take_part([good, odd], port, context=context))
        assert await server.finish() == COMPLETED
        await finishes
        assert member.made == ALL
        left = [one for one in hands.told if one.startswith("1 left: ")]
        assert "can't reach worker 1" in left[0]
        assert "certificate verify failed" in left[0]

    go(story())


@pytest.mark.parametrize("inside", [False, True])
def test_tls_is_for_all_or_nobody(authority: Authority, inside: bool) -> None:
    """TLS to the coordinator alone would leave gradients readable: UsageError."""

    async def story() -> None:
        client = mesh_client_of(0, door_context=_door(authority) if inside else None)
        context = None if inside else client_context(authority, authority)
        with pytest.raises(UsageError, match="TLS in a mesh: give each worker a certificate"):
            await client.run(LOOPBACK, free_port(), patience_s=1.0, context=context)

    go(story())


def _door(authority: Authority) -> ssl.SSLContext:
    """Return the context in which a worker of `authority` accepts others of it."""
    own = authority.signed("worker")
    return sockets.server_context(cert=own.cert, key=own.key, ca=authority.ca)


# --- what breaks ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["TreeNode", "Average"])
@pytest.mark.parametrize("fate", [Fate.CUT, Fate.HALF_OPEN, Fate.FLIP, Fate.DUPLICATE])
def test_a_link_breaks_between_two_workers(fate: Fate, kind: str) -> None:
    """No worker is dropped; the step's exchange begins again."""

    async def story() -> None:
        hands, members = FakeMeshServer(), [FakeMeshMember() for _ in ALL]
        run = run_of(world_size=3, num_blocks=3, awaited={0: ALL})
        server, port = await mesh_listening(run, hands, timing=IMPATIENT)
        meddled = [once(fate, kind), *[once(fate, "nothing")] * 2]
        clients = [
            mesh_client_of(rank, member, meddle=meddle, timing=IMPATIENT)
            for rank, (member, meddle) in enumerate(zip(members, meddled, strict=True))
        ]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED] * 3
        assert [member.made for member in members] == [ALL] * 3
        assert sorted(hands.told) == ["0 joined", "1 joined", "2 joined"]
        assert min(member.rounds for member in members) > len(ALL) + 1

    go(story())


class Misplaced(MeshClient):
    """A worker that does not listen at its port."""

    def prepare(self, sock: socket.socket) -> None:
        """Nothing listens at its port."""
        super().prepare(sock)
        self.end.machine.port = free_port()


def test_a_worker_that_nobody_reaches() -> None:
    """After some rounds it is thrown out; the others make every step."""

    async def story() -> None:
        hands, member = FakeMeshServer(), FakeMeshMember()
        server, port = await mesh_listening(run_of(), hands)
        misplaced = Misplaced(mesh_worker_of(1), FakeMeshMember())
        clients = [mesh_client_of(0, member), misplaced]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert (await finishes)[0] == COMPLETED
        assert member.made == ALL
        left = [one for one in hands.told if one.startswith("1 left: ")]
        assert left[0].startswith("1 left: worker 0 can't reach worker 1: ")

    go(story())


class Nonsense(MeshClient):
    """A worker that announces a port that can't exist."""

    def prepare(self, sock: socket.socket) -> None:
        super().prepare(sock)
        self.end.machine.port = 2**40


def test_a_worker_at_a_port_that_there_is_not() -> None:
    """No worker reaches it; the others complete the run."""

    async def story() -> None:
        hands, member = FakeMeshServer(), FakeMeshMember()
        server, port = await mesh_listening(run_of(), hands)
        clients = [mesh_client_of(0, member), Nonsense(mesh_worker_of(1), FakeMeshMember())]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert (await finishes)[0] == COMPLETED
        assert member.made == ALL

    go(story())


def test_a_worker_s_door_at_which_strangers_crowd() -> None:
    """A worker that is dropped without a message retries, and does not complain."""
    sent_away = 0

    class Crowded(MeshClient):
        def _opened(self, sock: socket.socket, visit: Visit) -> None:
            nonlocal sent_away
            if sent_away < 3:
                sent_away += 1
                self._door_of().left(visit)
                sock.close()
            else:
                super()._opened(sock, visit)

        def _door_of(self) -> Door:
            assert self._door is not None
            return self._door

    async def story() -> None:
        hands, members = FakeMeshServer(), [FakeMeshMember(), FakeMeshMember()]
        server, port = await mesh_listening(run_of(), hands)
        clients = [mesh_client_of(0, members[0]), Crowded(mesh_worker_of(1), members[1])]
        finishes = asyncio.ensure_future(take_part(clients, port))
        assert await server.finish() == COMPLETED
        assert await finishes == [COMPLETED, COMPLETED]
        assert sent_away == 3
        assert [one.rounds for one in members] == [len(ALL) + 1] * 2, "one round of them all"

    go(story())


def test_strangers_at_a_worker_s_port() -> None:
    """300 silent or malformed strangers are dropped, and the run completes."""

    async def story() -> None:
        hands, members = FakeMeshServer(), [FakeMeshMember(), FakeMeshMember()]
        run = run_of(awaited={0: [0], 2: [1]})
        server, port = await mesh_listening(run, hands, timing=SHORT)
        running = asyncio.ensure_future(server.finish())
        client = mesh_client_of(0, members[0], timing=SHORT)
        first = asyncio.ensure_future(take_part([client], port))
        await until(lambda: server.end.machine.step == 2)
        heard_at = client.end.machine.port
        assert heard_at is not None
        noise = random.Random(0)
        said = [b""] * 300 + [noise.randbytes(size) for size in (1, 47, 48, 49, 4096, 2**16)]
        said.append(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.gather(*(_stranger(heard_at, one) for one in said))
        second = asyncio.ensure_future(take_part([mesh_client_of(1, members[1])], port))
        assert await running == COMPLETED
        assert [*await first, *await second] == [COMPLETED, COMPLETED]
        assert members[0].made == members[1].made == ALL
        assert [one for one in hands.told if "left" in one] == []

    go(story())


async def _stranger(port: int, says: bytes) -> None:
    """Connect to a worker, send bytes, and stay until disconnected."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(says)
    try:
        while await reader.read(2**16):
            pass
    except ConnectionResetError:
        pass
    writer.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True
