"""The effects that a state machine requests. A driver does them in order and reports the results.

`Peer` is the driver's key for a connection; a state machine only compares and returns it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, dataclass_transform

from entrenar_py.train.wire.messages import Message, NonFinite, Piece, TreeNode

Peer: TypeAlias = Hashable


@dataclass_transform(frozen_default=True)
class Effect:
    """One action for the driver. Every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


# --- both -------------------------------------------------------------------------------------


class Send(Effect):
    """Send `message` to `peer`, with the payload that its kind carries."""

    peer: Peer
    message: Message


class Secure(Effect):
    """Use `key` for all later frames of `peer`, sent and received."""

    peer: Peer
    key: bytes


class Close(Effect):
    """Close the connection once all earlier messages were sent; `reason` is for the log."""

    peer: Peer
    reason: str


class Finish(Effect):
    """The state machine is done: `completed`, `halted`, `failed`, or `stopped` by the user."""

    status: str
    reason: str = ""


class Dial(Effect):
    """Connect to worker `rank` at `address` ("host:port"); then call `dialed` or `undialable`."""

    rank: int
    address: str


# --- coordinator ------------------------------------------------------------------------------


class Keep(Effect):
    """Accept the message just received from `rank`: its payload counts.

    A payload that is part of a delivery counts once the delivery is complete (`Deliver`).
    """

    rank: int
    message: Message


class Deliver(Effect):
    """Keep all deliveries that `rank` has completed so far, even if the worker dies."""

    rank: int


class Copy(Effect):
    """Keep the message just received from `rank` apart: it is part of a copy for an audit."""

    rank: int
    message: Message


class EndCopy(Effect):
    """Complete the copy of `shard` that `rank` began with its last Computed."""

    rank: int
    shard: int


class Compare(Effect):
    """Compare the copies of `shard`, all complete; then call `compared` with the result."""

    step: int
    shard: int


class Conclude(Effect):
    """End the audit of `shard`: the copy with index `copy` counts, the others are void.

    Copies are in the order of completion; `alike` gives for each the index of the first one with
    the same bits. `culprit` is the rank that delivered a different copy, or None. `copy` is None if
    it is unknown which copy is right. `disputed` are the ranks that ever disagreed.
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
    """`rank` left during `step`; its shards of it are void, except those kept by a Deliver."""

    rank: int
    step: int
    reason: str


class Dealt(Effect):
    """From `step` on each rank gets `counts` shards: it takes `costs` seconds for one."""

    step: int
    counts: Mapping[int, int]
    costs: Mapping[int, float]


class Serve(Effect):
    """Read the bytes of `piece` aside and send it to `peer`, or call `unreadable`."""

    peer: Peer
    piece: Piece


class Gather(Effect):
    """`step` is next; deliveries for a step that was not made are void."""

    step: int


class Reduce(Effect):
    """Average `block`, delivered for every shard of `step`; then call `reduced` or `refused`."""

    step: int
    block: int


class Prepare(Effect):
    """Compute the weights after `step` without using them yet; then call `prepared`."""

    step: int


class Apply(Effect):
    """Make `step` here, too, now that a worker has made it: use the average or the new weights."""

    step: int


class Save(Effect):
    """Write a checkpoint of the state before `step`."""

    step: int


class Stop(Effect):
    """Halt before `step`: for report `said` of worker `rank`, a disputed `shard`, or neither."""

    step: int
    rank: int | None
    reason: str
    said: NonFinite | None = None
    shard: int | None = None


# --- worker -----------------------------------------------------------------------------------


class Load(Effect):
    """Take over the state before `step` from the message just received, as worker `rank`."""

    rank: int
    step: int


class Store(Effect):
    """Store the payload of the message just received at `offset` of the file of that digest."""

    file: str
    offset: int


class Compute(Effect):
    """Compute `shards` of `step` in the background; then call `computed` with this effect.

    Every Compute has its own `ticket`, by which work from before a reconnection is recognised.
    """

    ticket: int
    step: int
    shards: tuple[int, ...]


class Pass(Effect):
    """Compute `shard` of `step` in one direction in the background; then call `passed`.

    A backward pass also adds the gradient to this worker's sum. The last stage does both in its
    forward pass. After a pass that `is_last` the sum is whole. `ticket` is as in `Compute`.
    """

    ticket: int
    step: int
    shard: int
    is_forward: bool
    is_last: bool


class Receive(Effect):
    """Keep the tensor in the message just received for the pass that it is an input of."""

    message: Message


class Hold(Effect):
    """Hold the block in the message just received: of the average of `step`, or of new weights."""

    step: int
    block: int


class Contribute(Effect):
    """Count `node`, which this worker computed, for a block that this worker averages."""

    node: TreeNode


class Combine(Effect):
    """Add this worker's part of `block` to the sum just received, or start the sum with it."""

    step: int
    block: int


class Regroup(Effect):
    """Forget all sums and averages: `round` begins, or goes on with the next step."""

    round: int


class Postpone(Effect):
    """Keep the message just received from `peer`; at `Again`, deliver it once more."""

    peer: Peer


class Again(Effect):
    """Deliver all postponed messages to the state machine again."""


class Make(Effect):
    """Make `step` with the average that is held, or use the weights that are held."""

    step: int
