"""Places for connections that have proved nothing yet: how many there are, and which of them is
closed when one more comes.

A connection that proves itself frees its place. So whoever takes all places can only delay others,
and the delay is bounded: no place is kept for long while a connection waits for it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class Places(Generic[Guest]):
    """Places for `most` connections, called guests. Times are seconds on a monotonic clock.

    If all places are taken when a new guest comes, the one that loses its place is

    1. the oldest that was told to go, and is still connected;
    2. else the oldest guest of the address with the most guests, counting the new one: at once if
       that address has more guests than the new one's, else only if that oldest guest has been here
       for `grace_s`, which is enough for a proof;
    3. else none: the new guest has to wait, for `grace_s` at most.

    So one address can't keep all places from the others. Among guests of one address each has
    `grace_s` for its proof, however many come after it.
    """

    def __init__(self, most: int, *, grace_s: float) -> None:
        assert most > 0, "there must be a place"
        self.most, self.grace_s = most, grace_s
        self._waiting: dict[str, dict[Guest, float]] = {}  # address -> when each came
        self._lingering: dict[Guest, None] = {}
        self._addresses: dict[Guest, str] = {}  # of the guests in `_waiting`

    def __len__(self) -> int:
        return len(self._addresses) + len(self._lingering)

    def enter(self, guest: Guest, host: str, now: float) -> Guest | None:
        """Give `guest`, from `host`, a place. Return the guest that has lost its place for that, or
        None; `guest` itself if it has to wait.
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
        """Free the place of `guest`, if it has one: it has disconnected or proved itself."""
        self._lingering.pop(guest, None)
        address = self._addresses.pop(guest, None)
        if address is not None:
            there = self._waiting[address]
            del there[guest]
            if not there:
                del self._waiting[address]

    def linger(self, guest: Guest) -> None:
        """Note that `guest` was told to go: it takes a place until it has disconnected."""
        self.release(guest)
        self._lingering[guest] = None

    def _first_to_go(self, address: str, now: float) -> Guest | None:
        """Return the guest that makes room for one from `address`; None if all have to wait."""
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
    """Return what counts as the address of `host`: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Attention:
    """A clock for graces. It counts at most `most_s` of a pause in which the process reads nothing.

    A proof that came in such a pause is still unread, so a guest's grace must not run out in it.
    """

    def __init__(self, now: float, *, most_s: float) -> None:
        self.seconds = 0.0
        self._most_s, self._last = most_s, now

    def look(self, now: float) -> float:
        """Note that this process reads now; return the seconds counted so far."""
        self.seconds += min(now - self._last, self._most_s)
        self._last = now
        return self.seconds
