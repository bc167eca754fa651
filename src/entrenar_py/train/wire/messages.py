"""The messages that peers exchange: a record for each, and a table of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, dataclass_transform

from entrenar_py.shared.untrusted import escaping

# Lower-case hex digits: a nonce has 32 random ones, a proof the 64 of an HMAC-SHA256, a digest the
# 64 of a SHA-256.
Nonce: TypeAlias = str
Proof: TypeAlias = str
Digest: TypeAlias = str


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Message:
    """A message. `tag` is its kind on the wire; `carries` names its payload, empty for none.

    Every subclass is a frozen dataclass. Its fields are the message's header.
    """

    tag: ClassVar[int]
    carries: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


VERSION = 3
TEXT_CHARS_MAX = 1_000
LIST_MAX = 2**16

# --- joining ----------------------------------------------------------------------------------


class Challenge(Message):
    """Coordinator (or mesh worker), to whoever connects: prove with `nonce` that you may join."""

    tag: ClassVar[int] = 1
    version: int
    nonce: Nonce


class Hello(Message):
    """Worker, to a coordinator or another worker: a request to join, with a proof.

    `run` names the run; `manifest` is a digest of the tensors' names and shapes, `data` of the data
    set; `backend` names what the worker computes on. `rank` is its rank until now, or None. `port`
    is where it listens for other workers, or None. `proof` covers the secret, the challenge and all
    other fields. If `run`, `manifest` and `data` are all empty, the worker asks which run this is.
    """

    tag: ClassVar[int] = 2
    version: int
    run: str
    manifest: str
    data: str
    backend: str
    rank: int | None
    port: int | None
    nonce: Nonce
    proof: Proof


class Welcome(Message):
    """Coordinator: the worker is admitted as `rank`; the payload is the whole state before `step`.

    The reduced vector travels in `blocks` parts of nearly equal size. `resumed`: the run continues
    from a checkpoint, with this step. If the coordinator makes the updates, the payload
    lacks the optimizer's state.
    """

    tag: ClassVar[int] = 3
    carries: ClassVar[str] = "state"
    rank: int
    step: int
    blocks: int
    resumed: bool
    proof: Proof


class Refuse(Message):
    """Coordinator (or mesh worker): you can't join or stay. `retry`: a later try may succeed."""

    tag: ClassVar[int] = 4
    reason: str
    retry: bool


class Loaded(Message):
    """Worker: it holds the state before `step`; the payload is the event that records it."""

    tag: ClassVar[int] = 5
    carries: ClassVar[str] = "events"
    step: int


class Offer(Message):
    """Coordinator, to a worker that asks: the run's plan in the payload, and its timeouts.

    `heartbeat_s` and `dead_after_s` are in seconds. `package` is the digest of a file that lists
    those of the run; None if workers build model and data themselves. With a package the worker may
    stay, and want pieces of its files.
    """

    tag: ClassVar[int] = 6
    carries: ClassVar[str] = "plan"
    heartbeat_s: float
    dead_after_s: float
    package: Digest | None
    proof: Proof


class Want(Message):
    """Worker, before it joins: request for a piece of `file`, from `offset` on.

    `file` is the digest of its content. A piece has 1 MiB, the last one of a file the rest. At most
    4 are wanted at a time.
    """

    tag: ClassVar[int] = 24
    file: Digest
    offset: int


class Piece(Message):
    """Coordinator: the piece of `file` at `offset`; pieces come in the order of their requests."""

    tag: ClassVar[int] = 25
    carries: ClassVar[str] = "file"
    file: Digest
    offset: int


class Accept(Message):
    """Worker, to another that said hello: the proof that it knows the secret, too."""

    tag: ClassVar[int] = 9
    proof: Proof


class Fetch(Message):
    """Coordinator: request for the state before `step`."""

    tag: ClassVar[int] = 7
    step: int


class State(Message):
    """Worker: the whole state before `step`."""

    tag: ClassVar[int] = 8
    carries: ClassVar[str] = "state"
    step: int


# --- a step -----------------------------------------------------------------------------------


class Assign(Message):
    """Coordinator: compute these logical `shards` of `step`."""

    tag: ClassVar[int] = 10
    step: int
    shards: tuple[int, ...]


class Computed(Message):
    """Worker: `shards` of `step` are computed, the nodes follow; the payload records each shard."""

    tag: ClassVar[int] = 11
    carries: ClassVar[str] = "events"
    step: int
    shards: tuple[int, ...]


class TreeNode(Message):
    """Worker: the payload is `block` of node (`level`, `index`) in the reduction tree of `step`.

    `loss` is the summed loss of the shards under it, `weight` their number of samples (or tokens).
    Sent to the process that averages the block: the coordinator, or in a mesh one of the workers.
    `round` is that of `Group`; 0 in a star. In a pipeline the shards under the node have a loss in
    the last stage only.
    """

    tag: ClassVar[int] = 12
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    level: int
    index: int
    loss: float
    weight: float


