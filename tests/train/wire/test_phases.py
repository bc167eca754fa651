"""The tables of legal messages and moves are complete and agree with each other.

`test_star` checks that the machines follow them.
"""

from __future__ import annotations

from entrenar_py.train.wire.messages import (
    ALWAYS,
    APPLICANT_MAY_HEAR,
    APPLICANT_MOVES,
    FETCHING_PEER_MOVES,
    MEMBERS,
    MESH_PEER_MAY_SAY,
    MESH_WORKER_MAY_HEAR,
    MESSAGES,
    PEER_MAY_SAY,
    PEER_MOVES,
    PIPELINE_PEER_MAY_SAY,
    PIPELINE_WORKER_MAY_HEAR,
    WORKER_MAY_HEAR,
    WORKER_MOVES,
    Accept,
    Activation,
    ActivationGradient,
    ApplicantPhase,
    Average,
    Heartbeat,
    Message,
    NonFinite,
    Partial,
    PeerPhase,
    WorkerPhase,
)

SAID_BY_WORKERS: set[type[Message]] = {
    *ALWAYS,
    *(kind for kinds in PEER_MAY_SAY.values() for kind in kinds),
    *(kind for kinds in MESH_PEER_MAY_SAY.values() for kind in kinds),
    *(kind for kinds in PIPELINE_PEER_MAY_SAY.values() for kind in kinds),
}
HEARD_BY_WORKERS: set[type[Message]] = {
    kind
    for table in (
        *(WORKER_MAY_HEAR, MESH_WORKER_MAY_HEAR, PIPELINE_WORKER_MAY_HEAR),
        APPLICANT_MAY_HEAR,
    )
    for kinds in table.values()
    for kind in kinds
}
# In a mesh, a ring or a pipeline they say these to each other, and to the coordinator never.
SAID_AMONG_WORKERS: set[type[Message]] = {Accept, Partial, Activation, ActivationGradient}


def test_every_phase_has_its_row() -> None:
    """Each table has every phase of its kind of run; members are past loading."""
    assert set(PEER_MAY_SAY) == set(PeerPhase) - {PeerPhase.GIVING, PeerPhase.ASKED}
    assert set(MESH_PEER_MAY_SAY) == set(PeerPhase) - {PeerPhase.STAGING}
    assert set(PIPELINE_PEER_MAY_SAY) == set(PEER_MAY_SAY)
    assert set(WORKER_MAY_HEAR) == set(MESH_WORKER_MAY_HEAR) == set(WorkerPhase)
    assert set(PIPELINE_WORKER_MAY_HEAR) == set(WorkerPhase)
    assert set(APPLICANT_MAY_HEAR) == set(ApplicantPhase)
    outside = {PeerPhase.CHALLENGED, PeerPhase.FETCHING, PeerPhase.WAITING}
    outside |= {PeerPhase.ASKED, PeerPhase.LOADING}
    assert set(MEMBERS) == set(PeerPhase) - outside


def test_every_message_is_heard_by_one_side() -> None:
    """Its docstring names the side that sends it; the other side may receive it."""
    assert set(MESSAGES.values()) == SAID_BY_WORKERS | HEARD_BY_WORKERS | SAID_AMONG_WORKERS
    assert {Heartbeat} == SAID_BY_WORKERS & HEARD_BY_WORKERS
    assert Average.__doc__ is not None
    assert Average.__doc__.startswith("Coordinator, or a worker of a mesh")
    for kind in set(MESSAGES.values()) - {Average}:
        assert kind.__doc__ is not None
        who = {(True, False): "Worker", (False, True): "Coordinator", (True, True): "Either"}
        by = who[kind in SAID_BY_WORKERS | SAID_AMONG_WORKERS, kind in HEARD_BY_WORKERS]
        assert kind.__doc__.startswith(by), kind


def test_a_move_is_legal() -> None:
    """Every move by a received message starts in a phase that allows the message."""
    for phase, kind, _ in (*PEER_MOVES, *FETCHING_PEER_MOVES):
        assert kind in PEER_MAY_SAY[phase] or kind in HEARD_BY_WORKERS
    for place, kind, _ in WORKER_MOVES:
        assert kind in WORKER_MAY_HEAR[place] or kind in SAID_BY_WORKERS
    for applicant, kind, _ in APPLICANT_MOVES:
        assert kind in APPLICANT_MAY_HEAR[applicant] or kind in SAID_BY_WORKERS


def test_what_is_legal_leads_somewhere() -> None:
    """Every legal message has a move, except those that end everything."""
    for phase, kinds in PEER_MAY_SAY.items():
        moves = (*PEER_MOVES, *FETCHING_PEER_MOVES)
        moving = {kind for before, kind, _ in moves if before is phase}
        assert set(kinds) - {NonFinite} <= moving  # it ends the run
    for place, heard in WORKER_MAY_HEAR.items():
        moving = {kind for before, kind, _ in WORKER_MOVES if before is place}
        assert set(heard) - {Heartbeat} <= moving
    for applicant, kinds in APPLICANT_MAY_HEAR.items():
        moving = {kind for before, kind, _ in APPLICANT_MOVES if before is applicant}
        assert set(kinds) - {Heartbeat} <= moving
