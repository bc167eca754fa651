"""The messages that peers exchange, the phases in which each is legal, and the moves between them.

To add a message, edit only this module and the machines that send and receive it. The state
machines use the tables of legal messages, and the docs' tables and diagrams are generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeAlias, dataclass_transform

from entrenar_py.shared.untrusted import escaping

# Lower-case hex digits: a nonce has 32 random digits, a proof has 64 (an HMAC-SHA256), a digest has
# 64 (a SHA-256).
Nonce: TypeAlias = str
Proof: TypeAlias = str
Digest: TypeAlias = str


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Message:
    """A message. `tag` is its type on the wire; `carries` names its payload, "" if it has none.

    Every subclass is a frozen dataclass. The fields are the message's header. The docstring names
    the sender, and after a colon says what the message means.
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
    """Coordinator (or mesh worker), to each new connection: prove that you know the secret.

    The proof in the answer must cover `nonce`, a random challenge.
    """

    tag: ClassVar[int] = 1
    version: int
    nonce: Nonce


class Hello(Message):
    """Worker, to a coordinator or another worker: a request to join, with a proof.

    `run` names the run. `manifest` is a digest of the tensors' names and shapes, and `data` is a
    digest of the data set. `backend` names the backend that the worker computes on. `rank` is its
    previous rank, or None. `port` is where it listens for other workers, or None. `proof` covers
    the secret, the challenge and all other fields. If `run`, `manifest` and `data` are all empty,
    the worker asks for the run's terms.
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

    The reduced vector is sent in `blocks` parts of nearly equal size. `resumed` is true if the run
    continues from a checkpoint, with this step. If the coordinator applies the optimizer, the
    payload lacks the optimizer's state.
    """

    tag: ClassVar[int] = 3
    carries: ClassVar[str] = "state"
    rank: int
    step: int
    blocks: int
    resumed: bool
    proof: Proof


class Refuse(Message):
    """Coordinator (or mesh worker): you can't join or stay.

    `retry`: a later attempt may succeed.
    """

    tag: ClassVar[int] = 4
    reason: str
    retry: bool


class Loaded(Message):
    """Worker: it has loaded the state before `step`; the payload is the event that records this."""

    tag: ClassVar[int] = 5
    carries: ClassVar[str] = "events"
    step: int


class Offer(Message):
    """Coordinator, to a worker that asks for the terms: the run's plan (payload) and timeouts.

    `heartbeat_s` and `dead_after_s` are in seconds. `package` is the digest of a file that lists
    the files of the run; None if workers build model and data themselves. If there is a package,
    the worker may stay connected and request pieces of its files.
    """

    tag: ClassVar[int] = 6
    carries: ClassVar[str] = "plan"
    heartbeat_s: float
    dead_after_s: float
    package: Digest | None
    proof: Proof


class Want(Message):
    """Worker, before it joins: request for a piece of `file`, from `offset` on.

    `file` is the digest of the file's content. A piece has 1 MiB, and a file's last piece has the
    rest. At most 4 requests are open at a time.
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
    """Worker, in answer to another worker's Hello: the proof that it knows the secret, too."""

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
    """Worker: `shards` of `step` are computed, and their nodes follow.

    The payload has an event for each shard.
    """

    tag: ClassVar[int] = 11
    carries: ClassVar[str] = "events"
    step: int
    shards: tuple[int, ...]


