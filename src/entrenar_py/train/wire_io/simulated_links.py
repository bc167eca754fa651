"""The links of simulated processes: how long bytes take, and when they can't pass.

Every process has one link to the network, on which its messages wait for each other, as on the
cable of a machine. Messages are sent whole, in the order in which they were given to the link. Real
connections share a link evenly: their last byte arrives at the same time, but the first ones
earlier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LATENCY_S = (0.0001, 0.002)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The speed of all links, which is the same in both directions.

    A message needs a random time from `latency_s` to the other process. In addition, both processes
    need `message_s` for it, and their links transfer `bytes_s` bytes a second.
    """

    latency_s: tuple[float, float] = LATENCY_S
    bytes_s: float = math.inf
    message_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return how long a message of `num_bytes` occupies a link; the end of a stream is free."""
        return self.message_s + num_bytes / self.bytes_s if num_bytes else 0.0


@dataclass(slots=True)
class Lane:
    """One direction of a process's link.

    It is busy until `free_at`. Nothing passes until `blocked_until`: then the bytes that were sent
    meanwhile pass, as TCP sends them again.
    """

    free_at: float = 0.0
    blocked_until: float = 0.0
    messages: int = 0
    bytes: int = 0

    def occupy(self, now: float, num_bytes: int, seconds: float) -> float:
        """Return when a message of `num_bytes` begins to pass; it occupies the lane `seconds`."""
        begins = max(now, self.free_at, self.blocked_until)
        self.free_at = begins + seconds
        self.messages += num_bytes > 0
        self.bytes += num_bytes
        return begins


@dataclass(slots=True)
class Card:
    """The link of one process: the lane out of it, and the lane into it."""

    out: Lane = field(default_factory=Lane)
    into: Lane = field(default_factory=Lane)

    def block(self, *, out: bool, until: float) -> None:
        """Let nothing pass in one direction before `until`."""
        lane = self.out if out else self.into
        lane.blocked_until = max(lane.blocked_until, until)

    @property
    def blocked_until(self) -> float:
        """The time from which on both directions pass; before that no connection is made."""
        return max(self.out.blocked_until, self.into.blocked_until)
