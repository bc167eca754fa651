"""The workers of a scenario: who is present in each step, who makes it, and the outer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrenar_py.shared import systems, workers
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.faults import SERVED_PLACES, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Audit, Saved, Start, Tensors, Trace, Update
from entrenar_py.shared.workers import Outer
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.wire.messages import Applied, Average, Message, Weights, Welcome
from tests import traces
from tests.systems import by_hand, stars
from tests.systems.stars import MESH_SIMULATED, REAL, SIMULATED, STEP, subject
from tests.traces import altered

TAKEN = Fault(kind="stranger", step=2, rank=1, value="taken_rank")
ONE_TOO_MANY = Fault(kind="stranger", step=2, value="one_too_many")


def cut(step: int) -> Fault:
    """Return a fault that cuts worker 0 off in `step`."""
    return Fault(kind="cut", step=step, rank=0, at="Staged")


@pytest.mark.parametrize(
    "faults", [(TAKEN, ONE_TOO_MANY), (TAKEN, cut(3)), (ONE_TOO_MANY, TAKEN, cut(4))]
)
def test_strangers_that_find_no_place(faults: tuple[Fault, ...]) -> None:
    """Such a stranger is accepted while all workers are present."""
    systems.require_possible(subject(SIMULATED, faults=faults))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ((TAKEN, cut(2)), "value=taken_rank step=2: a fault strikes a worker in step 2"),
        ((ONE_TOO_MANY, cut(0)), "value=one_too_many step=2: a fault strikes a worker in step 0"),
        ((Fault(kind="join", step=3, rank=1), TAKEN), "that worker is not present"),
        ((Fault(kind="join", step=3, rank=1), ONE_TOO_MANY), "2 of 3 workers are present"),
    ],
)
def test_strangers_that_might_find_one(faults: Any, message: str) -> None:
    """After a fault a rank may be free, and the stranger entitled."""
    with pytest.raises(UsageError, match=message):
        systems.require_possible(subject(SIMULATED, faults=faults))


BREAKS = ("kill", "cut", "half_open", "duplicate", "reorder", "truncate", "flip")


def served(system: str, **changes: Any) -> Scenario:
    """Return the usual star, in two blocks or more, with a server that makes the steps."""
    scenario = stars.in_blocks(system, 400)
    return scenario.with_(options={**scenario.options, "updates": "server"}, **changes)


def struck(system: str, kind: str, at: str) -> Scenario:
    """Return the same run with a fault `kind` on worker 1 at message `at`."""
    return served(system, faults=(Fault(kind=kind, step=STEP, rank=1, at=at),))


def in_workers(trace: Trace) -> list[Tensors]:
    recorded = [one.optimizer for one in trace.of(Start)]
    recorded += [one.optimizer for one in trace.of(Update)]
    return [one for one in recorded if one]


# --- whole runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "workload": "linear"},
        {"optimizer": "momentum", "clip_norm": 0.05, "schedule": "cosine", "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1, "dropout": 0.2, "warmup_steps": 2},
        {"optimizer": "adamw", "workload": "decoder"},
    ],
)
def test_any_number_of_workers_gives_the_reference(
    changes: dict[str, Any], world_size: int
) -> None:
    """The weights after every step are the reference's, and no worker has optimizer state."""
    trace = stars.require_right(served(SIMULATED, world_size=world_size, **changes))
    assert in_workers(trace) == []


# Other messages are those of a run whose workers make the steps: test_parameter_server_simulated.
OWN = {"Weights", "Commit"}


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(place, marks=() if place in OWN else pytest.mark.by_hand)
        for place in SERVED_PLACES
    ],
)
@pytest.mark.parametrize("kind", BREAKS)
def test_what_breaks_a_connection(kind: str, at: str) -> None:
    """The worker is given up and comes back with the weights, and no bit changes."""
    stars.require_back(stars.require_right(struck(SIMULATED, kind, at)))


