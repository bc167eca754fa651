"""Faults at any time, and how soon after the last one a run goes on.

A worker or the coordinator is cut off in one direction, its clock jumps, its process or its machine
dies, it is started again with another version of the protocol, or the coordinator from an older
checkpoint. Whatever happened, the next step is applied within `bound_s` of the last fault's end,
and ends of different versions never train together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import MAGIC, Decoder, Received
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import VERSION, Welcome
from entrenar_py.train.wire.terms import Run, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.injections import unmeddled
from entrenar_py.train.wire_io.simulation import Node, Simulation
from tests.train.wire_io.fakes import SECRET, FakeMember, FakeServer, run_of
from tests.train.wire_io.mesh_fakes import FakeMeshMember, FakeMeshServer

TIMING = Timing(heartbeat_s=2.0, dead_after_s=10.0, hello_s=4.0, gather_s=100.0)
NUM_WORKERS = 3
OTHER = VERSION + 1  # of the protocol
JUMP_S_MAX = 60.0
# Connecting, loading, and a whole step of this run; two clock ticks, and two attempts to connect.
STEP_S = 6.0
KINDS = (  # each fault with the processes that it can hit
    *((kind, who) for kind in ("deaf", "mute", "ahead", "back") for who in (None, 0, 1, 2)),
    *((kind, who) for kind in ("kill", "vanish") for who in (0, 1, 2)),
    *(("restart", None), ("move", None)),
    *(("version", who) for who in (None, 0, 1, 2)),
)


@dataclass(frozen=True)
class Fault:
    """One fault, `at_s` after the start; `who` is a worker's number, None is the coordinator.

    A `deaf` process gets no bytes for `seconds`, a `mute` one sends none. A clock jumps by
    `seconds`. A killed process, or one whose machine vanishes, is replaced at once. The
    coordinator is started again from a checkpoint `seconds` % 3 steps ago; if it moves, its old
    machine vanished. A process that is replaced by one of another `version` is replaced by one of
    this version after `seconds`; the coordinator as if started again.
    """

    kind: str
    at_s: float
    who: int | None
    seconds: float


def bound_s(faults: list[Fault], worker: type[Worker]) -> float:
    """Return the time within which a run goes on after the last fault's end.

    Silent peers are given up after `dead_after_s`, by a clock that may have jumped back meanwhile.
    A connection between two workers is tried for `hello_s` before they complain.
    """
    back_s = sum(fault.seconds for fault in faults if fault.kind == "back")
    hello_s = TIMING.hello_s if issubclass(worker, MeshWorker) else 0.0
    return TIMING.dead_after_s + back_s + hello_s + STEP_S


class Told(Simulation):
    """A simulation that keeps the reasons for which workers closed connections."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.reasons: list[str] = []
        super().__init__(*arguments, **more)

    def _closed(self, node: Node, peer: do.Peer, reason: str) -> None:
        self.reasons.append(reason)
        super()._closed(node, peer, reason)


class Trial:
    """One run under faults; `applied_s` has the time of each step that was applied."""

    def __init__(self, worker: type[Worker], seed: int) -> None:
        self._is_mesh = issubclass(worker, MeshWorker)
        self.hands, self.applied_s = self._new_hands(), list[float]()
        member = FakeMeshMember if self._is_mesh else FakeMember
        self.simulation = Told(
            self._run(0),
            self.hands,
            member,
            seed=seed,
            meddle=unmeddled,
            timing=TIMING,
            secret=SECRET,
            worker=worker,
            notify=self._notify,
        )
        self.workers: list[Node] = [self.simulation.start(None, "cpu") for _ in range(NUM_WORKERS)]

    def strike(self, fault: Fault) -> float:
        """Inject `fault` now; return the seconds until it has ended."""
        node = None if fault.who is None else self.workers[fault.who]
        match fault.kind:
            case "deaf" | "mute":
                self.simulation.block(node, out=fault.kind == "mute", seconds=fault.seconds)
                return fault.seconds
            case "ahead" | "back":
                clock = self.simulation if node is None else node
                clock.ahead_s += fault.seconds if fault.kind == "ahead" else -fault.seconds
            case "kill" | "vanish":
                assert node is not None
                assert fault.who is not None
                self.simulation.kill(node, silently=fault.kind == "vanish")
                self.workers[fault.who] = self.simulation.start(None, "cpu")
            case "restart" | "move":
                self._restart(int(fault.seconds) % 3, silently=fault.kind == "move")
            case "version":
                self._replace(fault, OTHER)
                self.simulation.later(fault.seconds, lambda: self._replace(fault, VERSION))
                return fault.seconds
        return 0.0

    def _replace(self, fault: Fault, version: int) -> None:
        """Start a process of `version` in place of the one that the fault hits."""
        if fault.who is None:
            self._restart(int(fault.seconds) % 3, silently=False, version=version)
        else:
            self.simulation.kill(self.workers[fault.who])
            self.workers[fault.who] = self.simulation.start(None, "cpu", version=version)

    def _restart(self, lost_steps: int, *, silently: bool, version: int = VERSION) -> None:
        """Start the coordinator again; the last checkpoints are lost."""
        step = max(0, self.step - lost_steps)
        self.hands = self._new_hands()
        self.hands.made = list(range(step))
        run = self._run(step)
        self.simulation.restart(run, self.hands, silently=silently, version=version)

    @property
    def step(self) -> int:
        """The number of steps that the coordinator has applied, or seen applied in a mesh."""
        return self.simulation.coordinator.machine.step

    def _new_hands(self) -> FakeServer:
        return FakeMeshServer() if self._is_mesh else FakeServer()

    def _run(self, first: int) -> Run:
        usual: dict[str, Any] = {"num_shards": 24, "num_steps": 10**6, "awaited": {}}
        ranks = 2 * NUM_WORKERS  # a rank that vanished is taken until it counts as dead
        return run_of(world_size=ranks, first_step=first, resumed=first > 0, **usual)

    def _notify(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Gather):
            self.applied_s.append(self.simulation.now)
        if isinstance(effect, do.Send) and isinstance(effect.message, Welcome):
            worker = self.simulation._connections[effect.peer].node.end
            assert worker.version == self.simulation.coordinator.version, "admitted"


