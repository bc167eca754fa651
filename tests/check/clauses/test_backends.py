"""Chains of backends, manifests of gradients, memory, and shares of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from entrenar_py import compute, systems
from entrenar_py.check.clauses import backends
from entrenar_py.check.clauses.backends import (
    ORDER,
    plan_chains,
    plan_manifests,
)
from entrenar_py.compute import Backend
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Attempt,
    End,
    Event,
    Halt,
    Held,
    Injected,
    Manifest,
    Memory,
    Product,
    Start,
    Trace,
)
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import broken, falsified, left_open

# --- chains ---------------------------------------------------------------------------------------

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


def chain_trace(
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
    return traces.hand_written(*events, subject=scenario, end=End(status=status))


def test_honest_chains_hold() -> None:
    """A result after failures with reasons holds, and so does a halt with all reasons."""
    served = chain_trace(NO_CUDA, NO_WGPU, BY_CPU, RESULT)
    halted = chain_trace(NO_CUDA, NO_WGPU, NO_CPU, HALT, faults=(CUDA, WGPU, CPU))
    short = chain_trace(NO_WGPU, BY_CPU, RESULT, faults=(WGPU,), order=("wgpu", "cpu"))
    finding = traces.judge("fallback", [served, halted, short])
    assert (finding.verdict, finding.reason) == (Verdict.HELD, "")
    assert finding.compared > 10


def test_own_failures_and_software_are_noted() -> None:
    """A backend that failed without a planned fault is noted, and so is a software adapter."""
    result = replace(RESULT, backend="wgpu")
    finding = traces.judge("fallback", [chain_trace(NO_CUDA, BY_WGPU, result, faults=())])
    assert finding.verdict is Verdict.HELD
    assert finding.notes == (
        "cuda failed without a planned fault: cuda is full",
        "software adapter llvmpipe",
    )


def test_stand_ins_are_noted() -> None:
    """A note says which device was simulated."""
    played = replace(NO_CUDA, device="stand-in, for backend cuda: no driver")
    finding = traces.judge("fallback", [chain_trace(played, NO_WGPU, BY_CPU, RESULT)])
    assert finding.notes == ("cuda was simulated by a stand-in, for backend cuda: no driver",)


def test_a_fault_that_never_struck_is_inconclusive() -> None:
    """A planned fault that never struck is named, and makes the run inconclusive."""
    calm = chain_trace(NO_CUDA, NO_WGPU, BY_CPU, RESULT, struck=False, faults=(WGPU,))
    reason = left_open("fallback", calm)
    assert "the planned out_of_memory of wgpu never struck, in a chain of cuda" in reason


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (chain_trace(NO_WGPU, NO_CUDA, BY_CPU, RESULT), "tried out of order"),
        (chain_trace(NO_CUDA, BY_CPU, RESULT), "tried out of order"),
        (
            chain_trace(replace(NO_CUDA, reason=""), NO_WGPU, BY_CPU, RESULT),
            "cuda failed without a",
        ),
        (
            chain_trace(NO_CUDA, BY_WGPU, replace(RESULT, backend="wgpu")),
            "wgpu served although it was",
        ),
        (
            chain_trace(NO_CUDA, BY_WGPU, BY_CPU, RESULT, faults=(CUDA,)),
            "wgpu served and the chain continued",
        ),
        (chain_trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, finite=False)), "does not confirm"),
        (chain_trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, error_f64=0.5)), "off by 0.5"),
        (
            chain_trace(NO_CUDA, NO_WGPU, BY_CPU, replace(RESULT, result_shape=(2, 3))),
            "does not confirm",
        ),
        (chain_trace(NO_CUDA, NO_WGPU, BY_CPU), "does not come from the one backend that served"),
        (
            chain_trace(NO_CUDA, NO_WGPU, NO_CPU, RESULT),
            "does not come from the one backend that served",
        ),
        (chain_trace(NO_CUDA, NO_WGPU, NO_CPU), "neither a result nor a halt"),
        (chain_trace(RESULT), "tried out of order"),
        (chain_trace(NO_CUDA, NO_WGPU, NO_CPU, HALT), "no fault was planned for cpu"),
        (chain_trace(NO_CUDA, HALT, faults=(CUDA, WGPU, CPU)), "though wgpu did not fail"),
        (chain_trace(NO_CUDA, NO_WGPU, NO_CPU, HALT, RESULT, faults=(CPU,)), "returned a product"),
        (
            chain_trace(NO_CUDA, NO_WGPU, NO_CPU, replace(HALT, reason="oops"), faults=(CPU,)),
            "does not say why cuda failed: oops",
        ),
    ],
)
def test_dishonest_chains_are_falsified(wrong: Trace, message: str) -> None:
    """Skipped backends, faked results, crashes and missing reasons are each falsified."""
    found = falsified("fallback", wrong)
    assert message in found.message
    assert found.scenario == wrong.scenario.to_dict()


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "no run of the backend chain was recorded"),
        ([chain_trace(faults=(), system="reference")], "system reference shows no fallback"),
        ([replace(chain_trace(), events=())], "the trace has no end event"),
    ],
)
def test_nothing_to_compare_is_inconclusive(runs: list[Trace], reason: str) -> None:
    """No trace, another system's trace, and a failed run are inconclusive, with a reason."""
    assert reason in left_open("fallback", *runs)