@pytest.mark.parametrize("at", ["Weights", "Commit"])
def test_everyone_dies(at: str) -> None:
    """If all die before the weights are used, the step is made again from the old state."""
    scenario = served(
        SIMULATED, faults=tuple(Fault(kind="kill", step=STEP, rank=n, at=at) for n in range(3))
    )
    trace = stars.run(scenario)
    assert stars.held(trace) == stars.expected(scenario)
    assert {(step, change) for step, _, change in stars.changes(trace)} >= {(STEP, "left")}


@pytest.mark.parametrize("at", ["TreeNode", "Weights", "Commit", "Applied"])
def test_the_coordinator_dies(at: str) -> None:
    """The new coordinator reads the moments from the checkpoint."""
    restart = Fault(kind="restart", step=STEP, at=at)
    scenario = served(SIMULATED, faults=(restart,), optimizer="adamw")
    assert stars.held(stars.run(scenario)) == stars.expected(scenario)


def test_a_run_that_is_stopped_and_resumed() -> None:
    """Stopping twice changes no weights, and the checkpoint has the moments."""
    trace = stars.require_right(served(SIMULATED, stops=(1, 3)))
    assert [set(one.optimizer) for one in trace.of(Saved)] == [{"momentum"}, {"momentum"}]
    assert in_workers(trace) == []


def test_audits_go_with_it() -> None:
    """An audit finds a corrupt worker before anything is averaged."""
    wrong = Fault(kind="corrupt_gradient", step=STEP, rank=1, shard=3, value="0.5")
    scenario = served(SIMULATED, faults=(wrong,))
    trace = stars.run(scenario.with_(options={**scenario.options, "audit_share": 1.0}))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert [one.culprit for one in trace.of(Audit) if one.culprit is not None] == [1]


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Fault(kind="kill", step=STEP, rank=1, at="Weights"),),
        (Fault(kind="cut", step=STEP, rank=1, at="Commit"),),
        tuple(Fault(kind="kill", step=STEP, rank=n, at="Weights") for n in range(3)),
        (Fault(kind="restart", step=STEP, at="Weights"),),
        (Fault(kind="restart", step=STEP, at="Applied"),),
    ],
)
def test_real_processes(faults: tuple[Fault, ...]) -> None:
    """Real processes give the same weights, with and without faults."""
    scenario = served(REAL, faults=faults, optimizer="adamw")
    trace = stars.run(scenario)
    assert stars.held(trace) == stars.expected(scenario)
    assert in_workers(trace) == []


@pytest.mark.parametrize("changes", [{}, {"stops": (2,)}])
@pytest.mark.parametrize("check", ["step_rule", "parity", "worker_count", "resume"])
def test_what_checks_say_of_it(check: str, changes: dict[str, Any]) -> None:
    """The checks hold: the server records its gradient, and workers record their weights."""
    scenario = served(SIMULATED, detail="values", **changes)
    if check == "resume" and not changes:
        return
    family = traces.family(check, scenario)
    finding = traces.judge(check, family)
    assert finding.verdict.name == "HELD", finding
    assert finding.compared > 0


@pytest.mark.parametrize("stops", [(), (2,)])
def test_the_optimizer_s_state_can_t_be_judged(stops: tuple[int, ...]) -> None:
    """F-TI-002 reports that nobody records the server's optimizer state, and compares the rest."""
    finding = traces.judge("optimizer_state", [traces.run(served(SIMULATED, stops=stops))])
    assert finding.verdict.name == "INCONCLUSIVE"
    assert finding.reason.startswith(
        "the server makes the updates: only the server holds the optimizer's state"
    )
    assert bool(finding.compared) == bool(stops)


def test_a_worker_with_a_state_of_its_own_is_not_passed_over() -> None:
    """If one worker records moments, the clause doesn't hold without those of the others."""
    trace = traces.run(served(SIMULATED))
    moments = next(one.weights for one in trace.of(Update))
    finding = traces.judge(
        "replica_identity", [altered(trace, Update, {"rank": 1}, optimizer=moments)]
    )
    assert finding.verdict.name == "INCONCLUSIVE"
    assert "ranks 0, 2 recorded no optimizer" in finding.reason


