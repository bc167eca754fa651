"""The door of a coordinator: places for connections that have proved nothing, and TLS."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire_io import door, sockets
from entrenar_py.train.wire_io.door import Attention, Door, Places, Visit, shared_address
from tests.train.wire_io.certificates import Authority
from tests.train.wire_io.fakes import LOOPBACK, go, until

GRACE_S = 1.0
HERE, THERE = "10.0.0.1", "10.0.0.2"


def places(most: int, *hosts: str) -> Places[str]:
    """Return places with a guest from each of `hosts`, whose name is its number and its second."""
    made: Places[str] = Places(most, grace_s=GRACE_S)
    for number, host in enumerate(hosts):
        assert made.enter(str(number), host, float(number)) is None
    return made


def test_nobody_goes_while_there_is_room() -> None:
    """All guests stay, for any length of time."""
    made = places(3, HERE, HERE)
    assert made.enter("new", HERE, 1e9) is None
    assert len(made) == 3


def test_the_oldest_goes_once_it_had_its_chance() -> None:
    """Before that the new one has to wait."""
    made = places(2, HERE, HERE)
    assert made.enter("new", HERE, 0.9) == "new"
    assert len(made) == 2
    assert made.enter("new", HERE, 1.0) == "0"
    assert made.enter("another", HERE, 1.0) == "another"
    assert len(made) == 2


def test_an_address_with_more_makes_room_at_once() -> None:
    """Guests of other addresses get in until the places are shared evenly."""
    made = places(4, HERE, HERE, HERE, HERE)
    assert made.enter("a", THERE, 3.0) == "0"
    assert made.enter("b", THERE, 3.0) == "1"
    assert made.enter("c", THERE, 3.0) == "c", "half of them are its own"


def test_a_worker_from_elsewhere_stays_whoever_comes() -> None:
    """A flood from one address does not displace another's only guest."""
    made = places(4, THERE, HERE, HERE, HERE)
    for number in range(4, 1000):
        assert made.enter(str(number), HERE, float(number)) == str(number - 3)


def test_who_was_told_to_go_goes_first() -> None:
    """It needs no grace."""
    made = places(2, HERE, HERE)
    made.linger("1")
    assert made.enter("new", HERE, 0.0) == "1"
    made.linger("0")
    made.linger("of a worker that had no place")
    assert len(made) == 3
    assert made.enter("another", HERE, 0.0) == "0"


def test_who_proved_itself_or_left_takes_no_place() -> None:
    """A second release has no effect."""
    made = places(1, HERE)
    for _ in range(2):
        made.release("0")
    assert len(made) == 0
    assert made.enter("new", HERE, 0.0) is None


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "127.0.0.1", False),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, alike: bool) -> None:
    """All IPv6 addresses in a /64 count as one."""
    assert (shared_address(one) == shared_address(other)) is alike


@given(
    most=st.integers(1, 6),
    visits=st.lists(
        st.tuples(
            st.sampled_from("abc"),  # whose address
            st.integers(0, 2048).map(lambda n: n / 1024),  # seconds after the one before, exact
            st.sampled_from(["stays", "leaves", "lingers"]),
        ),
        max_size=40,
    ),
)
def test_whatever_happens(most: int, visits: list[tuple[str, float, str]]) -> None:
    """The invariants of places, for any sequence of events.

    There are never more guests than places. Only a guest of the largest address goes before its
    grace, and then the oldest one. An address with less than its share gets in at once, and any
    guest within a grace.
    """
    made: Places[int] = Places(most, grace_s=GRACE_S)
    here: dict[int, tuple[str, float]] = {}
    now = 0.0
    for number, (host, after_s, then) in enumerate(visits):
        now += after_s
        mine = sum(other == host for other, _ in here.values()) + 1
        hosts = {other for other, _ in here.values()} | {host}
        full = len(made) == most
        goes = made.enter(number, host, now)
        if goes == number:
            assert mine > most // len(hosts), "it had less than its share"
            now += GRACE_S
            goes = made.enter(number, host, now)
            assert goes != number, "whoever waits gets in within a grace"
        here[number] = (host, now)
        if goes is not None:
            whose, since = here.pop(goes)
            theirs = [other for other in here.values() if other[0] == whose]
            assert full
            assert now - since >= GRACE_S or len(theirs) >= mine
            assert all(since <= other for _, other in theirs)
        assert len(made) <= most
        if then != "stays":
            del here[number]
            (made.release if then == "leaves" else made.linger)(number)
        if then == "lingers":
            made.release(number)


@given(st.floats(0.001, 0.9), st.integers(1, 5000))
def test_a_worker_in_a_flood_of_its_own_address(proof_s: float, flood_per_s: int) -> None:
    """It gets a place for the whole grace, however many others come."""
    made: Places[int] = Places(16, grace_s=GRACE_S)
    numbers, now = itertools.count(1), 0.0
    while len(made) < 16:
        made.enter(next(numbers), HERE, now)
    while made.enter(0, HERE, now) == 0:
        now += 0.01
    since = now
    for _ in range(min(int(flood_per_s * proof_s), 500)):
        now = min(now + 1 / flood_per_s, since + proof_s)
        assert made.enter(next(numbers), HERE, now) != 0


def test_a_pause_is_no_time() -> None:
    """Nothing was read in a pause, so little of it counts."""
    attention = Attention(10.0, most_s=0.1)
    assert attention.look(10.05) == pytest.approx(0.05)
    assert attention.look(70.0) == pytest.approx(0.15)
    assert attention.look(70.1) == pytest.approx(0.25)


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
            context=sockets.server_context(cert=own.cert, key=own.key),
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
