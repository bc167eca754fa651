"""One connection, on a socket that never blocks: no byte is copied on this side of the kernel.

Many bytes are moved by threads, one in each direction: so a tensor comes, another one goes, and
something is computed, all at the same time. OpenSSL allows one thread at a time on a connection:
over TLS they take turns, a record each.
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

from entrenar_py.drivers.background_thread import Task
from entrenar_py.drivers.message_faults import Fate, Meddling, bent
from entrenar_py.protocol.frames import Buffer

FAREWELL_S = 2.0  # how long the last messages may take
# What one connection may read or write before the others have their turn.
TURN_BYTES = 2**22
# Small messages that wait together are sent together; a chunk goes as soon as it is asked for, so
# that it is on its way while the next one's checksum is computed.
GATHERED_BYTES = 2**16
PIECES_MAX = 2**9  # a kernel takes 2**10 at once, and says that the message is too long if not
# From so many on they are moved by a thread: it takes some 0.1 ms to wake it, and to hear of it.
BULK_BYTES = 2**20
PATIENCE_MS = 2  # how long a thread waits for the socket before it leaves that to the loop

# TLS has words of its own: it may have to read before it can write, and the other way round.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_WASTE = memoryview(bytearray(2**16))  # for what comes when nobody listens any more


class Link:
    """Owns `sock`, connected and not blocking, plain or TLS, from now to its end.

    What comes is read into `buffer`, then told to `filled`; where `buffer` gives None it is thrown
    away. `lost` is told once why the connection ended, never before the call that ended it has
    returned. What they raise goes to the loop's exception handler.
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
        self._fd = sock.fileno()  # a loop given the socket itself has the kernel describe it
        self._queue: deque[Iterator[Buffer]] = deque()
        self._pieces: deque[memoryview] = deque()  # asked for, and not yet sent
        self._held = b""  # of a message that is to come after the next one
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
        """Queues `buffers`, in order. Each is asked for when it can be sent, and is not copied: it
        must stay as it is until the other end has it.

        `befalls` is what happens to them on purpose: to the bytes or the connection, not to the
        process, which is its driver's affair.
        """
        if self._socket is None:
            return
        if befalls is None and not self._held:
            self._queue.append(iter(buffers))
        else:
            self._bend(buffers, befalls or Meddling(None))
        self._pump()

    def close(self) -> None:
        """Ends the connection once all is sent and heard; after FAREWELL_S in any case.

        Nothing is written any more to what `buffer` gave.
        """
        self._closing = True
        if self._filling is not None:
            self._filling.stop()
            self._filling = None
            self._await_reading(not self._deaf)
        self._pump()
        if self._socket is not None and self._farewell is None:
            self._farewell = self._loop.call_later(FAREWELL_S, self.abort, "closed")

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads what has come, or as much of it as is fair."""
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
                break  # one piece a turn: who says what nobody hears has no claim to more
            self._filled(self, num_bytes)
            left -= num_bytes
        if self._is_pending():
            self._loop.call_soon(self._read)
        self._await_reading(not self._deaf)

    def _is_pending(self) -> bool:
        """Return whether the rest of a decrypted record waits: the kernel knows nothing of it."""
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
                else:  # it may be long before more comes: no thread waits for that
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
        """Sends what is queued, or as much of it as is taken now and fair."""
        left = TURN_BYTES
        if self._sending is not None:
            return  # it comes here again when that is done
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
        """Sends what is queued in a thread, also what is queued meanwhile."""

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
            elif stalled:  # it may be long before more is taken: no thread waits for that
                self._await_writing(True)
            else:
                self._pump()

        self._sending = Task(self._threads, work, done)

    def _gather(self) -> bool:
        """Ask for as many pieces as are sent at once; return whether there are any.

        Empty ones are left out: sending one would never get anywhere.
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
        """Sends the first of the pieces; how many bytes were taken."""
        if isinstance(sock, ssl.SSLSocket):
            with self._turn:
                return sock.send(self._pieces[0])  # it can't gather
        return sock.sendmsg(self._pieces)

    def _drop(self, num_bytes: int) -> None:
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
        """Says that nothing more will come, if the last is sent.

        Not closed at once: with bytes unread that would reset the connection, and what was said
        last could be lost. The other end closes when it has read it. TLS has a farewell of its own,
        which needs an answer; the messages before it say all that it could say.
        """
        if self._socket is not None and self._closing and not (self._queue or self._pieces):
            self._closing = False
            try:
                socket.socket.shutdown(self._socket, socket.SHUT_WR)
            except OSError as error:
                self.abort(str(error))

    # --- the end, and what befalls ----------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """Ends the connection at once: closes the socket, and tells so soon."""
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
        if not self.ended.done():  # as it is when who waited was cancelled
            self.ended.set_result(None)  # who waits goes on after this call, even if `lost` raises
        self._lost(self, reason)

    def _bend(self, buffers: Iterable[Buffer], befalls: Meddling) -> None:
        if self._sending is not None:
            self._sending.stop()
            self._sending = None
        # Frames are numbered as they are asked for: those before have their turn.
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
                self._mute = True  # and hears when the process that is killed is gone
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
    """Return whether `sock` is ready within PATIENCE_MS."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(PATIENCE_MS))
