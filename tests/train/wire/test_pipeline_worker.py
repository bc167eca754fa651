"""The machine of a pipeline's worker: loading, passes, rounds, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    MESSAGES,
    PIPELINE_WORKER_MAY_HEAR,
    Activation,
    ActivationGradient,
    Applied,
    Assign,
    Commit,
    Heartbeat,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Refuse,
    Staged,
    Summed,
    TreeNode,
    Unreachable,
    Weights,
    Welcome,
    WorkerPhase,
)
from entrenar_py.train.wire.pipeline import order
from entrenar_py.train.wire.pipeline_peers import Passed, PipelineWorker
from tests.train.wire.mesh_situations import CHALLENGE, NONCE, PEER
from tests.train.wire.pipeline_situations import (
    GROUP,
    TO_2,
    closed,
    entered,
    linked,
    node,
    sent,
    welcomed,
)
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import TIMING

NEXT = replace(GROUP, round=2)
BOTH = Assign(step=5, shards=(0, 1))


def hidden(shard: int, *, round_: int = 1, step: int = 5) -> Activation:
    """Return hidden states from the stage before."""
    return Activation(step=step, round=round_, shard=shard, dtype="float32", draws=3)


def gradient(shard: int, *, round_: int = 1, step: int = 5) -> ActivationGradient:
    """Return the gradient of hidden states from the stage after."""
    return ActivationGradient(step=step, round=round_, shard=shard)


def weights(block: int, step: int = 5) -> Weights:
    """Return a block of new weights."""
    return Weights(step=step, block=block, loss=1.0, weight=2.0)


def the_pass(effects: list[Effect]) -> do.Pass:
    """Return the pass that is to be made."""
    (asked,) = (one for one in effects if isinstance(one, do.Pass))
    return asked


def computing() -> PipelineWorker:
    """Return the middle worker with both shards to compute."""
    machine = linked()
    assert machine.receive(BOTH, 0.0) == []
    return machine


def summed() -> tuple[PipelineWorker, list[Effect]]:
    """Return the middle worker after all its passes, and the last effects."""
    machine = computing()
    first = the_pass(machine.receive_from("in", hidden(0), 0.0))
    assert machine.receive_from("in", hidden(1), 0.0) == [do.Receive(hidden(1))]
    second = the_pass(machine.passed(first, Passed("float32", 4)))
    assert (second.shard, second.is_forward) == (1, True)
    assert sent(machine.passed(second, Passed("float32", 4)), Activation)[0].shard == 1
    back = the_pass(machine.receive_from("out", gradient(0), 0.0))
    assert (back.shard, back.is_forward, back.is_last) == (0, False, False)
    assert sent(machine.passed(back, Passed()), ActivationGradient)[0].shard == 0
    back = the_pass(machine.receive_from("out", gradient(1), 0.0))
    assert back.is_last
    nodes = [node(block, round=0, step=5) for block in (3, 2)]
    return machine, machine.passed(back, Passed(nodes=nodes))


def holding() -> PipelineWorker:
    """Return the middle worker, which has staged step 5."""
    machine, _ = summed()
    machine.receive(weights(3), 0.0)
    machine.receive(weights(2), 0.0)
    return machine


# --- the order of passes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "passes"),
    [(0, "f0 f1 f2 f3 b0 b1 b2 b3"), (1, "f0 f1 f2 b0 f3 b1 b2 b3"), (2, "f0 f1 f2 f3")],
)
def test_the_order_of_three_stages(stage: int, passes: str) -> None:
    """1F1B, with one shard more on its way than there are later stages."""
    told = order((0, 1, 2, 3), stage=stage, num_stages=3)
    assert " ".join(f"{'f' if forward else 'b'}{shard}" for shard, forward in told) == passes


# --- joining ----------------------------------------------------------------------------------


def test_a_stage_is_loaded_before_it_says_so() -> None:
    """Meanwhile it is no part of a step."""
    machine, load = welcomed()
    assert (machine.stage, machine.phase) == (1, WorkerPhase.GREETED)
    assert machine.wants(load)
    assert machine.loaded(load) == [do.Send(PEER, Loaded(step=5))]
    assert not machine.wants(load)
    assert machine.loaded(load) == []


def test_a_load_for_an_earlier_connection_counts_for_nothing() -> None:
    """The next connection brings a state of its own."""
    machine, load = welcomed()
    machine.lost("cut")
    assert not machine.wants(load)
    assert machine.loaded(load) == []


def test_a_second_welcome_is_refused() -> None:
    """The first one's state is being loaded."""
    machine, _ = welcomed()
    welcome = Welcome(rank=1, step=5, blocks=6, resumed=False, proof=machine._expected)
    assert "a second Welcome" in closed(machine.receive(welcome, 0.0))[PEER]


