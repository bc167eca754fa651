"""The effects that a machine wants. A driver does them in order and tells what came of them.

`Peer` is the driver's own name for a connection; a machine only compares and hands it back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias, dataclass_transform

from entrenar_py.protocol.messages import Message, NonFinite, TreeNode

Peer: TypeAlias = Hashable


@dataclass_transform(frozen_default=True)
class Effect:
    """One thing to do. Every kind of it is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


# --- both -------------------------------------------------------------------------------------


class Send(Effect):
    """Send `message` to `peer`, with the payload that its kind carries."""

    peer: Peer
    message: Message


class Secure(Effect):
    """From now on all frames of `peer` are keyed with `key`, those sent and those read."""

    peer: Peer
    key: bytes


class Close(Effect):
    """End the connection once everything before was sent; `reason` is for the log."""

    peer: Peer
    reason: str


class Finish(Effect):
    """It is over: `completed`, `halted`, `failed`, or `stopped` by who started it."""

    status: str
    reason: str = ""


class Dial(Effect):
    """Connect to worker `rank` at `address` ("host:port"); then say `dialed`, or `undialable`."""

    rank: int
    address: str


# --- coordinator ------------------------------------------------------------------------------


class Keep(Effect):
    """The message just received from `rank` is in order: its payload counts.

    What belongs to a delivery counts when that is whole (`Deliver`).
    """

    rank: int
    message: Message


class Deliver(Effect):
    """Keep what `rank` began to deliver with its last Computed: it is whole, whichever dies."""

    rank: int


class Copy(Effect):
    """The message just received from `rank` is of its copy of an audited shard: keep it apart."""

    rank: int
    message: Message


class EndCopy(Effect):
    """The copy of `shard` that `rank` began with its last Computed is whole."""

    rank: int
    shard: int


class Compare(Effect):
    """Nobody computes a copy of `shard` any more: say with `compared` which have the same bits."""

    step: int
    shard: int


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


class Joined(Effect):
    """`rank` takes part from `step` on; `late` if the run had begun without it."""

    rank: int
    step: int
    late: bool


class Left(Effect):
    """`rank` takes part no more, in the middle of `step`; what it had not delivered is void."""

    rank: int
    step: int
    reason: str


class Gather(Effect):
    """`step` is next: what was delivered of a step that did not happen is void."""

    step: int


class Reduce(Effect):
    """`block` of every shard of `step` is there: add, average; then say `reduced` or `refused`."""

    step: int
    block: int


class Prepare(Effect):
    """All of `step` is averaged: make it beside the state in use; then say `prepared`."""

    step: int


class Apply(Effect):
    """A worker made `step`: make it here, too, or use what was prepared."""

    step: int


class Save(Effect):
    """Write a checkpoint of the state before `step`."""

    step: int


class Stop(Effect):
    """Nobody makes `step`: `rank` `said` that a value is not finite, or `shard` is in dispute."""

    step: int
    rank: int | None
    reason: str
    said: NonFinite | None = None
    shard: int | None = None


# --- worker -----------------------------------------------------------------------------------


class Load(Effect):
    """Take over the state in the message just received: it is `rank`'s before `step`."""

    rank: int
    step: int


class Compute(Effect):
    """Compute `shards` of `step`, beside everything else; then say `computed`, with this effect.

    `ticket` is another for each, so that what was begun in an earlier stay is told from this one.
    """

    ticket: int
    step: int
    shards: tuple[int, ...]


class Hold(Effect):
    """Keep the block in the message just received: of the average of `step`, or of new weights."""

    step: int
    block: int


class Contribute(Effect):
    """Count `node`, which was computed here, for a block that is averaged here."""

    node: TreeNode


class Combine(Effect):
    """Add what was computed here to `block` in the message just received, or begin with it."""

    step: int
    block: int


class Regroup(Effect):
    """Forget what other workers sent of the step in work; `round` begins, or goes on."""

    round: int


class Postpone(Effect):
    """Keep the message just received from `peer`, and tell of it again after `Again`."""

    peer: Peer


class Again(Effect):
    """Tell once more what was postponed."""


class Make(Effect):
    """Make `step` with the average held, or use the weights held."""

    step: int
