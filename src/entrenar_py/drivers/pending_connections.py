"""Places for connections that have proved nothing yet: how many there are, and whose turn it is to
go when one more comes.

Who proves itself needs no place any more. So whoever fills them all can only delay the others, and
the delay is bounded: nobody keeps a place against those who wait for one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class Places(Generic[Guest]):
    """Room for `most` guests, shared out by address. Times are seconds that do not go back.

    When there is no room for one more, the first to go is

    1. the oldest of those that were told to go, and only linger;
    2. else the oldest of the address with the most guests, the new one counted in: at once if that
       address has more than the new guest's, else if it has been here for `grace_s`, which is time
       enough for a proof;
    3. else nobody: the new guest has to wait, for no longer than `grace_s`.

    So one address can't keep all places from the others; and among guests of one address none goes
    before it had its chance, however many come after it.
    """

    def __init__(self, most: int, *, grace_s: float) -> None:
        assert most > 0, "somebody has to get in"
        self.most, self.grace_s = most, grace_s
        self._waiting: dict[str, dict[Guest, float]] = {}  # by address; since when, oldest first
        self._lingering: dict[Guest, None] = {}
        self._addresses: dict[Guest, str] = {}  # of those who wait

    def __len__(self) -> int:
        return len(self._addresses) + len(self._lingering)

    def enter(self, guest: Guest, host: str, now: float) -> Guest | None:
        """Gives `guest`, from `host`, a place. Returns who has to go for that, and has none any
        more, if anyone; `guest` itself if it has to wait.
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
        """`guest` needs no place any more, if it had one: it is gone, or has proved itself."""
        self._lingering.pop(guest, None)
        address = self._addresses.pop(guest, None)
        if address is not None:
            there = self._waiting[address]
            del there[guest]
            if not there:
                del self._waiting[address]

    def linger(self, guest: Guest) -> None:
        """`guest`, with a place or without, was told to go: it takes one until it is gone."""
        self.release(guest)
        self._lingering[guest] = None

    def _first_to_go(self, address: str, now: float) -> Guest | None:
        """Return the guest that makes room for one from `address`; None if all have to wait."""
        if self._lingering:
            return next(iter(self._lingering))
        counts = {one: len(there) for one, there in self._waiting.items()}
        wanted = counts[address] = counts.get(address, 0) + 1
        most = max(counts.values())
        crowded = [one for one in self._waiting if counts[one] == most]
        oldest, since = min(
            (next(iter(self._waiting[one].items())) for one in crowded), key=lambda item: item[1]
        )
        return oldest if most > wanted or now - since >= self.grace_s else None


def shared_address(host: str) -> str:
    """Return what one end may be thought to hold: an IPv4 address, or a /64 of IPv6."""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Attention:
    """Counts the seconds in which somebody listened: of a longer pause no more than `most_s`.

    What came in a pause was not heard in it, so a guest's grace does not pass either.
    """

    def __init__(self, now: float, *, most_s: float) -> None:
        self.seconds = 0.0
        self._most_s, self._last = most_s, now

    def look(self, now: float) -> float:
        """Listens again: the seconds so far."""
        self.seconds += min(now - self._last, self._most_s)
        self._last = now
        return self.seconds
