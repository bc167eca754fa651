"""The effects that a state machine requests. A driver carries them out in order.

The driver reports the results by calling the methods named here. `Peer` is the driver's key for a
connection; a state machine only compares and returns it.
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


# --- both ends --------------------------------------------------------------------------------


class Send(Effect):
    """Send `message` to `peer`, with the payload for its type."""

    peer: Peer
    message: Message


class Secure(Effect):
    """Use `key` for all later frames of `peer`, sent and received."""

    peer: Peer
    key: bytes


class Close(Effect):
    """Close the connection after all earlier messages are sent; `reason` is for the log."""

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
    """Keep all deliveries that `rank` has completed so far, even if the worker dies later."""

    rank: int


class Copy(Effect):
    """Store the message just received from `rank` separately, as part of a copy for an audit."""

    rank: int
    message: Message


class EndCopy(Effect):
    """Complete the copy of `shard` that `rank` began with its last Computed."""

    rank: int
    shard: int


class Compare(Effect):
    """Compare the copies of `shard`, which are all complete; then call `compared`."""

    step: int
    shard: int


class Conclude(Effect):
    """End the audit of `shard`: the copy with index `copy` counts, the others are void.

    Copies are numbered in the order of completion. For each copy, `alike` has the index of the
    first copy with the same bits. `culprit` is the rank that delivered a different copy, or None.
    `copy` is None if it is unknown which copy is right. `disputed` has the ranks that ever
    disagreed.
    """

    step: int
    shard: int
    alike: tuple[int, ...]
    copy: int | None = None
    culprit: int | None = None
    disputed: tuple[int, ...] = ()


class Joined(Effect):
    """`rank` takes part from `step` on. `late` is true if the run had begun without it."""

    rank: int
    step: int
    late: bool


class Left(Effect):
    """`rank` left during `step`.

    Its shards of this step are void, except those kept by a Deliver.
    """

    rank: int
    step: int
    reason: str


class Dealt(Effect):
    """From `step` on, each rank gets `counts[rank]` shards.

    The rank takes `costs[rank]` seconds for a shard.
    """

    step: int
    counts: Mapping[int, int]
    costs: Mapping[int, float]


class Serve(Effect):
    """Read the bytes of `piece` in the background and send them to `peer`, or call `unreadable`."""

    peer: Peer
    piece: Piece


class Gather(Effect):
    """`step` is next; deliveries for a step that was not applied are void."""

    step: int


class Reduce(Effect):
    """Average `block`, which has arrived for every shard of `step`; call `reduced` or `refused`."""

    step: int
    block: int


class Prepare(Effect):
    """Compute the weights after `step` without using them yet; then call `prepared`."""

    step: int


class Apply(Effect):
    """Apply `step` here, too, now that a worker has: use the average or the new weights."""

    step: int


class Save(Effect):
    """Write a checkpoint of the state before `step` in the background; then call `saved`."""

    step: int


class Stop(Effect):
    """Halt before `step`.

    The cause is the report `said` of worker `rank`, a disputed `shard`, or neither.
    """

    step: int
    rank: int | None
    reason: str
    said: NonFinite | None = None
    shard: int | None = None


# --- worker -----------------------------------------------------------------------------------


class Load(Effect):
    """As worker `rank`, load the state before `step` from the message just received."""

    rank: int
    step: int


class Store(Effect):
    """Store the payload of the message just received at `offset` of the file with that digest."""

    file: str
    offset: int


class Compute(Effect):
    """Compute `shards` of `step` in the background; then call `computed` with this effect.

    Every Compute has its own `ticket`, which identifies work from before a reconnection.
    """

    ticket: int
    step: int
    shards: tuple[int, ...]


class Pass(Effect):
    """Compute `shard` of `step` in one direction in the background; then call `passed`.

    A backward pass also adds the gradient to this worker's sum. The last stage does both directions
    in its forward pass. After the pass with `is_last` the sum is complete. `ticket` is as in
    `Compute`.
    """

    ticket: int
    step: int
    shard: int
    is_forward: bool
    is_last: bool


class Receive(Effect):
    """Keep the tensor in the message just received for the pass that takes it as input."""

    message: Message


class Hold(Effect):
    """Hold the block just received, of the average of `step` or of the new weights."""

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
    """Forget all sums and averages: `round` begins, or continues with the next step."""

    round: int


class Postpone(Effect):
    """Keep the message just received from `peer`; deliver it once more at `Again`."""

    peer: Peer


class Again(Effect):
    """Deliver all postponed messages to the state machine again."""


class Make(Effect):
    """Apply `step` with the average that is held, or use the weights that are held."""

    step: int
