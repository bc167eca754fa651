"""F-DP-004: the judge's findings on chains that are right, crash, or fake a result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.check.clauses.backends import ORDER, judge_chains, plan_chains
from entrenar_py.check.contract import Invariant
from entrenar_py.compute import Backend
from entrenar_py.compute.cpu import open_cpu
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, End, Event, Halt, Injected, Product, Trace
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses.traces import several

INVARIANT = Invariant(
    id="F-DP-004",
    name="fallback",
    statement="always a finite result",
    position=Position("c.yaml", 1, 1),
)
CUDA, WGPU, CPU = (Fault(kind="out_of_memory", backend=name) for name in ORDER)
NO_CUDA = Attempt(backend="cuda", served=False, reason="cuda is full")
NO_WGPU = Attempt(backend="wgpu", served=False, reason="wgpu is full")
NO_CPU = Attempt(backend="cpu", served=False, reason="cpu is full")
BY_WGPU = Attempt(backend="wgpu", served=True, device="llvmpipe", software=True)
BY_CPU = Attempt(backend="cpu", served=True, device="x86")
RESULT = Product(
    backend="cpu",
    device="x86",
    software=False,
    shape=(3, 5, 2),
    result_shape=(3, 2),
    layout="plain",
    magnitude=1.0,
    finite=True,
    error_cpu=0.0,
    error_f64=1e-7,
    bound=1e-6,
    stated=False,
    digest="00",
    element=4,
)
HALT = Halt(step=0, reason="cuda: cuda is full; wgpu: wgpu is full; cpu: cpu is full")


def trace(
    *events: Event,
    faults: tuple[Fault, ...] = (CUDA, WGPU),
    system: str = "backend_chain",
    order: tuple[str, ...] = ORDER,
    struck: bool = True,
) -> Trace:
    scenario = Scenario(
        system=system, workload="linear", world_size=1, seed=0, backends=order, faults=faults
    )
    if struck:
        events = (*(Injected(fault=fault.to_dict()) for fault in faults), *events)
    status = "halted" if any(isinstance(event, Halt) for event in events) else "completed"
    end = End(status=status)
    return Trace(scenario=scenario, environment={}, promises=(), events=(*events, end))


def test_honest_chains_hold() -> None:
    """A result after failures with reasons holds, and so does a halt with all reasons."""
    served = trace(NO_CUDA, NO_WGPU, BY_CPU, RESULT)
    halted = trace(NO_CUDA, NO_WGPU, NO_CPU, HALT, faults=(CUDA, WGPU, CPU))
    short = trace(NO_WGPU, BY_CPU, RESULT, faults=(WGPU,), order=("wgpu", "cpu"))
    finding = judge_chains(INVARIANT, several([served, halted, short]))
    assert (finding.verdict, finding.reason) == (Verdict.HELD, "")
    assert finding.compared > 10


def test_own_failures_and_software_are_noted() -> None:
    """A backend that failed without a planned fault is noted, and so is a software adapter."""
    result = replace(RESULT, backend="wgpu")
    finding = judge_chains(INVARIANT, several([trace(NO_CUDA, BY_WGPU, result, faults=())]))
    assert finding.verdict is Verdict.HELD
    assert finding.notes == ("cuda failed by itself: cuda is full", "software adapter llvmpipe")


def test_stand_ins_are_noted() -> None:
    """A note says which device was simulated."""
    played = replace(NO_CUDA, device="stand-in, for backend cuda: no driver")
    finding = judge_chains(INVARIANT, several([trace(played, NO_WGPU, BY_CPU, RESULT)]))
    assert finding.notes == ("cuda was simulated by a stand-in, for backend cuda: no driver",)


def test_a_fault_that_never_struck_is_inconclusive() -> None:
    """A planned fault that never struck is named, and makes the run inconclusive."""
    finding = judge_chains(
        INVARIANT, several([trace(NO_CUDA, NO_WGPU, BY_CPU, RESULT, struck=False, faults=(WGPU,))])
    )
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "the planned out_of_memory of wgpu never struck, in a chain of cuda" in finding.reason


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (trace(NO_WGPU, NO_CUDA, BY_CPU, RESULT), "tried out of order"),
        (trace(NO_CUDA, BY_CPU, RESULT), "tried out of order"),
        (trace(replace(NO_CUDA, reason=""), NO_WGPU, BY_CPU, RESULT), "cuda failed without a"),
        (trace(NO_CUDA, BY_WGPU, replace(RESULT, backend="wgpu")), "wgpu served although it was"),
        (trace(NO_CUDA, BY_WGPU, BY_CPU, RESULT, faults=(CUDA,)), "wgpu served and the chain went"),
        (trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, finite=False)), "does not confirm"),
        (trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, error_f64=0.5)), "off by 0.5"),
        (trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, result_shape=(2, 3))), "does not confirm"),
        (trace(NO_CUDA, NO_WGPU, BY_CPU), "does not come from the one backend that served"),
        (trace(NO_CUDA, NO_WGPU, NO_CPU, RESULT), "does not come from the one backend that served"),
        (trace(NO_CUDA, NO_WGPU, NO_CPU), "neither a result nor a halt"),
        (trace(RESULT), "tried out of order"),
        (trace(NO_CUDA, NO_WGPU, NO_CPU, HALT), "no fault was planned for cpu"),
        (trace(NO_CUDA, HALT, faults=(CUDA, WGPU, CPU)), "though wgpu did not fail"),
        (trace(NO_CUDA, NO_WGPU, NO_CPU, HALT, RESULT, faults=(CPU,)), "returned a product"),
        (
            trace(NO_CUDA, NO_WGPU, NO_CPU, replace(HALT, reason="oops"), faults=(CPU,)),
            "does not say why cuda failed: oops",
        ),
    ],
)
def test_dishonest_chains_are_falsified(wrong: Trace, message: str) -> None:
    """Skipped backends, faked results, crashes and missing reasons are each falsified."""
    finding = judge_chains(INVARIANT, several([wrong]))
    assert finding.verdict is Verdict.FALSIFIED
    assert message in finding.reason
    assert finding.counterexample is not None
    assert finding.counterexample.scenario == wrong.scenario.to_dict()


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ([], "no run of the backend chain was recorded"),
        ([trace(faults=(), system="reference")], "system reference shows no fallback"),
        ([replace(trace(), events=())], "the trace has no end event"),
    ],
)
def test_nothing_to_compare_is_inconclusive(traces: list[Trace], reason: str) -> None:
    """No trace, another system's trace, and a failed run are inconclusive, with a reason."""
    finding = judge_chains(INVARIANT, several(traces))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert reason in finding.reason