def test_a_worker_for_any_place_asks_for_any_again() -> None:
    """But for its last one as long as its own last connection may have it."""
    machine = entered()
    machine.lost("cut")
    for now, rank in ((1.0, 1), (TIMING.dead_after_s, 1), (TIMING.dead_after_s + 2.0, None)):
        machine.connected(PEER, NONCE, now)
        machine.receive(CHALLENGE, now)
        machine.receive(Refuse(reason="rank=1: a live worker has it", retry=True), now)
        assert machine.rank == rank


# --- a step -----------------------------------------------------------------------------------


def test_passes_from_the_first_input_to_the_sum() -> None:
    """The nodes follow their announcement, and have the round's number."""
    machine, effects = summed()
    assert [type(one).__name__ for one in sent(effects, Message)] == [
        "ActivationGradient",
        "Summed",
        "TreeNode",
        "TreeNode",
    ]
    [said] = sent(effects, Summed)
    assert (said.step, said.round, said.shards) == (5, 1, (0, 1))
    passes = [(one.shard, one.is_forward) for one in pipeline.decode(said.times_us)]
    assert passes == pipeline.order((0, 1), stage=1, num_stages=machine.places.num_stages)
    assert [(one.block, one.round) for one in sent(effects, TreeNode)] == [(3, 1), (2, 1)]
    assert machine.phase is WorkerPhase.READY


def test_weights_are_used_at_the_commit_alone() -> None:
    """All blocks of the stage are held before, and it says so once."""
    machine, _ = summed()
    assert machine.receive(weights(3), 0.0) == [do.Hold(5, 3)]
    effects = machine.receive(weights(2), 0.0)
    assert effects == [do.Hold(5, 2), do.Send(PEER, Staged(step=5, round=1))]
    effects = machine.receive(Commit(step=5), 0.0)
    assert effects == [
        do.Make(5),
        do.Send(PEER, Applied(step=5)),
        do.Regroup(1),
        do.Again(),
    ]
    assert (machine.step, machine.phase) == (6, WorkerPhase.READY)


def test_a_loss_that_is_not_finite_ends_the_passes() -> None:
    """Nothing more is computed in the round."""
    machine = computing()
    first = the_pass(machine.receive_from("in", hidden(0), 0.0))
    report = NonFinite(step=5, shard=0, tensor=None, element=None, loss=float("nan"), ids=(0,))
    assert machine.passed(first, report) == [do.Send(PEER, report)]
    assert machine.receive_from("in", hidden(1), 0.0) == [do.Receive(hidden(1))]


# --- what is early, or late -------------------------------------------------------------------


@pytest.mark.parametrize("said", [hidden(0, round_=2), hidden(0, step=6)])
def test_what_comes_early_is_postponed(said: Message) -> None:
    """It counts when its round or step has begun here."""
    machine = linked()
    assert machine.receive_from("in", said, 0.0) == [do.Postpone("in")]


def test_more_than_a_round_can_have_is_not_postponed() -> None:
    """It ends the link."""
    machine = linked()
    for _ in range(2 * len(GROUP.holders)):
        machine.receive_from("in", hidden(0, round_=2), 0.0)
    effects = machine.receive_from("in", hidden(0, round_=2), 0.0)
    assert closed(effects) == {"in": "more early messages than a round can have"}


@pytest.mark.parametrize(("peer", "said"), [("in", hidden(0)), ("out", gradient(0))])
def test_what_was_on_its_way_when_the_round_ended_has_no_effect(peer: str, said: Message) -> None:
    """Also while the new round's passes are made."""
    machine = computing()
    machine.receive(NEXT, 0.0)
    assert machine.receive_from(peer, said, 0.0) == []
    machine.receive(BOTH, 0.0)
    assert machine.receive_from(peer, said, 0.0) == []
    assert machine.receive_from("in", hidden(0, round_=2), 0.0) != []


def test_a_pass_of_a_round_that_is_over_has_no_effect() -> None:
    """Its result is not sent on."""
    machine = computing()
    old = the_pass(machine.receive_from("in", hidden(0), 0.0))
    machine.receive(NEXT, 0.0)
    assert not machine.wants(old)
    assert machine.passed(old, Passed("float32", 4)) == []
    machine.receive(BOTH, 0.0)
    new = the_pass(machine.receive_from("in", hidden(0, round_=2), 0.0))
    assert machine.passed(old, Passed("float32", 4)) == []
    assert sent(machine.passed(new, Passed("float32", 4)), Activation)[0].round == 2


def test_a_new_round_forgets_the_weights() -> None:
    """A step that some had staged begins anew."""
    machine = holding()
    assert machine.receive(NEXT, 0.0) == [do.Regroup(2), do.Again()]
    assert machine.phase is WorkerPhase.READY
    assert machine.receive(weights(3), 0.0) == [do.Hold(5, 3)]


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "said", "reason"),
    [
        ("in", hidden(2), "Activation shard=2: not due from rank 0"),
        ("in", gradient(0), "ActivationGradient shard=0: not due from rank 0"),
        ("out", hidden(0), "Activation shard=0: not due from rank 2"),
        ("in", hidden(0, step=4), "step=4: this worker is at step 5"),
        ("in", node(0), "TreeNode from another worker"),
    ],
)
def test_what_is_not_due_ends_the_link(peer: str, said: Message, reason: str) -> None:
    """The coordinator hears of it."""
    effects = computing().receive_from(peer, said, 0.0)
    assert closed(effects) == {peer: reason}
    (complaint,) = sent(effects, Unreachable)
    assert (complaint.round, complaint.rank) == (1, 0 if peer == "in" else 2)


