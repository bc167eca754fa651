"""Silent corruption in both stars, without audits and with them."""

from __future__ import annotations

import pytest

from entrenar_py.shared import systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Audit, Halt, Membership, Shard, Trace
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.systems import stars
from tests.systems.stars import REAL, SIMULATED, subject

ONCE = Fault(kind="corrupt_gradient", step=1, rank=1, shard=3, value="0.5")
LASTING = Fault(kind="corrupt_worker", step=1, rank=1, value="0.5")


def audited(system: str, *faults: Fault, share: float = 1.0, **changes: object) -> Scenario:
    """Return a run of eight shards a step, in two blocks."""
    options = {**subject(system).options, "audit_share": share, "block_bytes": 4}
    return subject(system, options=options, faults=faults, **changes)


def caught(trace: Trace) -> list[tuple[int, int | None, int]]:
    """Return step, rank and shard of each culprit that an audit named."""
    audits = trace.of(Audit)
    return [(one.step, one.culprit, one.shard) for one in audits if one.culprit is not None]


@pytest.mark.parametrize("fault", [ONCE, LASTING])
def test_nobody_sees_it_without_audits(fault: Fault) -> None:
    """Without audits corruption changes the weights, and all other checks hold.

    Replicas agree, nothing is infinite, and each worker records the correct gradient.
    """
    scenario = subject(SIMULATED, faults=(fault,))
    trace = traces.run(scenario)
    held, expected = stars.held(trace), stars.expected(scenario)
    assert held[:1] == expected[:1]
    assert all(ours != theirs for ours, theirs in zip(held[1:], expected[1:], strict=True))
    calm = traces.run(scenario.with_(faults=()))
    first = [one for one in trace.of(Shard) if one.step < 2]
    assert first == [one for one in calm.of(Shard) if one.step < 2]
    for check in ("replica_identity", "coverage", "finiteness", "liveness", "step_rule"):
        finding = traces.judge(check, [trace])
        assert finding.verdict is not Verdict.FALSIFIED, finding


@pytest.mark.parametrize("system", [SIMULATED, REAL])
def test_it_is_caught(system: str) -> None:
    """The worker is named and comes back, and the weights are those of the undisturbed run."""
    trace = stars.run(audited(system, ONCE))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert caught(trace) == [(1, 1, 3)]
    assert stars.changes(trace) == [(1, 1, "left"), (2, 1, "joined")]
    assert len(trace.of(Audit)) == 5 * 8
    # Each shard of each step is recorded once, audited or not, and no sample is drawn twice.
    assert len(trace.of(Shard)) == 5 * 8


@pytest.mark.parametrize("system", [SIMULATED, REAL])
def test_who_is_wrong_for_good_is_not_let_in_a_third_time(system: str) -> None:
    """A worker that was caught twice is barred; the other two go on, and audit each other."""
    trace = stars.run(audited(system, LASTING, num_steps=6))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert [(step, rank) for step, rank, _ in caught(trace)] == [(1, 1), (2, 1)]
    assert stars.changes(trace) == [(1, 1, "left"), (2, 1, "joined"), (2, 1, "left")]
    assert all(len(set(one.ranks)) > 1 for one in trace.of(Audit))


def test_another_coordinator_does_not_wait_for_it() -> None:
    """The run goes on without a barred worker, even if the coordinator that barred it has died."""
    restart = Fault(kind="restart", step=4, at="TreeNode")
    trace = stars.run(audited(SIMULATED, LASTING, restart, num_steps=6))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert {rank for _, rank, _ in caught(trace)} == {1}


def test_what_is_not_finite_is_not_silent() -> None:
    """If a shard is corrupted and not finite, the guard comes first, and the run halts."""
    nan = Fault(kind="non_finite_gradient", step=1, rank=1, shard=3, value="nan")
    trace = stars.run(subject(SIMULATED, faults=(nan, ONCE)))
    (halt,) = trace.of(Halt)
    assert (halt.step, halt.rank, halt.shard) == (1, 1, 3)


def test_two_that_stay_with_it_halt() -> None:
    """With two workers that disagree, the culprit is unknown, and the run halts before the step."""
    trace = stars.run(audited(SIMULATED, LASTING, world_size=2))
    (halt,) = trace.of(Halt)
    assert (trace.end.status, halt.step, halt.rank) == ("halted", 1, None)
    assert halt.reason.startswith(f"workers [0, 1] disagree on shard {halt.shard} of step 1, and")
    assert caught(trace) == []


def test_who_is_alone_says_so() -> None:
    """With a single worker, each audit in the trace has that worker alone."""
    trace = stars.run(audited(SIMULATED, world_size=1))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert {one.ranks for one in trace.of(Audit)} == {(0,)}


def test_an_auditor_killed_and_a_culprit_in_one_step() -> None:
    """Both leave, others take over, and two workers complete the audit."""
    kill = Fault(kind="kill", step=1, rank=2, at="TreeNode")
    trace = stars.run(audited(SIMULATED, ONCE, kill, world_size=5))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert caught(trace) == [(1, 1, 3)]
    assert {one.rank for one in trace.of(Membership)} == {1, 2}


@pytest.mark.parametrize("system", ["mesh", "ring", "mesh_simulated", "ring_simulated"])
def test_who_can_not_audit_says_so(system: str) -> None:
    """Systems without audits refuse the option."""
    scenario = subject(system, options={"audit_share": 1.0})
    with pytest.raises(UsageError, match=f"option='audit_share' on system {system}: allowed are"):
        systems.require_possible(scenario)