class TreeNode(Message):
    """Worker: the payload is `block` of node (`level`, `index`) in the reduction tree of `step`.

    `loss` is the summed loss of the shards under the node, `weight` their number of samples (or
    tokens). The message goes to the process that averages the block: the coordinator, or one of the
    workers in a mesh. `round` is the round of the last `Group`; 0 in a star. In a pipeline, only
    the last stage's nodes have a loss.
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

    The payload has the events of the shards up to this one.
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
    """Coordinator, or a worker of a mesh: `block` of the averaged gradient of `step`.

    It is not clipped yet. The receiver keeps it, and doesn't use it before `Commit`. `loss` is
    summed over `weight` samples (or tokens).
    """

    tag: ClassVar[int] = 14
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    loss: float
    weight: float


class Weights(Message):
    """Coordinator, if it applies the optimizer: `block` of the weights and buffers after `step`.

    The receiver keeps it, and doesn't use it before `Commit`. `loss` is summed over `weight`
    samples (or tokens).
    """

    tag: ClassVar[int] = 18
    carries: ClassVar[str] = "block"
    step: int
    block: int
    loss: float
    weight: float


class Staged(Message):
    """Worker: it has received every block of `step`, and waits for `Commit`."""

    tag: ClassVar[int] = 15
    step: int
    round: int


class Commit(Message):
    """Coordinator: all workers hold the blocks of `step`.

    Apply the step, or use the new weights.
    """

    tag: ClassVar[int] = 16
    step: int


class Applied(Message):
    """Worker: `step` is applied; the payload is the event that records the new state."""

    tag: ClassVar[int] = 17
    carries: ClassVar[str] = "events"
    step: int


class Group(Message):
    """Coordinator of a mesh: from `step` on, `ranks` exchange blocks, at `addresses`.

    A new `round` begins when a worker joins, leaves or loses a link. Messages of earlier rounds are
    then void, and all workers send their nodes again. `holders` has the rank of each shard, until
    the next Group. Of the n `ranks`, the one with index b mod n averages block b. In a pipeline,
    `holders` has the ranks of all shards in the first stage, then those in the next stage and so
    on, and a new round restarts the step.
    """

    tag: ClassVar[int] = 30
    step: int
    round: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]


class Partial(Message):
    """Worker of a ring, to the next: `block` summed over the `hops` + 1 workers so far.

    `loss` is summed over the shards of these workers; `weight` is their number of samples (or
    tokens).
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

    `dtype` is the dtype of the hidden states. The next stage draws random numbers from number
    `draws` on. `round` is the round of the last `Group`.
    """

    tag: ClassVar[int] = 40
    carries: ClassVar[str] = "hidden states"
    step: int
    round: int
    shard: int
    dtype: str
    draws: int


class ActivationGradient(Message):
    """Worker of a pipeline, to the previous stage: the gradient of the hidden states of `shard`.

    It has the shape and dtype of the hidden states.
    """

    tag: ClassVar[int] = 41
    carries: ClassVar[str] = "hidden states"
    step: int
    round: int
    shard: int


class Summed(Message):
    """Worker of a pipeline: `shards` of `step` passed through its stage, and their nodes follow.

    The payload has an event for each shard. `round` is the round of the last `Group`. `times_us`
    has three numbers for each pass: 2 * shard (+ 1 for a forward pass), then its begin and its end
    in microseconds since the Assign.
    """

    tag: ClassVar[int] = 42
    carries: ClassVar[str] = "events"
    step: int
    round: int
    shards: tuple[int, ...]
    times_us: tuple[int, ...] = ()


# --- any time ---------------------------------------------------------------------------------


class Heartbeat(Message):
    """Either side: the process is alive, however long its work takes."""

    tag: ClassVar[int] = 20


class Leave(Message):
    """Worker: it leaves the run; its shards go to other workers."""

    tag: ClassVar[int] = 21
    reason: str


class Halt(Message):
    """Coordinator: all workers stop before any update of `step`."""

    tag: ClassVar[int] = 22
    step: int
    reason: str


class Shutdown(Message):
    """Coordinator: the run is over; `problem` says why it could not continue, None if complete."""

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


# --- phases -----------------------------------------------------------------------------------


class Stage(StrEnum):
    """The stage of a run."""

    GATHERING = "gathering"  # between two steps
    COMPUTING = "computing"  # and averaging, one block at a time
    STAGING = "staging"
    APPLYING = "applying"
    OVER = "over"


class PeerPhase(StrEnum):
    """The phase of one peer, as the coordinator sees it."""

    CHALLENGED = "challenged"  # connected, and must send a Hello
    FETCHING = "fetching"  # has the run's terms, and may request its files
    WAITING = "waiting"  # may join at the next boundary between steps
    LOADING = "loading"  # the state is on its way to it
    READY = "ready"  # has nothing to do
    COMPUTING = "computing"  # has shards to deliver
    STAGING = "staging"  # was sent the whole average, or all new weights
    STAGED = "staged"  # holds the whole average, or all new weights
    APPLYING = "applying"  # was told to apply the step
    GIVING = "giving"  # was asked for its state
    ASKED = "asked"  # waits, and was asked for the state that it may still hold


# The messages that a peer may send in each phase; any other one ends the connection. An admitted
# peer may also send those of ALWAYS.
PEER_MAY_SAY: Mapping[PeerPhase, tuple[type[Message], ...]] = {
    PeerPhase.CHALLENGED: (Hello,),
    PeerPhase.FETCHING: (Want,),
    PeerPhase.WAITING: (),
    PeerPhase.LOADING: (Loaded,),
    PeerPhase.READY: (),
    PeerPhase.COMPUTING: (TreeNode, Computed, NonFinite),
    PeerPhase.STAGING: (Staged,),
    PeerPhase.STAGED: (),
    PeerPhase.APPLYING: (Applied,),
}
# In a mesh, blocks go from worker to worker. Reports about the exchange may arrive in most phases,
# even about a round that has ended.
MESH_PEER_MAY_SAY: Mapping[PeerPhase, tuple[type[Message], ...]] = {
    PeerPhase.CHALLENGED: (Hello,),
    PeerPhase.FETCHING: (Want,),
    PeerPhase.WAITING: (),
    PeerPhase.LOADING: (Loaded,),
    PeerPhase.READY: (Staged, Overflow, Unreachable),
    PeerPhase.COMPUTING: (Computed, NonFinite, Staged, Overflow, Unreachable),
    PeerPhase.STAGED: (Staged, Overflow, Unreachable),
    PeerPhase.APPLYING: (Applied, Unreachable),
    PeerPhase.GIVING: (State, Unreachable),
    PeerPhase.ASKED: (State, Applied),
}
# In a pipeline, a step may restart while reports about its last round are on their way.
PIPELINE_PEER_MAY_SAY: Mapping[PeerPhase, tuple[type[Message], ...]] = {
    PeerPhase.CHALLENGED: (Hello,),
    PeerPhase.FETCHING: (Want,),
    PeerPhase.WAITING: (),
    PeerPhase.LOADING: (Loaded,),
    PeerPhase.READY: (Summed, TreeNode, NonFinite, Staged, Unreachable),
    PeerPhase.COMPUTING: (Summed, TreeNode, NonFinite, Staged, Unreachable),
    PeerPhase.STAGING: (Summed, TreeNode, NonFinite, Staged, Unreachable),
    PeerPhase.STAGED: (Unreachable,),
    PeerPhase.APPLYING: (Applied, Unreachable),
}
ALWAYS = (Heartbeat, Leave)
MEMBERS = (
    PeerPhase.READY,
    PeerPhase.COMPUTING,
    PeerPhase.STAGING,
    PeerPhase.STAGED,
    PeerPhase.APPLYING,
    PeerPhase.GIVING,
)


class WorkerPhase(StrEnum):
    """The phase of a worker."""

    AWAY = "away"  # not connected
    CONNECTED = "connected"  # waits to be challenged
    GREETED = "greeted"  # sent a Hello
    READY = "ready"  # holds the state before `step`
    COMPUTING = "computing"
    STAGED = "staged"  # holds the average of `step`, or the new weights
    OVER = "over"


# The phases of an admitted worker. In these, whoever closes the connection sends the reason.
TAKING_PART = (WorkerPhase.READY, WorkerPhase.COMPUTING, WorkerPhase.STAGED)

WORKER_MAY_HEAR: Mapping[WorkerPhase, tuple[type[Message], ...]] = {
    WorkerPhase.AWAY: (),
    WorkerPhase.CONNECTED: (Challenge,),
    WorkerPhase.GREETED: (Welcome, Refuse, Heartbeat, Halt, Shutdown),
    WorkerPhase.READY: (Assign, Average, Weights, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.COMPUTING: (Assign, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.STAGED: (Commit, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.OVER: (),
}
MESH_WORKER_MAY_HEAR: Mapping[WorkerPhase, tuple[type[Message], ...]] = {
    **WORKER_MAY_HEAR,
    WorkerPhase.GREETED: (Welcome, Fetch, Refuse, Heartbeat, Halt, Shutdown),
    WorkerPhase.READY: (Assign, Group, Fetch, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.COMPUTING: (Assign, Group, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.STAGED: (Assign, Group, Commit, Heartbeat, Refuse, Halt, Shutdown),
}


PIPELINE_WORKER_MAY_HEAR: Mapping[WorkerPhase, tuple[type[Message], ...]] = {
    **WORKER_MAY_HEAR,
    WorkerPhase.READY: (Assign, Group, Weights, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.COMPUTING: (Group, Heartbeat, Refuse, Halt, Shutdown),
    WorkerPhase.STAGED: (Group, Commit, Heartbeat, Refuse, Halt, Shutdown),
}


class ApplicantPhase(StrEnum):
    """The phase of an applicant, which asks for the run's terms before it can be a worker.

    An applicant that also fetches files is in the phase FETCHING before OVER.
    """

    CONNECTED = "connected"  # waits to be challenged
    ASKING = "asking"  # sent a Hello without terms
    FETCHING = "fetching"  # requests pieces of files
    OVER = "over"


APPLICANT_MAY_HEAR: Mapping[ApplicantPhase, tuple[type[Message], ...]] = {
    ApplicantPhase.CONNECTED: (Challenge,),
    ApplicantPhase.ASKING: (Offer, Refuse),
    ApplicantPhase.FETCHING: (Piece, Heartbeat, Refuse, Halt, Shutdown),
    ApplicantPhase.OVER: (),
}


# --- moves ------------------------------------------------------------------------------------

# The state machines make only these moves, as tests check. Each move is named by the message that
# causes it, whichever end sends it. A connection and a run may also end in any phase.

RUN_MOVES: tuple[tuple[Stage, str, Stage], ...] = (
    (Stage.GATHERING, "Assign", Stage.COMPUTING),
    (Stage.COMPUTING, "last Average or Weights", Stage.STAGING),
    (Stage.STAGING, "last Staged, Commit", Stage.APPLYING),
    (Stage.APPLYING, "last Applied, next step", Stage.GATHERING),
    (Stage.COMPUTING, "no worker left, same step", Stage.GATHERING),
    (Stage.STAGING, "no worker left, same step", Stage.GATHERING),
    (Stage.APPLYING, "no worker left, next step if any worker made it", Stage.GATHERING),
    (Stage.GATHERING, "Shutdown", Stage.OVER),
    (Stage.COMPUTING, "NonFinite, Halt", Stage.OVER),
    (Stage.COMPUTING, "average not finite, Halt", Stage.OVER),
    (Stage.COMPUTING, "workers disagree, Halt", Stage.OVER),
    (Stage.COMPUTING, "stopped at once, Shutdown", Stage.OVER),
    (Stage.STAGING, "stopped at once, Shutdown", Stage.OVER),
    (Stage.APPLYING, "stopped at once, Shutdown", Stage.OVER),
)

PEER_MOVES: tuple[tuple[PeerPhase, type[Message], PeerPhase], ...] = (
    (PeerPhase.CHALLENGED, Hello, PeerPhase.WAITING),
    (PeerPhase.WAITING, Welcome, PeerPhase.LOADING),
    (PeerPhase.LOADING, Loaded, PeerPhase.READY),
    (PeerPhase.READY, Assign, PeerPhase.COMPUTING),
    (PeerPhase.COMPUTING, Assign, PeerPhase.COMPUTING),
    (PeerPhase.COMPUTING, Computed, PeerPhase.COMPUTING),
    (PeerPhase.COMPUTING, TreeNode, PeerPhase.COMPUTING),
    (PeerPhase.COMPUTING, TreeNode, PeerPhase.READY),
    (PeerPhase.COMPUTING, Average, PeerPhase.COMPUTING),
    (PeerPhase.READY, Average, PeerPhase.READY),
    (PeerPhase.READY, Average, PeerPhase.STAGING),
    (PeerPhase.READY, Weights, PeerPhase.READY),
    (PeerPhase.READY, Weights, PeerPhase.STAGING),
    (PeerPhase.STAGING, Staged, PeerPhase.STAGED),
    (PeerPhase.STAGED, Commit, PeerPhase.APPLYING),
    (PeerPhase.APPLYING, Applied, PeerPhase.READY),
)

# The moves of a peer that fetches files and then reconnects as a worker.
FETCHING_PEER_MOVES: tuple[tuple[PeerPhase, type[Message], PeerPhase], ...] = (
    (PeerPhase.CHALLENGED, Hello, PeerPhase.FETCHING),
    (PeerPhase.FETCHING, Want, PeerPhase.FETCHING),
    (PeerPhase.FETCHING, Piece, PeerPhase.FETCHING),
)

WORKER_MOVES: tuple[tuple[WorkerPhase, type[Message], WorkerPhase], ...] = (
    (WorkerPhase.CONNECTED, Challenge, WorkerPhase.GREETED),
    (WorkerPhase.GREETED, Welcome, WorkerPhase.READY),
    (WorkerPhase.GREETED, Refuse, WorkerPhase.AWAY),
    (WorkerPhase.GREETED, Refuse, WorkerPhase.OVER),
    *((before, Refuse, WorkerPhase.AWAY) for before in TAKING_PART),
    *((before, Refuse, WorkerPhase.OVER) for before in TAKING_PART),
    (WorkerPhase.READY, Assign, WorkerPhase.COMPUTING),
    (WorkerPhase.COMPUTING, Assign, WorkerPhase.COMPUTING),
    (WorkerPhase.COMPUTING, Computed, WorkerPhase.COMPUTING),
    (WorkerPhase.COMPUTING, TreeNode, WorkerPhase.COMPUTING),
    (WorkerPhase.COMPUTING, TreeNode, WorkerPhase.READY),
    (WorkerPhase.COMPUTING, NonFinite, WorkerPhase.COMPUTING),
    (WorkerPhase.READY, Average, WorkerPhase.READY),
    (WorkerPhase.READY, Average, WorkerPhase.STAGED),
    (WorkerPhase.READY, Weights, WorkerPhase.READY),
    (WorkerPhase.READY, Weights, WorkerPhase.STAGED),
    (WorkerPhase.STAGED, Commit, WorkerPhase.READY),
    *(
        (before, ending, WorkerPhase.OVER)
        for before, heard in WORKER_MAY_HEAR.items()
        for ending in (Halt, Shutdown)
        if ending in heard
    ),
)

APPLICANT_MOVES: tuple[tuple[ApplicantPhase, type[Message], ApplicantPhase], ...] = (
    (ApplicantPhase.CONNECTED, Challenge, ApplicantPhase.ASKING),
    (ApplicantPhase.ASKING, Offer, ApplicantPhase.OVER),
    (ApplicantPhase.ASKING, Offer, ApplicantPhase.FETCHING),
    (ApplicantPhase.FETCHING, Want, ApplicantPhase.FETCHING),
    (ApplicantPhase.FETCHING, Piece, ApplicantPhase.FETCHING),
    (ApplicantPhase.FETCHING, Piece, ApplicantPhase.OVER),
    *(
        (ApplicantPhase.FETCHING, ending, ApplicantPhase.OVER)
        for ending in (Refuse, Halt, Shutdown)
    ),
    (ApplicantPhase.ASKING, Refuse, ApplicantPhase.OVER),
)
