"""The effects that a machine wants. A driver does them in order and tells what came of them.

`Peer` is the driver's own name for a connection; a machine only compares and hands it back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from entrenar_py.protocol.messages import Message, NonFinite, TreeNode

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


@dataclass(frozen=True, slots=True)
class Dial(Effect):
    """Connect to worker `rank` at `address` ("host:port"); then say `dialed`, or `undialable`."""

    rank: int
    address: str


# --- coordinator ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keep(Effect):
    """The message just received from `rank` is in order: its payload counts.

    What belongs to a delivery counts when that is whole (`Deliver`).
    """

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver(Effect):
    """Keep what `rank` began to deliver with its last Computed: it is whole, whichever dies."""

    rank: int


@dataclass(frozen=True, slots=True)
class Copy(Effect):
    """The message just received from `rank` is of its copy of an audited shard: keep it apart."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class EndCopy(Effect):
    """The copy of `shard` that `rank` began with its last Computed is whole."""

    rank: int
    shard: int


@dataclass(frozen=True, slots=True)
class Compare(Effect):
    """Nobody computes a copy of `shard` any more: say with `compared` which have the same bits."""

    step: int
    shard: int


@dataclass(frozen=True, slots=True)
class Conclude(Effect):
    """The audit of `shard` is over: the copy with the number `copy` counts, the others are void.

    Numbers are in the order in which copies became whole; `alike` is for each that of the first one
    with the same bits. `culprit` gave another; None where nobody did. Without a `copy` nobody can
    say which is right. `disputed` is who ever disagreed.
    """

    step: int
    shard: int
    alike: tuple[int, ...]
    copy: int | None = None
    culprit: int | None = None
    disputed: tuple[int, ...] = ()


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
    """`block` of every shard of `step` is there: add, average; then say `reduced` or `refused`."""

    step: int
    block: int


@dataclass(frozen=True, slots=True)
class Prepare(Effect):
    """All of `step` is averaged: make it beside the state in use; then say `prepared`."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply(Effect):
    """A worker made `step`: make it here, too, or use what was prepared."""

    step: int


@dataclass(frozen=True, slots=True)
class Save(Effect):
    """Write a checkpoint of the state before `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Stop(Effect):
    """Nobody makes `step`: a value of worker `rank` was not finite, as `said`, or workers disagree
    on `shard`.
    """

    step: int
    rank: int | None
    reason: str
    said: NonFinite | None = None
    shard: int | None = None


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
    """Keep the block in the message just received: of the average of `step`, or of new weights."""

    step: int
    block: int


@dataclass(frozen=True, slots=True)
class Contribute(Effect):
    """Count `node`, which was computed here, for a block that is averaged here."""

    node: TreeNode


@dataclass(frozen=True, slots=True)
class Combine(Effect):
    """Add what was computed here to `block` in the message just received, or begin with it."""

    step: int
    block: int


@dataclass(frozen=True, slots=True)
class Regroup(Effect):
    """Forget what other workers sent of the step in work; `round` begins, or goes on."""

    round: int


@dataclass(frozen=True, slots=True)
class Postpone(Effect):
    """Keep the message just received from `peer`, and tell of it again after `Again`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Again(Effect):
    """Tell once more what was postponed."""


@dataclass(frozen=True, slots=True)
class Make(Effect):
    """Make `step` with the average held, or use the weights held."""

    step: int