def test_plan_covers_every_fault() -> None:
    """Each backend, each pair and all three fail in every way, and after no working backend."""
    planned = [
        tuple((fault.backend, fault.kind) for fault in scenario.faults)
        for scenario in plan_chains(traces.clause("fallback"))
    ]
    assert [len(faults) for faults in planned] == [0] + [1] * 12 + [2] * 48 + [3] * 64 + [1, 2] * 3
    assert len(set(planned)) == len(planned)
    for scenario in plan_chains(traces.clause("fallback")):
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
        monkeypatch.setitem(compute.BACKENDS, name, present if gpus == "present" else no_device)
    planned = plan_chains(traces.clause("fallback"))
    finding = traces.judge("fallback", [systems.run(scenario) for scenario in planned])
    assert (finding.verdict, finding.reason) == (Verdict.HELD, "")
    played = any("simulated by a stand-in" in note for note in finding.notes)
    assert gpus == "real" or played == (gpus == "absent")


# --- manifests ------------------------------------------------------------------------------------

WEIGHT, BIAS = ("weight", (3, 2), "float32"), ("bias", (3,), "float32")
ON_CPU = Manifest(backend="cpu", entries=(WEIGHT, BIAS))
ON_WGPU = Manifest(backend="wgpu", entries=(WEIGHT, BIAS), device="llvmpipe", software=True)
NO_DRIVER = Attempt(backend="cuda", served=False, reason="no driver")


def manifest_trace(*events: Event, status: str = "completed") -> Trace:
    scenario = Scenario(system="manifest", workload="mlp", world_size=1, seed=0)
    end = End(status=status, reason="it crashed" if status == "failed" else "")
    return traces.hand_written(*events, subject=scenario, end=end)


def test_equal_manifests_hold() -> None:
    """Equal manifests hold; a skipped backend and a software adapter are named."""
    finding = traces.judge("manifest", [manifest_trace(ON_CPU, ON_WGPU, NO_DRIVER)])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 4)
    assert finding.notes == ("skipped: cuda (no driver)", "software adapter llvmpipe")


def test_the_models_word_is_no_backend() -> None:
    """The model's manifest is compared first wherever it stands, and is no backend's."""
    declared = replace(ON_CPU, backend="model")
    held = traces.judge("manifest", [manifest_trace(ON_CPU, ON_WGPU, declared)])
    assert (held.verdict, held.compared) == (Verdict.HELD, 6)
    alone = traces.judge("manifest", [manifest_trace(declared, ON_CPU)])
    assert "given: cpu; skipped: none" in alone.reason
    both = [replace(manifest, entries=(WEIGHT,)) for manifest in (ON_CPU, ON_WGPU)]
    finding = traces.judge("manifest", [manifest_trace(declared, *both)])
    assert finding.reason == "gradient 1 on cpu differs from the one on model"


