"""The door of a coordinator: takes up connections for as long as it is open."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

TAKEN_UP_MAX = 64  # in one turn: a burst of strangers must not keep those who are there waiting
# The process, or the machine, has no more of what a connection needs.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REST_S = 1.0  # until the next try then


class Door:
    """Owns `listeners`. `opened` gets every connection, a socket that does not block."""

    def __init__(
        self, listeners: Sequence[socket.socket], opened: Callable[[socket.socket], None]
    ) -> None:
        self._listeners, self._opened = set(listeners), opened
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            self._await(listener)

    def close(self) -> None:
        """Nobody is taken up any more; who connected and was not is turned away."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

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
            self._opened(sock)
