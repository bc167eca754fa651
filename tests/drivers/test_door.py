"""Who is taken up, who is turned away, and what happens when nothing is left to take up with."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest

from entrenar_py.drivers import door, sockets, tls
from entrenar_py.drivers.door import Door
from tests.drivers.certificates import Authority
from tests.drivers.fakes import LOOPBACK, go, until


async def open_door(opened: Callable[[socket.socket], None], **changes: Any) -> tuple[Door, Any]:
    """A door at which there is always room, unless told otherwise; and where it is."""
    usual: dict[str, Any] = {"has_room": lambda _: True, "context": None, "patience_s": 5.0}
    listeners = sockets.listen(await sockets.resolve(LOOPBACK, 0))
    return Door(listeners, opened, **{**usual, **changes}), listeners[0].getsockname()


def _is_closed(sock: socket.socket) -> bool:
    """Whether nothing comes any more: the other end has closed it, or reset it."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_what_is_taken_up_does_not_block() -> None:
    """And its small messages are not held back until there are more of them."""

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
    """All of them, without keeping the loop from everything else for as long."""
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


def test_who_is_too_many_is_turned_away() -> None:
    """At once, and the next one is taken up when there is room again."""

    async def story() -> None:
        taken: list[socket.socket] = []
        opened, place = await open_door(taken.append, has_room=lambda _: not taken)
        first, second = (socket.create_connection(place) for _ in range(2))
        await until(lambda: _is_closed(second))
        assert not _is_closed(first)
        taken.pop().close()
        third = socket.create_connection(place)
        await until(lambda: bool(taken))
        for sock in (first, second, third, *taken):
            sock.close()
        opened.close()

    go(story())


def test_a_door_that_closes_in_the_middle_of_a_handshake(authority: Authority) -> None:
    """Who is in it is counted, and dropped: nothing is left of a run that is over."""

    async def story() -> None:
        counts: list[int] = []

        def has_room(securing: int) -> bool:
            counts.append(securing)
            return True

        own = authority.signed("coordinator")
        opened, place = await open_door(
            lambda _: pytest.fail("nobody is ready"),
            has_room=has_room,
            context=tls.server_context(cert=own.cert, key=own.key),
        )
        waiting = [socket.create_connection(place) for _ in range(2)]
        waiting[0].send(bytes.fromhex("1603010200"))
        await until(lambda: counts == [0, 1])
        opened.close()
        await until(lambda: all(map(_is_closed, waiting)))
        for sock in waiting:
            sock.close()

    go(story())


def test_a_process_that_can_open_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door rests, and goes on when it can; whoever waited meanwhile is taken up."""
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
