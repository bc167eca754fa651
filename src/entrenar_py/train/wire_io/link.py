"""One connection on a non-blocking socket. It copies no bytes outside the kernel.

Threads do large transfers, one in each direction, so that receiving, sending and computing overlap.
OpenSSL allows one thread at a time on a connection, so over TLS the threads take turns, one
TLS record at a time.
"""

from __future__ import annotations

import asyncio
import random
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain

from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire_io.injections import Fate, Meddling, bent
from entrenar_py.train.wire_io.processes import Task

FAREWELL_S = 2.0  # how long the last messages may take
# The bytes that one connection may read or write before other connections have their turn.
TURN_BYTES = 2**22
# Small messages are sent together, up to this size. A chunk is sent as soon as it is taken from the
# queue, so that it is on its way while the next one's checksum is computed.
GATHERED_BYTES = 2**16
PIECES_MAX = 2**9  # a kernel takes 2**10 in one call, and returns an error for more
# From this size on, a thread moves the bytes; waking it and getting its result takes about 0.1 ms.
BULK_BYTES = 2**20
PATIENCE_MS = 2  # how long a thread waits for the socket before the loop waits instead

# TLS may have to read before it can write, and to write before it can read.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_WASTE = memoryview(bytearray(2**16))  # for received bytes that are discarded