@pytest.mark.parametrize(
    ("entries", "position", "tensor"),
    [
        ((BIAS, WEIGHT), 0, "weight"),
        ((WEIGHT, ("bias", (3, 1), "float32")), 1, "bias"),
        ((WEIGHT, ("bias", (3,), "float64")), 1, "bias"),
        ((("Weight", (3, 2), "float32"), BIAS), 0, "weight"),
        ((WEIGHT,), 1, "bias"),
        ((WEIGHT, BIAS, ("scale", (1,), "float32")), 2, "scale"),
    ],
)
def test_different_manifests_are_falsified(
    entries: tuple[tuple[str, tuple[int, ...], str], ...], position: int, tensor: str
) -> None:
    """Order, shape, dtype, name, and length each falsify; the first difference is named."""
    finding = traces.judge("manifest", [manifest_trace(ON_CPU, replace(ON_WGPU, entries=entries))])
    found = broken(finding)
    assert finding.reason == f"gradient {position} on wgpu differs from the one on cpu"
    assert found.tensor == tensor


def test_no_gradients_at_all_is_falsified() -> None:
    """Two empty manifests are equal but falsified, since no gradient was produced."""
    empty = [replace(manifest, entries=()) for manifest in (ON_CPU, ON_WGPU)]
    finding = traces.judge("manifest", [manifest_trace(*empty)])
    assert finding.reason == "cpu produced no gradient at all"


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "no gradient manifest was recorded"),
        ([manifest_trace(ON_CPU, NO_DRIVER)], "given: cpu; skipped: cuda (no driver)"),
        ([manifest_trace()], "given: none; skipped: none"),
        ([manifest_trace(status="failed")], "it crashed"),
        ([manifest_trace(ON_CPU, ON_WGPU), manifest_trace(ON_CPU)], "two backends are needed"),
    ],
)
def test_too_few_backends_are_inconclusive(runs: list[Trace], reason: str) -> None:
    """Fewer than two backends in a run are inconclusive, and skipped backends are named."""
    assert reason in left_open("manifest", *runs)


def test_plan_covers_every_workload() -> None:
    """The plan has every workload's gradient on every backend."""
    planned = plan_manifests(traces.clause("manifest"))
    assert [one.workload for one in planned] == ["linear", "mlp", "decoder"]
    assert {one.backends for one in planned} == {("cpu", "wgpu", "cuda")}


# --- memory ---------------------------------------------------------------------------------------

UNIT = 2**20


def measured(
    *,
    peak: int = 900,
    baseline: int = 500,
    estimate: int = 600,
    budget: int = 1000,
    world_size: int = 1,
) -> Trace:
    """Return a run with this measurement of worker 0, in units large enough to be judged."""
    peak, baseline, estimate, budget = (UNIT * n for n in (peak, baseline, estimate, budget))
    facts = {"peak_bytes": peak, "baseline_bytes": baseline, "budget_bytes": budget}
    memory = Memory(rank=0, backend="cpu", estimate_bytes=estimate, **facts)
    return traces.hand_written(memory, subject=traces.scenario(world_size=world_size))


@pytest.mark.parametrize(
    "trace", [measured(), measured(budget=900), measured(estimate=400), measured(estimate=600)]
)
def test_within_budget_and_foreseen(trace: Trace) -> None:
    """A peak within the budget, and an estimate of 1 to 1.5 times the growth, hold."""
    finding = traces.judge("memory", [trace])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)


@pytest.mark.parametrize(
    ("trace", "message", "got"),
    [
        (measured(budget=899), "budget is", 900),
        (measured(estimate=399), "the estimate was", 400),
        (measured(estimate=601), "the estimate was", 400),
        (measured(peak=500), "grew by 0 bytes, but the estimate was", 0),
        (measured(peak=601, estimate=100), "the estimate was", 101),
    ],
)
def test_over_budget_or_unforeseen(trace: Trace, message: str, got: int) -> None:
    """A peak over the budget, or an estimate that is too low or too high, names the rank."""
    found = falsified("memory", trace)
    assert (found.rank, found.got) == (0, str(got * UNIT))
    assert message in found.message


