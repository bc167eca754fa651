"""Connections that are accepted, those that are refused, and running out of file descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from entrenar_py.train.wire_io import door, sockets, tls
from entrenar_py.train.wire_io.door import Door, Visit
from tests.train.wire_io.certificates import Authority
from tests.train.wire_io.fakes import LOOPBACK, go, until


async def open_door(
    opened: Callable[[socket.socket], Any], **changes: Any
) -> tuple[Door, tuple[str, int]]:
    """Return a door that disconnects no one by default, and its address."""
    usual: dict[str, Any] = {"context": None, "patience_s": 5.0}
    listeners = sockets.listen(await sockets.resolve(LOOPBACK, 0))
    made = Door(listeners, lambda sock, _: opened(sock), **{**usual, **changes})
    return made, listeners[0].getsockname()


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the other end has closed or reset the connection."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_what_is_taken_up_does_not_block() -> None:
    """The socket is non-blocking, and sends small messages at once."""

    async def story() -> None:
        taken: list[socket.socket] = []
        opened, place = await open_door(taken.append)
        with socket.create_connection(place):
            await until(lambda: bool(taken))
            assert not taken[0].getblocking()
            assert taken[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            taken[0].close()
        opened.close()

    go(story())


def test_a_burst_is_taken_up_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are accepted, with turns of the loop for others in between."""
    monkeypatch.setattr(door, "TAKEN_UP_MAX", 2)

    async def story() -> None:
        taken: list[socket.socket] = []
        opened, place = await open_door(taken.append)
        burst = [socket.create_connection(place) for _ in range(5)]
        await until(lambda: bool(taken))
        assert len(taken) <= 2
        await until(lambda: len(taken) == 5)
        for sock in (*burst, *taken):
            sock.close()
        opened.close()

    go(story())


def test_who_is_too_many_waits() -> None:
    """A connection waits for a place until one has had its grace or proved itself."""

    async def story() -> None:
        visits: list[tuple[socket.socket, Visit]] = []

        def opened(sock: socket.socket, visit: Visit) -> None:
            visits.append((sock, visit))
            visit.end = lambda reason: sock.close()

        listeners = sockets.listen(await sockets.resolve(LOOPBACK, 0))
        place, patience_s = listeners[0].getsockname(), 1.0
        made = Door(listeners, opened, context=None, patience_s=patience_s, strangers_max=1)
        began = time.monotonic()
        first, second, third = (socket.create_connection(place) for _ in range(3))
        await until(lambda: len(visits) == 2)
        assert time.monotonic() - began >= patience_s / door.GRACES
        assert _is_closed(first)
        assert not _is_closed(second)
        made.proved(visits[1][1])
        await until(lambda: len(visits) == 3)
        assert not _is_closed(second)
        for sock in (first, second, third, *(sock for sock, _ in visits)):
            sock.close()
        made.close()

    go(story())


def test_who_waits_at_a_door_that_closes() -> None:
    """It is disconnected when the door closes."""

    async def story() -> None:
        taken: list[socket.socket] = []
        opened, place = await open_door(taken.append, strangers_max=1)
        there, waiting = (socket.create_connection(place) for _ in range(2))
        await until(lambda: bool(opened._held))
        opened.close()
        await until(lambda: _is_closed(waiting))
        for sock in (there, waiting, *taken):
            sock.close()

    go(story())


def test_a_door_that_closes_in_the_middle_of_a_handshake(authority: Authority) -> None:
    """A connection in its handshake is counted and dropped: nothing outlives the run."""

    async def story() -> None:
        own = authority.signed("coordinator")
        opened, place = await open_door(
            lambda _: pytest.fail("nobody is ready"),
            context=tls.server_context(cert=own.cert, key=own.key),
        )
        waiting = [socket.create_connection(place) for _ in range(2)]
        waiting[0].send(bytes.fromhex("1603010200"))
        await until(lambda: len(opened._places) == 2)
        opened.close()
        await until(lambda: all(map(_is_closed, waiting)))
        await until(lambda: not opened._places)
        for sock in waiting:
            sock.close()

    go(story())


class Faulty(socket.socket):
    """A listener whose `accept` raises errors first."""

    problems: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.problems:
            raise OSError(self.problems.pop(), "went wrong")
        return super().accept()


def _faulty(*problems: int) -> Faulty:
    listener = Faulty()
    listener.setblocking(False)
    listener.bind((LOOPBACK, 0))
    listener.listen()
    listener.problems = list(problems)
    return listener


def test_connections_that_are_gone_before_they_are_taken_up() -> None:
    """After errors of single connections later ones are accepted."""

    async def story() -> None:
        taken: list[socket.socket] = []
        listener = _faulty(*door._OF_ONE)
        place = listener.getsockname()
        made = Door([listener], lambda sock, _: taken.append(sock), context=None, patience_s=5.0)
        with socket.create_connection(place):
            await until(lambda: bool(taken))
        assert made.num_ended == len(door._OF_ONE)
        taken[0].close()
        made.close()

    go(story())


def test_a_listener_that_is_broken_is_told() -> None:
    """An error that no stranger can cause is raised."""

    async def story() -> None:
        told: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        listener = _faulty(errno.EBADF)
        with socket.create_connection(listener.getsockname()):
            made = Door([listener], lambda *_: None, context=None, patience_s=5.0)
            await until(lambda: bool(told))
        assert [getattr(one, "errno", None) for one in told][:1] == [errno.EBADF]
        made.close()

    go(story())


def test_a_door_that_the_kernel_does_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again, as when no file can be opened."""
    monkeypatch.setattr(door, "REST_S", 0.01)

    async def story() -> None:
        taken: list[socket.socket] = []
        loop = asyncio.get_running_loop()
        watch, problems = loop.add_reader, [errno.ENOSPC, errno.ENOMEM]

        def add_reader(*given: Any) -> None:
            if problems:
                raise OSError(problems.pop(), "no watch is left")
            watch(*given)

        monkeypatch.setattr(loop, "add_reader", add_reader)
        opened, place = await open_door(taken.append)
        with socket.create_connection(place):
            await until(lambda: bool(taken))
        taken[0].close()
        opened.close()

    go(story())


def test_a_process_that_can_open_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door pauses, and accepts waiting connections later."""
    monkeypatch.setattr(door, "REST_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rests = 0

    async def story() -> None:
        nonlocal rests
        taken: list[socket.socket] = []
        opened, place = await open_door(taken.append)
        waiting = socket.create_connection(place)
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def counted(delay: float, *given: Any, **named: Any) -> asyncio.TimerHandle:
            nonlocal rests
            rests += delay == door.REST_S
            return later(delay, *given, **named)

        monkeypatch.setattr(loop, "call_later", counted)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        await until(lambda: rests > 2)
        assert not taken
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: bool(taken))
        for sock in (waiting, *taken):
            sock.close()
        opened.close()

    try:
        go(story())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
