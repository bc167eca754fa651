"""Large transfers of a connection, which threads do."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator

import pytest

from entrenar_py.train.wire_io import tls
from entrenar_py.train.wire_io.link import BULK_BYTES, Link
from entrenar_py.train.wire_io.message_faults import Fate, Meddling
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import LOOPBACK, go, until
from tests.train.wire_io.test_link import link_on

LARGE = 4 * BULK_BYTES
SIZES = (3, LARGE, 5, BULK_BYTES, BULK_BYTES - 1, LARGE + 1, 0, LARGE)


class Parts:
    """Receives bytes in parts of `sizes`, each in its own memory."""

    def __init__(self, sock: socket.socket, sizes: tuple[int, ...]) -> None:
        self.whole: list[bytes] = []
        self.place = memoryview(b"")
        self.at = 0
        self._sizes = list(sizes)
        self.link = link_on(sock, buffer=self._buffer, filled=self._filled)

    def _buffer(self, _: Link) -> memoryview | None:
        while not self.place.nbytes and self._sizes:
            self.place, self.at = memoryview(bytearray(self._sizes.pop(0))), 0
            if not self.place.nbytes:
                self.whole.append(b"")
        return self.place[self.at :] if self.place.nbytes else None

    def _filled(self, _: Link, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at == self.place.nbytes:
            self.whole.append(bytes(self.place))
            self.place = memoryview(b"")


def parts(sizes: tuple[int, ...], seed: int) -> list[bytes]:
    """Return random bytes in parts of these sizes."""
    return [random.Random(seed + place).randbytes(size) for place, size in enumerate(sizes)]


async def _ends(authority: Authority | None) -> list[socket.socket]:
    """Return both ends of a connection, over TLS if there is an `authority`."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    if authority is None:
        return [*ends]
    listening, calling = server_context(authority), client_context(authority, authority)
    return [
        *await asyncio.gather(
            tls.secured(ends[0], listening, server_side=True, patience_s=10.0),
            tls.secured(ends[1], calling, server_side=False, host=LOOPBACK, patience_s=10.0),
        )
    ]


@pytest.mark.parametrize("over_tls", [False, True])
def test_large_and_small_go_both_ways_at_once(authority: Authority, over_tls: bool) -> None:
    """Each part arrives complete and in order."""

    async def story() -> None:
        socks = await _ends(authority if over_tls else None)
        ends = [Parts(sock, SIZES) for sock in socks]
        said = [parts(SIZES, seed) for seed in (0, 100)]
        for end, pieces in zip(ends, said, strict=True):
            for piece in pieces:
                end.link.write([piece])
        await until(lambda: all(len(end.whole) == len(SIZES) for end in ends))
        assert [end.whole for end in ends] == said[::-1]
        for end in ends:
            end.link.close()
        for end in ends:
            await end.link.ended

    go(story())


def test_what_is_queued_while_a_thread_sends_goes_too() -> None:
    """In order, whether it is large or small."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        sizes = (LARGE,) * 8 + (7, LARGE)
        hearing, speaking = Parts(theirs, sizes), link_on(ours)
        said = parts(sizes, 0)
        for piece in said:
            speaking.write([piece])
            await asyncio.sleep(0)
        speaking.close()
        await speaking.ended
        assert hearing.whole == said

    go(story())


def test_nothing_is_written_to_a_place_after_the_connection_is_closed() -> None:
    """The memory may have another use then; later bytes are discarded."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        hearing = Parts(ours, (LARGE,))
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(theirs, b"x" * 1000)
        await until(lambda: hearing.place.nbytes > 0 and bytes(hearing.place[:1]) == b"x")
        place, hearing.place = hearing.place, memoryview(b"")
        hearing.link.close()
        before = bytes(place)
        await loop.sock_sendall(theirs, b"y" * LARGE)
        theirs.close()
        await hearing.link.ended
        assert bytes(place) == before

    go(story())


def test_what_stalls_waits_in_the_loop() -> None:
    """No thread polls a stalled connection, and the transfer continues later."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        said = random.Random(0).randbytes(LARGE)
        end = Parts(ours, (LARGE,))
        await loop.sock_sendall(theirs, said[:1000])
        await until(lambda: end.at == 1000)
        await until(lambda: end.link._awaits_reading)
        await loop.sock_sendall(theirs, said[1000:])
        await until(lambda: end.whole == [said])
        end.link.write([said])
        await until(lambda: end.link._awaits_writing)
        taken = bytearray()
        while len(taken) < LARGE:
            taken += await loop.sock_recv(theirs, LARGE)
        assert taken == said
        end.link.abort()
        await end.link.ended
        theirs.close()

    go(story())


@pytest.mark.parametrize("reads", [False, True])
def test_a_connection_that_is_aborted_ends_while_threads_are_at_it(reads: bool) -> None:
    """It ends at once, with one reason."""

    async def story() -> None:
        ends = [Parts(sock, (LARGE,) * 64 if reads else ()) for sock in socket.socketpair()]
        for end in ends:
            end.link.write(bytes(LARGE) for _ in range(64))
        await asyncio.sleep(0)
        ends[0].link.abort()
        for end in ends:
            await end.link.ended

    go(story())


def test_what_is_meddled_with_keeps_its_turn() -> None:
    """Earlier messages are encoded first, since encoding numbers the frames."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        asked: list[int] = []

        def numbered(number: int, size: int) -> Iterator[bytes]:
            asked.append(number)
            yield bytes([number]) * size

        sizes = (LARGE, LARGE, 10, LARGE)
        hearing, speaking = Parts(theirs, sizes), link_on(ours)
        for number, size in enumerate(sizes):
            befalls = Meddling(Fate.DELAY, seconds=0.01) if number == 2 else None
            speaking.write(numbered(number, size), befalls)
        speaking.close()
        await speaking.ended
        assert asked == [0, 1, 2, 3]
        assert hearing.whole == [bytes([n]) * size for n, size in enumerate(sizes)]

    go(story())