def test_plan_covers_every_fault() -> None:
    """Each backend, each pair and all three fail in every way, and after no working backend."""
    planned = [
        tuple((fault.backend, fault.kind) for fault in scenario.faults)
        for scenario in plan_chains(INVARIANT)
    ]
    assert [len(faults) for faults in planned] == [0] + [1] * 12 + [2] * 48 + [3] * 64 + [1, 2] * 3
    assert len(set(planned)) == len(planned)
    for scenario in plan_chains(INVARIANT):
        failing = tuple(fault.backend for fault in scenario.faults)
        assert scenario.backends[: len(failing)] == failing
        assert scenario.backends[-1] == "cpu"


def no_device() -> Backend:
    raise BackendUnavailable("no driver")


@pytest.mark.parametrize("gpus", ["real", "present", "absent"])
def test_the_plan_holds_on_any_machine(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine every planned fault strikes, and the chain handles it."""
    for name in ("cuda", "wgpu") if gpus != "real" else ():
        present = partial(replace, open_cpu(), name=name)
        monkeypatch.setitem(backends.BACKENDS, name, present if gpus == "present" else no_device)
    finding = judge_chains(
        INVARIANT, several([systems.run(scenario) for scenario in plan_chains(INVARIANT)])
    )
    assert (finding.verdict, finding.reason) == (Verdict.HELD, "")
    played = any("simulated by a stand-in" in note for note in finding.notes)
    assert gpus == "real" or played == (gpus == "absent")