def run(worker: type[Worker], faults: list[Fault], seed: int) -> Trial:
    """Run under `faults` until the bound after the last one; nothing ends the run before that."""
    trial = Trial(worker, seed)
    ends_s = 0.0

    def strike(fault: Fault) -> None:
        nonlocal ends_s
        ends_s = max(ends_s, trial.simulation.now + trial.strike(fault))

    for fault in faults:
        trial.simulation.later(fault.at_s, partial(strike, fault))
    last_s = max((fault.at_s + fault.seconds for fault in faults), default=0.0)
    finish = trial.simulation.run(until_s=last_s + bound_s(faults, worker) + 1.0)
    assert "of virtual time" in finish.reason, finish
    in_time = [when for when in trial.applied_s if when > ends_s]
    assert in_time, f"no step after {ends_s}: {trial.applied_s[-3:]}"
    assert in_time[0] - ends_s <= bound_s(faults, worker)
    return trial


FAULTS = st.builds(
    lambda hit, at_s, seconds: Fault(hit[0], at_s, hit[1], seconds),
    st.sampled_from(KINDS),
    st.floats(0.0, 40.0),
    st.floats(0.5, JUMP_S_MAX),
)


@pytest.mark.parametrize("worker", [Worker, MeshWorker])
@settings(max_examples=settings().max_examples // 8)
@given(faults=st.lists(FAULTS, max_size=4), seed=st.integers(0, 2**32))
def test_a_run_goes_on(worker: type[Worker], faults: list[Fault], seed: int) -> None:
    """After any faults at any times a step is applied within the bound."""
    trial = run(worker, faults, seed)
    for node in trial.workers:
        made = node.end.hands.made  # type: ignore[attr-defined]
        assert made == list(range(len(made)))


@pytest.mark.parametrize(("kind", "who"), [hit for hit in KINDS if hit[1] in (None, 0)])
def test_a_fault_alone(kind: str, who: int | None) -> None:
    """Each fault, of the coordinator or of a worker."""
    run(MeshWorker, [Fault(kind, 5.0, who, 25.0)], seed=0)


@pytest.mark.parametrize("worker", [Worker, MeshWorker])
@pytest.mark.parametrize("who", [None, 0])
def test_the_reason_names_both_versions(worker: type[Worker], who: int | None) -> None:
    """The worker reads the first frame of the coordinator, whichever of them is newer."""
    theirs, ours = (OTHER, VERSION) if who is None else (VERSION, OTHER)
    trial = run(worker, [Fault("version", 5.0, who, 25.0)], seed=0)
    reason = f"version={theirs}: this end speaks version {ours}"
    assert trial.simulation.reasons.count(reason) > 1


@pytest.mark.parametrize("worker", [Worker, MeshWorker])
@pytest.mark.parametrize("who", [None, 0])
def test_an_end_that_reads_any_version_is_found(
    worker: type[Worker], who: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: frames of other versions are read as if they were of this one."""
    right = Decoder._end_prefix

    def any_version(decoder: Decoder) -> Received | None:
        (decoder.version,) = decoder._prefix[len(MAGIC) : len(MAGIC) + 1]
        return right(decoder)

    monkeypatch.setattr(Decoder, "_end_prefix", any_version)
    with pytest.raises(AssertionError, match="admitted"):
        run(worker, [Fault("version", 5.0, who, 25.0)], seed=0)