class NonFinite(Message):
    """Worker: the gradient (or, without a tensor, the loss) of `shard` is NaN or Inf.

    The payload records the shards up to this one.
    """

    tag: ClassVar[int] = 13
    carries: ClassVar[str] = "events"
    step: int
    shard: int
    tensor: str | None
    element: int | None
    loss: float
    ids: tuple[int, ...]


class Average(Message):
    """The process that averaged it: `block` of the averaged gradient of `step`, before clipping.

    It is held, and not used before `Commit`. `loss` is summed over the samples (or tokens) that
    `weight` counts.
    """

    tag: ClassVar[int] = 14
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    loss: float
    weight: float


class Weights(Message):
    """Coordinator, if it makes the updates: `block` of the weights and buffers after `step`.

    It is held, and not used before `Commit`. `loss` is summed over the samples (or tokens) that
    `weight` counts.
    """

    tag: ClassVar[int] = 18
    carries: ClassVar[str] = "block"
    step: int
    block: int
    loss: float
    weight: float


class Staged(Message):
    """Worker: it holds every block of `step`."""

    tag: ClassVar[int] = 15
    step: int
    round: int


class Commit(Message):
    """Coordinator: all hold the blocks of `step`; make the step, or use the weights received."""

    tag: ClassVar[int] = 16
    step: int


class Applied(Message):
    """Worker: `step` is made; the payload is the event that records the new state."""

    tag: ClassVar[int] = 17
    carries: ClassVar[str] = "events"
    step: int


class Group(Message):
    """Coordinator of a mesh: from `step` on `ranks` exchange blocks, at `addresses`.

    A new `round` begins when a worker joins, leaves or loses a link: messages of earlier rounds are
    void, and all workers send their nodes again. `holders` has the rank of each shard, in this step
    and in later ones until the next Group. Worker number b mod n of the n `ranks` averages block b.
    In a pipeline `holders` has the ranks of the first stage for all shards, then those of the next,
    and a new round starts the step over.
    """

    tag: ClassVar[int] = 30
    step: int
    round: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]


class Partial(Message):
    """Worker of a ring, to the next: `block` summed over the `hops` + 1 workers so far.

    `loss` is summed over the same shards, `weight` is their number of samples (or tokens).
    """

    tag: ClassVar[int] = 33
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    hops: int
    loss: float
    weight: float


class Unreachable(Message):
    """Worker of a mesh: in `round` it can't exchange blocks with `rank`."""

    tag: ClassVar[int] = 31
    round: int
    rank: int
    reason: str


class Overflow(Message):
    """Worker of a mesh: in `step` the average of `block` is not finite, though each shard was."""

    tag: ClassVar[int] = 32
    step: int
    block: int


# --- a pipeline of stages ---------------------------------------------------------------------


class Activation(Message):
    """Worker of a pipeline, to the next stage: the hidden states of `shard` that it computed.

    `dtype` is their format. The next stage draws random numbers from number `draws` on. `round` is
    that of `Group`.
    """

    tag: ClassVar[int] = 40
    carries: ClassVar[str] = "hidden states"
    step: int
    round: int
    shard: int
    dtype: str
    draws: int


class ActivationGradient(Message):
    """Worker of a pipeline, to the stage before: the gradient of the hidden states of `shard`.

    It has their shape and format.
    """

    tag: ClassVar[int] = 41
    carries: ClassVar[str] = "hidden states"
    step: int
    round: int
    shard: int


class Summed(Message):
    """Worker of a pipeline: `shards` of `step` passed through its stage, and their nodes follow.

    The payload records each shard. `round` is that of `Group`. `times_us` has three numbers for
    each pass: twice the shard, and 1 more for a forward pass; when it began and when it ended, in
    microseconds since the Assign.
    """

    tag: ClassVar[int] = 42
    carries: ClassVar[str] = "events"
    step: int
    round: int
    shards: tuple[int, ...]
    times_us: tuple[int, ...] = ()


# --- any time ---------------------------------------------------------------------------------


class Heartbeat(Message):
    """Either: the process is alive, however long its work takes."""

    tag: ClassVar[int] = 20


class Leave(Message):
    """Worker: it leaves; its shards go to others."""

    tag: ClassVar[int] = 21
    reason: str


class Halt(Message):
    """Coordinator: all workers stop before any update of `step`."""

    tag: ClassVar[int] = 22
    step: int
    reason: str


class Shutdown(Message):
    """Coordinator: the run is over; `problem` says why it could not go on, None if it is done."""

    tag: ClassVar[int] = 23
    problem: str | None


MESSAGES: dict[int, type[Message]] = {
    kind.tag: kind
    for kind in (
        *(Challenge, Hello, Welcome, Refuse, Loaded, Offer, Want, Piece, Fetch, State, Accept),
        *(Assign, Computed, TreeNode, NonFinite, Average, Weights, Staged, Commit, Applied),
        *(Group, Partial, Unreachable, Overflow),
        *(Heartbeat, Leave, Halt, Shutdown),
        *(Activation, ActivationGradient, Summed),
    )
}


def brief(text: str) -> str:
    """Return `text` without its middle if it is too long for a message."""
    return escaping.shortened(text, chars_max=TEXT_CHARS_MAX)
