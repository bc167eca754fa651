"""Tables of the protocol's phases: the messages legal in each, and the moves between them.

The state machines use the tables of legal messages. The docs' tables and diagrams are generated
from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Fetch,
    Group,
    Halt,
    Heartbeat,
    Hello,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Offer,
    Overflow,
    Piece,
    Refuse,
    Shutdown,
    Staged,
    State,
    Summed,
    TreeNode,
    Unreachable,
    Want,
    Weights,
    Welcome,
)


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
    STAGING = "staging"  # all of the average, or of the new weights, was sent to it
    STAGED = "staged"  # holds all of that
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


# The phases of an admitted worker. In these, the end that closes the connection sends the reason.
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


# --- moves ------------------------------------------------------------------------------------ The
# state machines make only these moves, as tests check. Each move is named by the message that
# causes it, whichever end sends it. A connection and a run may also end in any phase.

RUN_MOVES: tuple[tuple[Stage, str, Stage], ...] = (
    (Stage.GATHERING, "Assign", Stage.COMPUTING),
    (Stage.COMPUTING, "last Average or Weights", Stage.STAGING),
    (Stage.STAGING, "last Staged, Commit", Stage.APPLYING),
    (Stage.APPLYING, "last Applied, next step", Stage.GATHERING),
    (Stage.COMPUTING, "nobody left, same step", Stage.GATHERING),
    (Stage.STAGING, "nobody left, same step", Stage.GATHERING),
    (Stage.APPLYING, "nobody left, next step if anyone made it", Stage.GATHERING),
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
