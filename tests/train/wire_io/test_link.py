"""One connection on a non-blocking socket."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire_io import link, sockets
from entrenar_py.train.wire_io.injections import Fate, Meddling
from entrenar_py.train.wire_io.link import BULK_BYTES, Link
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import LOOPBACK, go, until

MIB = 2**20


def link_on(
    sock: socket.socket,
    *,
    buffer: Callable[[Link], memoryview | None] = lambda _: None,
    filled: Callable[[Link, int], None] = lambda *_: None,
    lost: Callable[[Link, str], None] = lambda *_: None,
) -> Link:
    """Return a link that discards what it reads, by default."""
    sock.setblocking(False)
    return Link(sock, buffer=buffer, filled=filled, lost=lost)


class Heard:
    """The bytes that a link reads, a few at a time, and the reason of its end."""

    def __init__(self, sock: socket.socket, *, room_bytes: int = 7) -> None:
        self.data = bytearray()
        self.reasons: list[str] = []
        self._room = bytearray(room_bytes)
        self.link = link_on(sock, buffer=self._buffer, filled=self._filled, lost=self._lost)

    def _buffer(self, _: Link) -> memoryview:
        return memoryview(self._room)

    def _filled(self, _: Link, num_bytes: int) -> None:
        self.data += self._room[:num_bytes]

    def _lost(self, _: Link, reason: str) -> None:
        self.reasons.append(reason)


def test_what_is_written_is_read() -> None:
    """Pieces of any size arrive in order; both ends notice the end."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard(theirs)
        speaking = link_on(ours)
        pieces: list[Buffer] = [b"", b"a" * 5, memoryview(b"b" * 100_000), b"", b"c"]
        speaking.write(pieces)
        speaking.write(iter([]))
        speaking.write([b"d"])
        speaking.close()
        await heard.link.ended
        await speaking.ended
        assert heard.data == b"a" * 5 + b"b" * 100_000 + b"cd"
        assert heard.reasons == ["closed by the other end"]

    go(story())


def test_both_may_say_more_than_fits() -> None:
    """Two ends that write before they read do not block each other."""

    async def story() -> None:
        ends = [Heard(sock, room_bytes=2**16) for sock in socket.socketpair()]
        for end in ends:
            end.link.write(bytes(MIB) for _ in range(16))
        await until(lambda: all(len(end.data) == 16 * MIB for end in ends))
        for end in ends:
            end.link.abort()

    go(story())