# --- by hand ----------------------------------------------------------------------------------


def at_work() -> by_hand.Hands:
    """Return three workers that have delivered all of step 0."""
    hands = by_hand.met(served(SIMULATED))
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    return hands


def _averaged(hands: by_hand.Hands) -> None:
    for block in hands.server.reduction.blocks.order():
        hands.server.complete(block)
        assert not isinstance(hands.server.reduce(block), str)


def _states(hands: by_hand.Hands) -> list[bytes]:
    """Return the whole state of all, with the server's moments."""
    server = hands.server.replica
    everything = [*server.replica.arrays.values(), *server.state.values()]
    members = [member.worker for member in hands.members.values()]
    arrays = [array for one in members for array in one.replica.arrays.values()]
    return [array.tobytes() for array in (*everything, *arrays)]


def _sent(hands: by_hand.Hands) -> list[Weights]:
    """Return the server's messages of a step that it has prepared."""
    loss, weight = hands.server.prepare(0)
    order = hands.server.reduction.blocks.order()
    return [Weights(step=0, block=block, loss=loss, weight=weight) for block in order]


def test_nobody_s_state_changes_before_the_commit() -> None:
    """Preparing changes no state of the server, and receiving all blocks none of a worker."""
    hands = at_work()
    before = _states(hands)
    _averaged(hands)
    for message in _sent(hands):
        payload = bytearray(hands.server.payload(message))
        for member in hands.members.values():
            member.require(message, payload)
            member.room(message, len(payload))[:] = payload
            member.hold(message, payload)
    assert _states(hands) == before
    by_hand.commit(hands, 0)
    weights = [one.weights for one in hands.server.recorder.of(Update)]
    assert weights == [stars.expected(hands.server.plan)[0]] * 3
    assert _states(hands) != before


def test_a_step_that_did_not_happen_is_prepared_again() -> None:
    """The step is prepared again from the state before it, with the same bits."""
    hands = at_work()
    _averaged(hands)
    first = [bytes(hands.server.payload(one)) for one in _sent(hands)]
    hands.server.gather(0)
    for rank, shards in by_hand.shards_of(hands).items():
        by_hand.deliver(hands, rank, 0, shards)
    _averaged(hands)
    assert [bytes(hands.server.payload(one)) for one in _sent(hands)] == first


def test_a_worker_gets_no_moments() -> None:
    """A welcome has the size of one for an optimizer without a state."""
    hands = at_work()
    welcome = by_hand.welcome_of(hands.server, 1, 0)
    specs = hands.server.replicas.workload.specs
    assert len(hands.server.payload(welcome)) == checkpoint.state_bytes(specs, "sgd")
    assert hands.members[1].sizes()[Welcome] == checkpoint.state_bytes(specs, "sgd")
    assert hands.members[1].worker.state == {}
    assert set(hands.server.replica.state) == {"momentum"}


def test_what_the_server_alone_knows_is_recorded_by_it() -> None:
    """The server records its gradient, norms and rate, whatever a worker reports."""
    hands = at_work()
    _averaged(hands)
    for message in _sent(hands):
        for member in hands.members.values():
            member.hold(message, bytearray(hands.server.payload(message)))
    worker = hands.members[0]
    worker.make_held(0)
    (said,) = worker.recorder.of(Update)
    assert (said.gradient, said.grad_norm, said.applied_norm, said.optimizer) == (
        {},
        None,
        None,
        {},
    )
    hands.server.apply_average(0)
    by_hand.tell(hands, 0, Applied(step=0))
    (kept,) = hands.server.recorder.of(Update)
    (model,) = (
        one
        for one in traces.run(_reference(Scenario.of(hands.server.plan))).of(Update)
        if one.step == 0
    )
    assert kept.gradient == model.gradient
    names = ("grad_norm", "applied_norm", "learning_rate", "loss", "weights", "buffers")
    assert [getattr(kept, name) for name in names] == [getattr(model, name) for name in names]


def _reference(scenario: Scenario) -> Scenario:
    return scenario.with_(system="reference", world_size=1, options={})