class Link:
    """The owner of `sock` until the connection ends; `sock` is non-blocking, plain or TLS.

    Bytes are received into the memory that `buffer` returns, then `filled` is called; if `buffer`
    returns None, the bytes are discarded. `lost` is called once with the reason why the connection
    ended, and never before the call that ended it has returned. Exceptions of these functions go to
    the loop's exception handler.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        buffer: Callable[[Link], memoryview | None],
        filled: Callable[[Link, int], None],
        lost: Callable[[Link, str], None],
    ) -> None:
        self._buffer, self._filled, self._lost = buffer, filled, lost
        self._socket: socket.socket | None = sock
        self._fd = sock.fileno()  # given a socket object, the loop would make more system calls
        self._queue: deque[Iterator[Buffer]] = deque()
        self._pieces: deque[memoryview] = deque()  # taken from the queue but not yet sent
        self._held = b""  # a message that is to be sent after the next one
        self._num_sent = 0  # bytes
        self._paused = self._closing = False
        self._mute = self._deaf = False  # nothing more is written; nothing more is read
        self._awaits_reading = self._awaits_writing = False
        self._turn = threading.Lock() if isinstance(sock, ssl.SSLSocket) else nullcontext()
        self._threads = ThreadPoolExecutor(2)  # none is started before there is work for one
        self._filling: Task[tuple[int, str | None]] | None = None
        self._sending: Task[tuple[bool, str | None]] | None = None
        self._farewell: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._await_reading(True)

    def write(self, buffers: Iterable[Buffer], befalls: Meddling | None = None) -> None:
        """Queue `buffers` for sending, in order.

        Each buffer is taken when it can be sent. It is not copied, so it must not change until the
        other end has received it. `befalls` is a fault to inject into the bytes or the connection;
        a fault of the process is left to the driver.
        """
        if self._socket is None:
            return
        if befalls is None and not self._held:
            self._queue.append(iter(buffers))
        else:
            self._bend(buffers, befalls or Meddling(None))
        self._pump()

    def close(self, *, patience_s: float = FAREWELL_S, flowing_s: float = 0.0) -> None:
        """Send the queue, for at most `patience_s`, then close.

        While the other end takes bytes, the queue is sent for at most `flowing_s`, if that is more.
        The connection ends when the other end has closed it, too, or after FAREWELL_S. Nothing more
        is written to memory that `buffer` returned.
        """
        self._closing = True
        if self._filling is not None:
            self._filling.stop()
            self._filling = None
            self._await_reading(not self._deaf)
        if self._socket is not None and self._farewell is None:
            until_s = self._loop.time() + flowing_s
            self._farewell = self._loop.call_later(
                patience_s, self._end_farewell, self._num_sent, until_s
            )
        self._pump()

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the received bytes, up to TURN_BYTES."""
        left = TURN_BYTES
        while left > 0 and self._socket is not None and not self._deaf:
            place = self._buffer(self)
            if place is not None and place.nbytes >= BULK_BYTES:
                self._await_reading(False)
                self._fill(self._socket, place)
                return
            try:
                with self._turn:
                    num_bytes = self._socket.recv_into(_WASTE if place is None else place)
            except _NOT_NOW:
                break
            except OSError as error:
                self.abort(str(error))
                return
            if num_bytes == 0:
                self.abort("closed by the other end")
                return
            if place is None:
                break  # one piece per turn is enough for bytes that are discarded
            self._filled(self, num_bytes)
            left -= num_bytes
        if self._is_pending():
            self._loop.call_soon(self._read)
        self._await_reading(not self._deaf)

    def _is_pending(self) -> bool:
        """Return whether decrypted bytes wait in OpenSSL, where the kernel does not see them."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return False
        with self._turn:
            return self._socket.pending() > 0

    def _fill(self, sock: socket.socket, place: memoryview) -> None:

        def work(task: Task[tuple[int, str | None]]) -> tuple[int, str | None]:
            filled = 0
            try:
                while filled < place.nbytes and not task.stopped:
                    try:
                        with self._turn:
                            num_bytes = sock.recv_into(place[filled:])
                    except _NOT_NOW:
                        if not _is_ready(sock, select.POLLIN):
                            break
                        continue
                    if num_bytes == 0:
                        return filled, "closed by the other end"
                    filled += num_bytes
            except OSError as error:
                return filled, str(error)
            return filled, None

        def done(came: tuple[int, str | None]) -> None:
            self._filling = None
            num_bytes, problem = came
            try:
                if num_bytes and not self._deaf:
                    self._filled(self, num_bytes)
            finally:
                if problem is not None:
                    self.abort(problem)
                elif num_bytes:
                    self._read()
                else:  # the loop waits for more, which may take long
                    self._await_reading(not self._deaf)

        self._filling = Task(self._threads, work, done)

    def _await_reading(self, wanted: bool) -> None:
        if self._socket is None or wanted == self._awaits_reading:
            return
        self._awaits_reading = wanted
        if not wanted:
            self._loop.remove_reader(self._fd)
            return
        try:
            self._loop.add_reader(self._fd, self._read)
        except OSError as error:  # the kernel can't watch one more
            self.abort(str(error))

    # --- writing ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send queued bytes, up to TURN_BYTES or until the socket takes no more."""
        left = TURN_BYTES
        if self._sending is not None:
            return  # the thread's end calls this again
        while left > 0 and self._socket is not None and not self._paused and self._gather():
            if self._pieces[-1].nbytes >= BULK_BYTES:
                self._await_writing(False)
                self._send_beside(self._socket)
                return
            try:
                num_bytes = self._send(self._socket)
            except _NOT_NOW:
                break
            except OSError as error:
                self.abort(str(error))
                return
            self._drop(num_bytes)
            left -= num_bytes
        self._await_writing(not self._paused and bool(self._pieces or self._queue))
        self._say_farewell()

    def _send_beside(self, sock: socket.socket) -> None:
        """In a thread, send the queue, including later additions."""

        def work(task: Task[tuple[bool, str | None]]) -> tuple[bool, str | None]:
            stalled = True
            try:
                while not task.stopped and self._gather():
                    try:
                        self._drop(self._send(sock))
                        stalled = False
                    except _NOT_NOW:
                        if not _is_ready(sock, select.POLLOUT):
                            return stalled, None
            except OSError as error:
                return stalled, str(error)
            return False, None

        def done(outcome: tuple[bool, str | None]) -> None:
            self._sending = None
            stalled, problem = outcome
            if problem is not None:
                self.abort(problem)
            elif stalled:  # the loop waits until more can be sent, which may take long
                self._await_writing(True)
            else:
                self._pump()

        self._sending = Task(self._threads, work, done)

    def _gather(self) -> bool:
        """Take as many pieces from the queue as one call may send; return whether there are any.

        Empty pieces are left out: sending one would make no progress.
        """
        waiting = sum(piece.nbytes for piece in self._pieces)
        while self._queue and waiting < GATHERED_BYTES and len(self._pieces) < PIECES_MAX:
            piece = next(self._queue[0], None)
            if piece is None:
                self._queue.popleft()
            elif not self._mute and memoryview(piece).nbytes:
                self._pieces.append(memoryview(piece).cast("B"))
                waiting += self._pieces[-1].nbytes
        return bool(self._pieces)

    def _send(self, sock: socket.socket) -> int:
        if isinstance(sock, ssl.SSLSocket):
            with self._turn:
                return sock.send(self._pieces[0])  # TLS sockets have no `sendmsg`
        return sock.sendmsg(self._pieces)

    def _drop(self, num_bytes: int) -> None:
        self._num_sent += num_bytes
        while num_bytes and num_bytes >= self._pieces[0].nbytes:
            num_bytes -= self._pieces.popleft().nbytes
        if num_bytes:
            self._pieces[0] = self._pieces[0][num_bytes:]

    def _await_writing(self, wanted: bool) -> None:
        if self._socket is None or wanted == self._awaits_writing:
            return
        self._awaits_writing = wanted
        if not wanted:
            self._loop.remove_writer(self._fd)
            return
        try:
            self._loop.add_writer(self._fd, self._pump)
        except OSError as error:
            self.abort(str(error))

    def _say_farewell(self) -> None:
        """Shut the socket down for writing if it is to close and everything is sent.

        The socket isn't closed at once: if it had unread bytes, that would reset the connection,
        and the last messages could be lost. The other end closes when it has read them. TLS's
        closing alert is left out, because it needs an answer and adds nothing to the last messages.
        """
        if self._socket is not None and self._closing and not (self._queue or self._pieces):
            self._closing = False
            if self._farewell is not None:
                self._farewell.cancel()
            self._farewell = self._loop.call_later(FAREWELL_S, self.abort, "closed")
            try:
                socket.socket.shutdown(self._socket, socket.SHUT_WR)
            except OSError as error:
                self.abort(str(error))

    def _end_farewell(self, num_sent: int, until_s: float) -> None:
        """Give the queue up, unless bytes were sent since there were `num_sent`."""
        if self._num_sent == num_sent or self._loop.time() >= until_s:
            self.abort("closed")
            return
        self._farewell = self._loop.call_later(
            FAREWELL_S, self._end_farewell, self._num_sent, until_s
        )

    # --- the end, and faults ----------------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """Close the socket at once; `lost` is called soon after."""
        if self._socket is None:
            return
        self._await_reading(False)
        self._await_writing(False)
        sock, self._socket = self._socket, None
        for task in (self._filling, self._sending):
            if task is not None:
                task.stop()
        self._threads.shutdown()
        sock.close()
        self._queue.clear()
        self._pieces.clear()
        if self._farewell is not None:
            self._farewell.cancel()
        self._loop.call_soon(self._tell, reason)

    def _tell(self, reason: str) -> None:
        if not self.ended.done():  # done if a task that awaited it was cancelled
            self.ended.set_result(None)  # waiters resume after this call, even if `lost` raises
        self._lost(self, reason)

    def _bend(self, buffers: Iterable[Buffer], befalls: Meddling) -> None:
        if self._sending is not None:
            self._sending.stop()
            self._sending = None
        # Frames are numbered when they are taken, so take the queued ones first.
        self._queue = deque([iter(list(chain.from_iterable(self._queue)))])
        data = b"".join(buffers)
        half = data[: len(data) // 2]
        match befalls.fate:
            case Fate.REORDER:
                self._held += data
                return
            case Fate.HALF_OPEN:
                self._mute = self._deaf = True
                self._await_reading(False)
            case Fate.CUT | Fate.KILL:
                self._queue.append(iter([half]))
                self._pump()
                self._mute = True  # a killed process closes the connection when it ends
                if befalls.fate is Fate.CUT:
                    self.abort()
                return
            case Fate.DELAY:
                self._paused = True
                self._loop.call_later(befalls.seconds, self._resume)
        self._queue.append(iter([bent(befalls, data, random.Random(len(data))) + self._held]))
        self._held = b""

    def _resume(self) -> None:
        self._paused = False
        self._pump()


def _is_ready(sock: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(PATIENCE_MS))