def test_who_reads_nothing_does_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close with much to send ends in time, and frees its queue."""
    monkeypatch.setattr(link, "FAREWELL_S", 0.1)

    async def story() -> None:
        ours, deaf = socket.socketpair()
        speaking = link_on(ours)
        speaking.write(bytes(MIB) for _ in range(64))
        speaking.close(patience_s=0.1, flowing_s=30.0)
        await speaking.ended
        deaf.close()

    go(story())


def test_who_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close waits while bytes flow."""
    monkeypatch.setattr(link, "FAREWELL_S", 0.2)

    async def story() -> None:
        ours, theirs = socket.socketpair()
        speaking = link_on(ours)
        speaking.write(bytes(MIB) for _ in range(16))
        speaking.close(patience_s=0.2, flowing_s=30.0)
        reader, writer = await asyncio.open_connection(sock=theirs, limit=MIB // 4)
        for _ in range(16):
            await asyncio.sleep(0.05)  # a pace, and nothing that anybody waits for
            assert await reader.readexactly(MIB) == bytes(MIB)
        assert await reader.read() == b""
        writer.close()
        await speaking.ended

    go(story())


def test_nothing_is_asked_for_before_it_can_be_sent() -> None:
    """Pieces are taken from the queue as the other end reads."""

    async def story() -> None:
        asked = 0

        def pieces() -> Iterator[bytes]:
            nonlocal asked
            for _ in range(64):
                asked += 1
                yield bytes(MIB)

        ours, theirs = socket.socketpair()
        speaking = link_on(ours)
        speaking.write(pieces())
        speaking.close(flowing_s=20.0)
        assert asked < 32
        reader, writer = await asyncio.open_connection(sock=theirs)
        assert len(await reader.read()) == 64 * MIB
        assert asked == 64
        writer.close()
        await speaking.ended

    go(story())


def test_what_nobody_wants_is_thrown_away() -> None:
    """It is still read, so that the other end can finish."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        listening, speaking = link_on(ours), link_on(theirs)
        speaking.write(bytes(MIB) for _ in range(16))
        speaking.close()
        await listening.ended
        await speaking.ended

    go(story())


@pytest.mark.parametrize("at", ["buffer", "filled"])
def test_what_is_raised_is_told_to_the_loop(at: str) -> None:
    """Exceptions go to the loop's exception handler."""

    async def story() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        ours, theirs = socket.socketpair()

        def fail(*_: object) -> None:
            raise ZeroDivisionError(at)

        usual: dict[str, Any] = {"buffer": lambda _: memoryview(bytearray(8)), at: fail}
        failing = link_on(ours, **usual)
        theirs.send(b"x")
        await until(lambda: bool(told))
        failing.abort()
        await failing.ended
        assert str(told[0]["exception"]) == at
        theirs.close()

    go(story())


def test_an_end_is_told_once_and_later() -> None:
    """`lost` is called once, after the call that ended the link has returned."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard(ours)
        for _ in range(2):
            heard.link.abort()
            heard.link.close()
        heard.link.write([b"too late"])
        assert heard.reasons == []
        await heard.link.ended
        assert heard.reasons == ["aborted"]
        theirs.close()

    go(story())


def test_a_connection_that_is_reset() -> None:
    """The link ends with the kernel's reason."""

    async def story() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        heard = Heard(ours)
        heard.link.write([bytes(8)])
        await until(lambda: bool(theirs.recv(8, socket.MSG_PEEK)))
        theirs.close()  # with bytes unread
        await heard.link.ended
        assert "Connection reset" in heard.reasons[0]
        server.close()

    go(story())


# --- what befalls a message -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "arrives", "ends"),
    [
        (None, b"first SECOND third", False),
        (Fate.DUPLICATE, b"first SECOND SECOND third", False),
        (Fate.TRUNCATE, b"first SECthird", False),
        (Fate.REORDER, b"first thirdSECOND ", False),
        (Fate.DELAY, b"first SECOND third", False),
        (Fate.HALF_OPEN, b"first ", False),
        (Fate.CUT, b"first SEC", True),
        (Fate.KILL, b"first SEC", False),  # and the process dies, which is not the link's affair
    ],
)
def test_what_befalls_a_message(fate: Fate | None, arrives: bytes, ends: bool) -> None:
    """A fault in the second of three messages: what arrives, and whether the link ends."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard, speaking = Heard(theirs), link_on(ours)
        speaking.write([b"first "])
        speaking.write([b"SEC", b"OND "], Meddling(fate, seconds=0.01))
        speaking.write([b"third"])
        await until(lambda: len(heard.data) == len(arrives))
        assert heard.data == arrives
        assert speaking.ended.done() == ends
        speaking.abort()
        await heard.link.ended
        assert heard.data == arrives

    go(story())


def test_who_is_half_open_hears_nothing() -> None:
    """It does not even notice that the other end has closed."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard(ours)
        heard.link.write([b"x"], Meddling(Fate.HALF_OPEN))
        theirs.send(b"unheard")
        theirs.close()
        for _ in range(9):
            await asyncio.sleep(0)
        assert not heard.data
        assert not heard.link.ended.done()
        heard.link.abort()
        await heard.link.ended

    go(story())


def test_the_end_of_a_killed_process_is_heard() -> None:
    """Half of the message is sent; the link ends with the process."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard(ours)
        heard.link.write([b"SECOND"], Meddling(Fate.KILL))
        heard.link.write([b"third"])
        theirs.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"SEC"
        theirs.close()
        await asyncio.wait_for(heard.link.ended, 10)
        assert heard.reasons == ["closed by the other end"]

    go(story())


def test_more_pieces_than_a_kernel_takes_at_once() -> None:
    """Thousands of small messages in the queue cause no error."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        heard = Heard(theirs, room_bytes=2**12)
        speaking = link_on(ours)
        speaking.write([b"ab"] * 5_000)
        speaking.close()
        await heard.link.ended
        assert heard.data == b"ab" * 5_000

    go(story())


@pytest.mark.parametrize("refused", ["add_reader", "add_writer"])
def test_a_connection_that_the_kernel_does_not_watch(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link ends with the reason; its owner goes on."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no watch is left")

    async def story() -> None:
        ours, theirs = socket.socketpair()
        monkeypatch.setattr(asyncio.get_running_loop(), refused, full)
        heard = Heard(ours)
        heard.link.write(bytes(MIB) for _ in range(16))  # more than fits: it would wait
        await heard.link.ended
        assert heard.reasons == [f"[Errno {errno.ENOSPC}] no watch is left"]
        theirs.close()

    go(story())


def test_what_nobody_hears_is_read_in_turns() -> None:
    """Discarded bytes are read one piece a turn, so that others have theirs."""

    async def story() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        sent = theirs.send(bytes(MIB))
        link_on(ours)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left = len(ours.recv(2 * MIB))
        assert sent - left in (len(link._WASTE), 2 * len(link._WASTE))
        theirs.close()
        ours.close()

    go(story())


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
            sockets.secured(ends[0], listening, server_side=True, patience_s=10.0),
            sockets.secured(ends[1], calling, server_side=False, host=LOOPBACK, patience_s=10.0),
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