@pytest.mark.parametrize(("peer", "said"), [("in", hidden(0)), ("out", gradient(0))])
def test_nothing_is_due_twice(peer: str, said: Message) -> None:
    """The second one ends the link."""
    machine = computing()
    machine.receive_from(peer, said, 0.0)
    (reason,) = closed(machine.receive_from(peer, said, 0.0)).values()
    assert "shard=0: not due here, or already received" in reason


def test_a_shard_of_another_worker_of_the_stage_is_not_due() -> None:
    """It is due there."""
    group = replace(GROUP, holders=(0, 0, 1, 2, 2, 2))
    machine = linked()
    machine.receive(replace(group, round=2), 0.0)
    effects = machine.receive_from("in", hidden(1, round_=2), 0.0)
    assert closed(effects) == {"in": "Activation shard=1: not due here, or already received"}
    effects = machine.receive(BOTH, 0.0)
    assert "other workers hold them in this round" in closed(effects)[PEER]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([BOTH], "Assign shards=(0, 1): no round"),
        ([weights(2)], "Weights block=2: no round has begun"),
        ([Assign(step=4, shards=(0,))], "step=4: this worker is at step 5"),
        (
            [GROUP, weights(0)],
            "Weights block=0: it was already received, or belongs to another stage",
        ),
        ([GROUP, weights(2), weights(2)], "Weights block=2: it was already received"),
        ([GROUP, weights(2, step=4)], "step=4: this worker is at step 5"),
        ([GROUP, Assign(step=5, shards=(2,))], "shard=2: there are only 2 shards"),
        ([GROUP, BOTH, BOTH], "Assign to a worker that is computing"),
        ([GROUP, BOTH, weights(2)], "Weights to a worker that is computing"),
        ([GROUP, Commit(step=5)], "Commit to a worker that is ready"),
        ([replace(GROUP, step=4)], "step=4: this worker is at step 5"),
        ([replace(GROUP, ranks=(0, 2), addresses=("a:0", "c:2"))], "Group with 6 holders: use one"),
        ([replace(GROUP, addresses=("a:0",))], "this worker or an address is missing"),
        ([replace(GROUP, holders=(0, 0, 1, 1, 2))], "Group with 5 holders: use one of its ranks"),
        ([replace(GROUP, holders=(0, 0, 1, 1, 2, 7))], "Group with 6 holders"),
    ],
)
def test_what_a_coordinator_may_not_say(said: list[Message], reason: str) -> None:
    """The worker leaves, and tells it why."""
    machine = entered()
    for message in said[:-1]:
        machine.receive(message, 0.0)
    effects = machine.receive(said[-1], 0.0)
    assert reason in closed(effects)[PEER]
    assert reason in sent(effects, Leave)[0].reason
    assert machine.phase is WorkerPhase.AWAY


ILLEGAL = [
    (phase, kind)
    for phase in (WorkerPhase.READY, WorkerPhase.COMPUTING, WorkerPhase.STAGED)
    for kind in MESSAGES.values()
    if kind not in PIPELINE_WORKER_MAY_HEAR[phase]
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_only_what_is_legal_is_heard(phase: WorkerPhase, kind: type[Message]) -> None:
    """Anything else ends the connection."""
    machine = {"ready": linked, "computing": computing, "staged": holding}[phase]()
    assert machine.phase is phase
    effects = machine.receive(SAMPLES[kind][0], 0.0)
    assert closed(effects)[PEER] == f"{kind.__name__} to a worker that is {phase}"


# --- links ------------------------------------------------------------------------------------


def test_a_broken_link_is_told() -> None:
    """And so is one that can't be made."""
    machine = computing()
    (complaint,) = sent(machine.lost_link("in", "cut"), Unreachable)
    assert complaint == Unreachable(round=1, rank=0, reason="cut")
    machine = entered()
    assert machine.receive(GROUP, 0.0)[0] == TO_2
    (complaint,) = sent(machine.undialable(TO_2, "refused"), Unreachable)
    assert complaint == Unreachable(round=1, rank=2, reason="refused")


def test_who_is_in_no_round_complains_about_nobody() -> None:
    """Links end with the connection to the coordinator."""
    machine = computing()
    effects = machine.lost("cut")
    assert set(closed(effects)) == {PEER, "in", "out"}
    assert machine.lost_link("in", "cut") == []
    assert sent(effects, Unreachable) == []


def test_heartbeats_have_no_effect() -> None:
    """From the coordinator or from a worker."""
    machine = computing()
    assert machine.receive(Heartbeat(), 0.0) == []
    assert machine.receive_from("in", Heartbeat(), 0.0) == []
