"""What a machine wants done. A driver does it, in order, and tells the machine what came of it.

`Peer` is the driver's own name for a connection; a machine only compares and hands it back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from entrenar_py.protocol.messages import Message, NonFinite

Peer: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing to do."""


# --- both -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send(Effect):
    """Send `message` to `peer`, with the payload that its kind carries."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Secure(Effect):
    """From now on all frames of `peer` are keyed with `key`, those sent and those read."""

    peer: Peer
    key: bytes


@dataclass(frozen=True, slots=True)
class Close(Effect):
    """End the connection once everything before was sent; `reason` is for the log."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """It is over: `completed`, `halted`, `failed`, or `stopped` by who started it."""

    status: str
    reason: str = ""


# --- coordinator ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keep(Effect):
    """The message just received from `rank` is in order: its payload counts."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Joined(Effect):
    """`rank` takes part from `step` on; `late` if the run had begun without it."""

    rank: int
    step: int
    late: bool


@dataclass(frozen=True, slots=True)
class Left(Effect):
    """`rank` takes part no more, in the middle of `step`; what it had not delivered is void."""

    rank: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gather(Effect):
    """`step` is next: what was delivered of a step that did not happen is void."""

    step: int


@dataclass(frozen=True, slots=True)
class Reduce(Effect):
    """Every shard of `step` is there: add and average; then say `reduced` or `refused`."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply(Effect):
    """A worker made `step`: make it here, too."""

    step: int


@dataclass(frozen=True, slots=True)
class Save(Effect):
    """Write a checkpoint of the state before `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Stop(Effect):
    """Nobody makes `step`: a value of worker `rank` was not finite, as `said`."""

    step: int
    rank: int | None
    reason: str
    said: NonFinite | None = None


# --- worker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load(Effect):
    """Take over the state in the message just received: it is `rank`'s before `step`."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Compute(Effect):
    """Compute `shards` of `step`, beside everything else; then say `computed`, with this effect.

    `ticket` is another for each, so that what was begun in an earlier stay is told from this one.
    """

    ticket: int
    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold(Effect):
    """Keep the average in the message just received for `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Make(Effect):
    """Make `step` with the average held."""

    step: int