@pytest.mark.parametrize("peak", [500, 501, 627])
def test_small_models_are_bounded_only(peak: int) -> None:
    """Below 128 MiB an estimate may be any upper bound, since free memory may hide growth."""
    finding = traces.judge("memory", [measured(peak=peak, estimate=127)])
    assert finding.verdict is Verdict.HELD


def test_every_rank_is_asked_for() -> None:
    """A rank without a measurement is named, and the run is inconclusive."""
    assert (
        left_open("memory", measured(world_size=3)) == "the memory of ranks [1, 2] was not measured"
    )
    nothing = traces.judge("memory", [traces.hand_written()])
    assert nothing.reason.startswith("no worker's memory was measured: F-HET-002 is decided by a")


@pytest.mark.slow
def test_real_workers_hold() -> None:
    """Workers, each in a process of its own, stay within what was foreseen.

    Of the first scenario of the plan; `make verify` runs all of it.
    """
    subject = backends.plan_memory(traces.clause("memory"))[0]
    finding = traces.judge("memory", [traces.run(subject)])
    assert finding.verdict is Verdict.HELD, finding


def on_device(*, peak: int = 9, estimate: int = 9, reported: int | None = None) -> Trace:
    """Return a run whose worker is on an adapter."""
    return traces.hand_written(
        Memory(
            rank=0,
            backend="wgpu",
            peak_bytes=UNIT * peak,
            baseline_bytes=0,
            estimate_bytes=UNIT * estimate,
            budget_bytes=UNIT * 10,
            reported_bytes=reported,
        ),
        subject=traces.scenario(world_size=1, backends=("wgpu",)),
    )


def test_on_a_device_little_stands_out() -> None:
    """An estimate of 9 MiB on a device is compared with the memory that was needed."""
    assert traces.judge("memory", [on_device()]).verdict is Verdict.HELD
    falsified("memory", on_device(peak=5))
    assert traces.judge("memory", [on_device(peak=3, estimate=7)]).verdict is Verdict.HELD


def test_what_a_device_does_not_say_is_said() -> None:
    """A note says if a device reports no memory size, so that the scenario's budget counts."""
    silent, telling = (traces.judge("memory", [on_device(reported=n)]) for n in (None, 2**40))
    assert any("wgpu reports no size of its memory" in note for note in silent.notes)
    assert not telling.notes


def test_a_device_that_is_not_there_is_noted() -> None:
    """The rank of an absent device is not missing; without any measured rank nothing compares."""
    absent = traces.hand_written(
        Attempt(backend="wgpu", served=False, reason="no adapter"),
        subject=traces.scenario(world_size=1, backends=("wgpu",)),
    )
    left_open("memory", absent)
    together = traces.judge("memory", [absent, measured()])
    assert together.verdict is Verdict.HELD
    assert "not measured: wgpu (no adapter)" in together.notes


# --- shares ---------------------------------------------------------------------------------------


def held(*sizes: int) -> Trace:
    """Return a run whose ranks hold so many of 1000 bytes that two ranks share."""
    starts = [Start(step=0, rank=rank, weights={}) for rank in range(2)]
    ranks = [
        Held(rank=rank, num_parts=2, held_bytes=size, whole_bytes=1000)
        for rank, size in enumerate(sizes)
    ]
    return traces.hand_written(*starts, *ranks)


@pytest.mark.parametrize(
    ("sizes", "verdict", "rank"),
    [
        ((500, 525), Verdict.HELD, None),
        ((500, 526), Verdict.FALSIFIED, 1),
        ((500,), Verdict.INCONCLUSIVE, None),
    ],
)
def test_a_share_is_one_part_and_little_more(
    sizes: tuple[int, ...], verdict: Verdict, rank: int | None
) -> None:
    """A rank that holds more is named; a rank without a recorded size is missing."""
    finding = traces.judge("holdings", [held(*sizes)])
    assert finding.verdict is verdict, finding
    found = finding.counterexample
    assert (None if found is None else found.rank) == rank
