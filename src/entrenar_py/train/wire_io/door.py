"""The acceptance of connections for a coordinator or a mesh worker, with the TLS handshake.

An error of one connection ends that connection and is logged. Any other error is raised.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from entrenar_py.train.wire_io import sockets

# Places for connections that have proved nothing yet: how many places exist, and which connection
# is closed when one more arrives.
#
# A connection that proves itself frees its place. An attacker that takes all places can therefore
# only delay others, and the delay is bounded: nobody keeps a place for long while a connection
# waits for it.

Guest = TypeVar("Guest", bound=Hashable)


class Places(Generic[Guest]):
    """Places for `most` connections, called guests. Times are seconds on a monotonic clock.

    If all places are taken when a new guest arrives, a guest loses its place as follows:

    1. The oldest guest that was told to go and is still connected.
    2. Otherwise the oldest guest of the address with the most guests, the new guest included. It
       goes at once if that address has more guests than the new guest's address, and otherwise only
       if it has been here for `grace_s`, which is long enough for a proof.
    3. Otherwise no guest: the new guest has to wait, for at most `grace_s`.

    So one address can't keep all places from other addresses. Each guest of an address has
    `grace_s` for its proof, however many guests arrive after it.
    """

    def __init__(self, most: int, *, grace_s: float) -> None:
        assert most > 0, "there must be a place"
        self.most, self.grace_s = most, grace_s
        self._waiting: dict[str, dict[Guest, float]] = {}  # address -> arrival of each guest
        self._lingering: dict[Guest, None] = {}
        self._addresses: dict[Guest, str] = {}  # of the guests in `_waiting`

    def __len__(self) -> int:
        return len(self._addresses) + len(self._lingering)

    def enter(self, guest: Guest, host: str, now: float) -> Guest | None:
        """Give `guest`, which comes from `host`, a place.

        Returns the guest that loses its place for it, None if no guest does, or `guest` itself if
        it has to wait.
        """
        address = shared_address(host)
        goes = None if len(self) < self.most else self._first_to_go(address, now)
        if goes is None and len(self) >= self.most:
            return guest
        if goes is not None:
            self.release(goes)
        self._addresses[guest] = address
        self._waiting.setdefault(address, {})[guest] = now
        return goes

    def release(self, guest: Guest) -> None:
        """Free the place of `guest`, if it has one, because it disconnected or proved itself."""
        self._lingering.pop(guest, None)
        address = self._addresses.pop(guest, None)
        if address is not None:
            there = self._waiting[address]
            del there[guest]
            if not there:
                del self._waiting[address]

    def linger(self, guest: Guest) -> None:
        """Note that `guest` was told to go; it takes a place until it has disconnected."""
        self.release(guest)
        self._lingering[guest] = None

    def _first_to_go(self, address: str, now: float) -> Guest | None:
        """Return the guest that makes room for one from `address`; None if that one has to wait."""
        if self._lingering:
            return next(iter(self._lingering))
        counts = {host: len(there) for host, there in self._waiting.items()}
        wanted = counts[address] = counts.get(address, 0) + 1
        most = max(counts.values())
        crowded = [host for host in self._waiting if counts[host] == most]
        oldest, since = min(
            (next(iter(self._waiting[host].items())) for host in crowded), key=lambda item: item[1]
        )
        return oldest if most > wanted or now - since >= self.grace_s else None


def shared_address(host: str) -> str:
    """Return the address by which `host` is counted: all of IPv4, the /64 prefix of IPv6."""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Attention:
    """A clock that measures `grace_s`, and counts only `most_s` of a longer pause in reading.

    A proof that arrives in such a pause is still unread, so a guest's grace must not expire in it.
    """

    def __init__(self, now: float, *, most_s: float) -> None:
        self.seconds = 0.0
        self._most_s, self._last = most_s, now

    def look(self, now: float) -> float:
        """Return the seconds counted so far, and note that this process reads now."""
        self.seconds += min(now - self._last, self._most_s)
        self._last = now
        return self.seconds


TAKEN_UP_MAX = 16  # in one turn of the loop: a burst of unknown clients must not delay the workers
# The process, or the machine, has run out of files or memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
REST_S = 1.0  # from that error to the next attempt
# Errors of accept(2) about a single connection, which is lost or forbidden by a firewall.
_OF_ONE = {
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNRESET", "EPROTO", "EPERM", "ENOPROTOOPT", "EOPNOTSUPP"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET", "ETIMEDOUT"),
    )
    if hasattr(errno, name)
}
GRACES = 40  # graces of `Places` in a `patience_s`; over TLS half as many, for the handshake
LOOKS = 10  # at the clock, in each grace
NOTED_MAX = 64
STRANGERS_MAX = 256
SHARE_OF_FILES = 4
NO_PLACE = "no place for one more"


@dataclass(slots=True, eq=False)
class Visit:
    """One accepted connection from `host`. `end` closes it at once, with a reason."""

    host: str
    end: Callable[[str], Any]
    has_proved: bool = False


class Door:
    """Accepts connections from `listeners`, which it owns, until it is closed.

    `opened` is called with every socket that is ready for use, and with its visit. The callee sets
    the visit's `end`, and calls the methods `proved`, `sent_away` and `left` when these things
    happen. `patience_s` limits the TLS handshake if a `context` is given.

    Connections without a proof, and connections that were sent away but are not closed yet, take
    one of `strangers_max` `Places`. While no place is free, further connections wait in the kernel.
    `num_ended` counts the connections that ended without a proof; `ended` has host and reason of
    the last ones.
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
        self._held: list[
            tuple[socket.socket, socket.socket, Visit]
        ] = []  # (listener, socket, visit)
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
        """Stop accepting, and close the connections that wait or are in the handshake."""
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
        """Note that the peer proved itself; it no longer needs a place."""
        visit.has_proved = True
        self._places.release(visit)

    def sent_away(self, visit: Visit, reason: str) -> None:
        """Note that the connection is being closed; it takes a place until `left` is called."""
        if not visit.has_proved:
            self._note(visit.host, reason)
        self._places.linger(visit)

    def left(self, visit: Visit) -> None:
        """Note that the connection is closed."""
        self._places.release(visit)

    def _note(self, host: str, reason: str) -> None:
        self.num_ended += 1
        self.ended.append((host, reason))

    # --- accepting --------------------------------------------------------------------------------

    def _await(self, listener: socket.socket) -> None:
        if listener not in self._listeners:  # closed while it paused
            return
        try:
            self._loop.add_reader(listener, self._take_up, listener)
        except OSError as error:
            self._rest(listener, error)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Try again later if `error` may pass; else raise it."""
        if error.errno not in _EXHAUSTED:
            raise error
        self._loop.remove_reader(listener)
        self._loop.call_later(REST_S, self._await, listener)

    def _take_up(self, listener: socket.socket) -> None:
        for _ in range(TAKEN_UP_MAX):
            try:
                # Only `accept` reliably returns the address: a connection that was reset later has
                # none.
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
        """Let a connection prove itself; return False if there is no place for it yet."""
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
            ready = await sockets.secured(
                sock, context, server_side=True, patience_s=self._patience_s
            )
        except OSError as error:
            self._places.release(visit)
            self._note(visit.host, f"TLS: {str(error) or 'no handshake in time'}")
            return
        self._opened(ready, visit)

    def _secured(self, sock: socket.socket, visit: Visit, task: asyncio.Task[None]) -> None:
        self._securing.discard(task)
        sock.close()  # still open only if the task was cancelled before it began
        if task.cancelled():
            self._places.release(visit)
            self._note(visit.host, f"TLS: {NO_PLACE if self._listeners else 'the run is over'}")
        else:
            task.result()  # raises what `opened` raised, for the loop's exception handler

    # --- time -------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Return the time of the clock for `grace_s`.

        While any connection lacks its proof, only the timer `_look` advances this clock. It runs
        after the loop has read the received bytes.
        """
        if self._looking is None:
            self._attention.look(self._loop.time())
            self._looking = self._loop.call_later(self._look_s, self._look)
        return self._attention.seconds

    def _look(self) -> None:
        self._looking = None
        self._attention.look(self._loop.time())
        waiting, self._held = self._held, []
        for listener, sock, visit in waiting:
            if self._meet(sock, visit):
                self._await(listener)
            else:
                self._held.append((listener, sock, visit))
        if self._looking is None and self._listeners and (self._held or len(self._places)):
            self._looking = self._loop.call_later(self._look_s, self._look)


def _affordable(strangers_max: int) -> int:
    """Return `strangers_max`, limited to a quarter of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return strangers_max if unlimited else max(1, min(strangers_max, soft // SHARE_OF_FILES))
