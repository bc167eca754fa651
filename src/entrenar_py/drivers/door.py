"""The door of a coordinator, or of a worker of a mesh: takes connections up, and secures them.

What goes wrong with a connection ends that connection, and is noted; what goes wrong here is
raised.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from entrenar_py.drivers import tls
from entrenar_py.drivers.pending_connections import Attention, Places

TAKEN_UP_MAX = 16  # in one turn: a burst of strangers must not keep those who are there waiting
# The process, or the machine, has no more of what a connection needs.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
REST_S = 1.0  # until the next try then
# One connection is gone, or unwanted by a firewall, before it was taken up (accept(2)).
_OF_ONE = {
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNRESET", "EPROTO", "EPERM", "ENOPROTOOPT", "EOPNOTSUPP"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET", "ETIMEDOUT"),
    )
    if hasattr(errno, name)
}
GRACES = 40  # in the time for a proof; over TLS half as many, for its handshake
LOOKS = 10  # in a grace
NOTED_MAX = 64
STRANGERS_MAX = 256
SHARE_OF_FILES = 4
NO_PLACE = "no place for one more"


@dataclass(slots=True, eq=False)
class Visit:
    """One connection that came in from `host`. `end` ends it at once, for the reason given."""

    host: str
    end: Callable[[str], Any]
    has_proved: bool = False


class Door:
    """Takes up connections from `listeners`, which it owns, for as long as it is open.

    `opened` gets every socket that is ready to be used, and its visit. It sets the visit's `end`,
    and tells the door when the peer `proved` itself, was `sent_away`, and `left`. A connection has
    `patience_s` for the handshake that `context` wants, and as long again for its proof.

    There are `strangers_max` `Places` for those that have proved nothing, and for those that were
    sent away but are still there. While all are taken, others wait in the kernel. `num_ended`
    counts the connections that ended without a proof; `ended` are the last of them: from where, and
    why.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        opened: Callable[[socket.socket, Visit], None],
        *,
        strangers_max: int = STRANGERS_MAX,
        context: ssl.SSLContext | None,
        patience_s: float,
    ) -> None:
        self._listeners, self._opened = set(listeners), opened
        grace_s = patience_s / GRACES * (1 if context is None else 2)
        self._places: Places[Visit] = Places(_affordable(strangers_max), grace_s=grace_s)
        self._held: list[tuple[socket.socket, socket.socket, Visit]] = []  # who waits, and at which
        self._context, self._patience_s = context, patience_s
        self._securing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._look_s = grace_s / LOOKS
        self._attention = Attention(self._loop.time(), most_s=2 * self._look_s)
        self._looking: asyncio.TimerHandle | None = None
        self.num_ended = 0
        self.ended: deque[tuple[str, str]] = deque(maxlen=NOTED_MAX)
        for listener in listeners:
            self._await(listener)

    def close(self) -> None:
        """Nobody is taken up any more; who was not ready yet is turned away."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for _, sock, _ in self._held:
            sock.close()
        self._held.clear()
        for task in self._securing:
            task.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def proved(self, visit: Visit) -> None:
        """It may stay, and needs no place any more."""
        visit.has_proved = True
        self._places.release(visit)

    def sent_away(self, visit: Visit, reason: str) -> None:
        """It will soon be gone; until then it has a place."""
        if not visit.has_proved:
            self._note(visit.host, reason)
        self._places.linger(visit)

    def left(self, visit: Visit) -> None:
        """It is gone."""
        self._places.release(visit)

    def _note(self, host: str, reason: str) -> None:
        self.num_ended += 1
        self.ended.append((host, reason))

    # --- taking up --------------------------------------------------------------------------------

    def _await(self, listener: socket.socket) -> None:
        if listener not in self._listeners:  # closed while it rested
            return
        try:
            self._loop.add_reader(listener, self._take_up, listener)
        except OSError as error:
            self._rest(listener, error)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Tries again later, if `error` is one that passes; raises it if not."""
        if error.errno not in _EXHAUSTED:
            raise error
        self._loop.remove_reader(listener)
        self._loop.call_later(REST_S, self._await, listener)

    def _take_up(self, listener: socket.socket) -> None:
        for _ in range(TAKEN_UP_MAX):
            try:
                # Only here the address is sure to be told: who has reset its connection has none.
                sock, place = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OF_ONE:
                    self._note("an unknown address", str(error))
                    continue
                self._rest(listener, error)
                return
            sock.setblocking(False)
            visit = Visit(place[0] if place else "", lambda reason: None)
            if not self._meet(sock, visit):
                self._loop.remove_reader(listener)
                self._held.append((listener, sock, visit))
                return

    def _meet(self, sock: socket.socket, visit: Visit) -> bool:
        """Has a connection prove itself; False if there is no place for it yet."""
        goes = self._places.enter(visit, visit.host, self._seconds())
        if goes is visit:
            return False
        if goes is not None:
            goes.end(NO_PLACE)
        if self._context is None:
            self._opened(sock, visit)
            return True
        task = self._loop.create_task(self._secure(sock, visit, self._context))
        visit.end = task.cancel
        self._securing.add(task)
        task.add_done_callback(partial(self._secured, sock, visit))
        return True

    async def _secure(self, sock: socket.socket, visit: Visit, context: ssl.SSLContext) -> None:
        try:
            ready = await tls.secured(sock, context, server_side=True, patience_s=self._patience_s)
        except OSError as error:
            self._places.release(visit)
            self._note(visit.host, f"TLS: {str(error) or 'no handshake in time'}")
            return
        self._opened(ready, visit)

    def _secured(self, sock: socket.socket, visit: Visit, task: asyncio.Task[None]) -> None:
        self._securing.discard(task)
        sock.close()  # of a task cancelled before it began; else there is nothing left in it
        if task.cancelled():
            self._places.release(visit)
            self._note(visit.host, f"TLS: {NO_PLACE if self._listeners else 'the run is over'}")
        else:
            task.result()  # what `opened` raises goes where it goes without TLS, too

    # --- time -------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """The time by which guests have to make room: while anybody is here it passes in looks,
        one after whatever the connections had to say.
        """
        if self._looking is None:
            self._attention.look(self._loop.time())
            self._looking = self._loop.call_later(self._look_s, self._look)
        return self._attention.seconds

    def _look(self) -> None:
        self._looking = None
        self._attention.look(self._loop.time())
        held, self._held = self._held, []
        for listener, sock, visit in held:
            if self._meet(sock, visit):
                self._await(listener)
            else:
                self._held.append((listener, sock, visit))
        if self._looking is None and self._listeners and (self._held or len(self._places)):
            self._looking = self._loop.call_later(self._look_s, self._look)


def _affordable(strangers_max: int) -> int:
    """As many strangers as leave most of the files that a process may open to the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return strangers_max if unlimited else max(1, min(strangers_max, soft // SHARE_OF_FILES))