@pytest.mark.parametrize("by_server", [False, True])
def test_what_does_not_come_down_in_this_run_is_refused(by_server: bool) -> None:
    """Averages are refused if the server makes the steps, and new weights if workers do."""
    scenario = served(SIMULATED) if by_server else stars.in_blocks(SIMULATED, 400)
    hands = by_hand.met(scenario)
    other: Message = (
        by_hand.average_of(0, 0) if by_server else Weights(step=0, block=0, loss=1.0, weight=1.0)
    )
    payload = bytes(hands.server.reduction.blocks.num_bytes(0))
    due = (Weights if by_server else Average).__name__
    with pytest.raises(
        ProtocolError, match=f"{type(other).__name__}: this run.s coordinator sends {due}"
    ):
        hands.members[0].require(other, payload)
    assert type(other) not in hands.members[0].sizes()


@pytest.mark.parametrize(
    ("more", "loss", "weight", "why"),
    [
        (4, 1.0, 8.0, "Weights with a payload of"),
        (0, np.inf, 8.0, "Weights weight=8.0 loss=inf"),
        (0, 1.0, 0.0, "Weights weight=0.0 loss=1.0"),
    ],
)
def test_weights_that_are_wrong_are_refused(
    more: int, loss: float, weight: float, why: str
) -> None:
    """Weights of another size are refused, and an impossible loss or weight."""
    hands = by_hand.met(served(SIMULATED))
    message = Weights(step=0, block=0, loss=float(loss), weight=weight)
    with pytest.raises(ProtocolError, match=why):
        hands.members[0].require(message, bytes(hands.server.reduction.blocks.num_bytes(0) + more))


# --- what can be asked for --------------------------------------------------------------------


def test_who_updates_is_one_of_two() -> None:
    """Another value is refused with the two allowed ones."""
    scenario = served(SIMULATED).with_(options={"updates": "nobody"})
    with pytest.raises(UsageError, match="updates='nobody': use workers or server"):
        systems.require_possible(scenario)
    assert not workers.by_server(scenario.with_(options={"updates": "workers"}))


@pytest.mark.parametrize("system", [MESH_SIMULATED, "mesh", "ring", "ring_simulated", "reference"])
def test_it_is_a_star_s(system: str) -> None:
    """Systems without a coordinator that has the state refuse the option."""
    scenario = served(SIMULATED).with_(system=system, options={"updates": "server"})
    with pytest.raises(UsageError, match=f"option='updates' on system {system}: allowed are"):
        systems.require_possible(scenario)


@pytest.mark.parametrize("by_server", [False, True])
def test_a_fault_strikes_at_a_message_that_there_is(by_server: bool) -> None:
    """A fault at a message that is never sent is refused."""
    at, right = ("Average", "Weights") if by_server else ("Weights", "Average")
    scenario = struck(SIMULATED, "cut", at)
    if not by_server:
        scenario = scenario.with_(options={})
    with pytest.raises(UsageError, match=f"fault cut at='{at}' on .*: allowed are .*, {right},"):
        systems.require_possible(scenario)


def test_the_last_round_may_be_short() -> None:
    """Rounds end after a fixed number of steps, and after the last step."""
    rule = Outer.of({"inner_steps": 2, "deadline_s": 5.0})
    assert [step for step in range(5) if rule.ends_round(step, 5)] == [1, 3, 4]
    assert [rule.round_end(step, 5) for step in range(5)] == [2, 2, 4, 4, 5]


def test_the_defaults_are_the_paper_s() -> None:
    """The defaults are 500 steps alone, 0.7 and 0.9."""
    assert Outer.of({}) == Outer(inner_steps=500, outer_learning_rate=0.7, outer_momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 0},
        {"inner_steps": 2.0},
        {"outer_learning_rate": -1.0},
        {"outer_learning_rate": "nan"},
        {"outer_learning_rate": float("nan")},
        {"outer_momentum": 1.0},
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any]) -> None:
    """Values out of range are refused with the option's name and the value."""
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*: use a"):
        Outer.of(options)
