"""The door of a coordinator: takes up connections for as long as it is open, secures them where
that is wanted, and turns away those that are too many.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from entrenar_py.drivers import tls

TAKEN_UP_MAX = 64  # in one turn: a burst of strangers must not keep those who are there waiting
# The process, or the machine, has no more of what a connection needs.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REST_S = 1.0  # until the next try then


class Door:
    """Owns `listeners`. `opened` gets every connection that is ready to be used, a socket that does
    not block. Before that a connection has `patience_s` for the handshake that `context` wants.

    `has_room` says whether there may be one more besides so many that are in their handshake; who
    comes when there is none is turned away without a word.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        opened: Callable[[socket.socket], None],
        *,
        has_room: Callable[[int], bool],
        context: ssl.SSLContext | None,
        patience_s: float,
    ) -> None:
        self._listeners, self._opened, self._has_room = set(listeners), opened, has_room
        self._context, self._patience_s = context, patience_s
        self._securing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            self._await(listener)

    def close(self) -> None:
        """Nobody is taken up any more; who was not ready yet is turned away."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._securing:
            task.cancel()

    def _await(self, listener: socket.socket) -> None:
        if listener in self._listeners:  # not closed while it rested
            self._loop.add_reader(listener, self._take_up, listener)

    def _take_up(self, listener: socket.socket) -> None:
        for _ in range(TAKEN_UP_MAX):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._loop.remove_reader(listener)
                self._loop.call_later(REST_S, self._await, listener)
                return
            sock.setblocking(False)
            if not self._has_room(len(self._securing)):
                sock.close()
            elif self._context is None:
                self._opened(sock)
            else:
                task = self._loop.create_task(self._secure(sock, self._context))
                self._securing.add(task)
                task.add_done_callback(partial(self._secured, sock))

    async def _secure(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Lets in who passes the handshake; who does not is no one's business."""
        try:
            ready = await tls.secured(sock, context, server_side=True, patience_s=self._patience_s)
        except OSError:
            return
        self._opened(ready)

    def _secured(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._securing.discard(task)
        sock.close()  # of a task cancelled before it began; else there is nothing left in it
        if not task.cancelled():
            task.result()  # what `opened` raises goes where it goes without TLS, too
