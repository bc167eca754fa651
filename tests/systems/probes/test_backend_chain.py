"""The fallback chain under injected faults, on a machine where all three backends work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.compute import Backend, chain
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.compute.wgpu import open_wgpu
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.faults import OF_ADAPTERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Halt, Injected, Product
from entrenar_py.systems.probes import backend_chain

KINDS = ("absent", "init_error", "out_of_memory", "non_finite_output")


@pytest.fixture(autouse=True)
def _three_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU under the names of the GPUs, as on a machine where everything works."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", named("cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", named("wgpu"))


def named(name: str) -> Callable[[], Backend]:
    return lambda: replace(open_cpu(), name=name)


def absent(name: str) -> Callable[[], Backend]:
    def open_backend() -> Backend:
        raise BackendUnavailable(f"backend {name}: no driver")

    return open_backend


def scenario(
    *faults: Fault, order: tuple[str, ...] = chain.ORDER, options: dict[str, Any] | None = None
) -> Scenario:
    return Scenario(
        system="backend_chain",
        workload="linear",
        world_size=1,
        seed=1,
        backends=order,
        faults=faults,
        options=options or {},
    )


def test_the_first_backend_serves() -> None:
    """Without faults the first backend serves its own product and nothing else is tried."""
    trace = backend_chain.run(scenario())
    assert [(a.backend, a.served) for a in trace.of(Attempt)] == [("cuda", True)]
    (product,) = trace.of(Product)
    assert (product.backend, product.shape) == ("cuda", (33, 65, 17))
    assert product.error_f64 <= product.bound
    assert trace.end.status == "completed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_strikes_once_and_the_next_serves(kind: str) -> None:
    """The faulty backend fails with a reason that names the fault, and the next one serves."""
    fault = Fault(kind=kind, backend="cuda")
    trace = backend_chain.run(scenario(fault))
    assert [event.fault for event in trace.of(Injected)] == [fault.to_dict()]
    failed, served = trace.of(Attempt)
    assert (failed.backend, served.backend, served.served) == ("cuda", "wgpu", True)
    expected = "not finite" if kind == "non_finite_output" else "(injected)"
    assert expected in failed.reason
    assert [p.backend for p in trace.of(Product)] == ["wgpu"]


def test_everything_fails() -> None:
    """The run halts with every reason and without a product when no backend is left."""
    faults = [Fault(kind="out_of_memory", backend=name) for name in chain.ORDER]
    trace = backend_chain.run(scenario(*faults))
    (halt,) = trace.of(Halt)
    assert all(attempt.reason in halt.reason for attempt in trace.of(Attempt))
    assert (len(trace.of(Attempt)), trace.of(Product)) == (3, [])
    assert trace.end.status == "halted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_strikes_where_there_is_no_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in takes the place of a missing device, and fails as planned."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", absent("cuda"))
    fault = Fault(kind=kind, backend="cuda")
    trace = backend_chain.run(scenario(fault))
    failed, served = trace.of(Attempt)
    assert [event.fault for event in trace.of(Injected)] == [fault.to_dict()]
    assert (failed.backend, failed.served) == ("cuda", False)
    opened = kind in ("out_of_memory", "non_finite_output")
    assert failed.device == ("stand-in, for backend cuda: no driver" if opened else "")
    assert (served.backend, served.served) == ("wgpu", True)


def test_no_stand_in_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails by itself gives its own reason, whatever is planned for others."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", absent("cuda"))
    trace = backend_chain.run(scenario(Fault(kind="out_of_memory", backend="wgpu")))
    assert trace.of(Attempt)[0].reason == "no driver"
    assert [event.fault["backend"] for event in trace.of(Injected)] == ["wgpu"]
    assert [p.backend for p in trace.of(Product)] == ["cpu"]


def test_the_chain_is_the_scenarios() -> None:
    """Backends that are left out are not tried."""
    fault = Fault(kind="absent", backend="wgpu")
    trace = backend_chain.run(scenario(fault, order=("wgpu", "cpu")))
    assert [attempt.backend for attempt in trace.of(Attempt)] == ["wgpu", "cpu"]


def test_a_non_finite_element_is_where_it_was_planned() -> None:
    """The element of the fault, counted modulo the size of the product."""
    fault = Fault(kind="non_finite_output", backend="cuda", element=33 * 17 + 5)
    assert "the first at 5 (nan)" in backend_chain.run(scenario(fault)).of(Attempt)[0].reason


def test_a_panicking_chain_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the chain lets a device's error through, the run halts; the trace has what was tried."""

    def panics(compute: Callable[[Backend], Tensor], **_: Any) -> None:
        compute(open_cpu())

    monkeypatch.setattr(chain, "first_finite", panics)
    trace = backend_chain.run(scenario(Fault(kind="out_of_memory", backend="cpu")))
    assert trace.of(Halt)[0].reason.startswith("OutOfMemoryError: backend cpu: out of memory")
    assert trace.of(Attempt) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (scenario(order=("cpu", "wgpu")), "use cuda, wgpu, cpu in this order, each once"),
        (scenario(order=("cpu", "cpu")), "use cuda, wgpu, cpu in this order, each once"),
        (
            scenario(Fault(kind="absent", backend="cuda"), order=("wgpu", "cpu")),
            "backend='cuda': the chain has wgpu, cpu",
        ),
        (
            scenario(*(Fault(kind=kind, backend="cpu") for kind in KINDS[:2])),
            "fault init_error backend='cpu': a backend fails once in a run",
        ),
        (scenario(Fault(kind="leave", rank=0, step=1)), "allowed are absent, init_error"),
        (scenario(options={"shapes": [[1, 2, 3]]}), "allowed are m, k, n, layout, magnitude"),
    ],
)
def test_impossible_requests(asked: Scenario, message: str) -> None:
    """Chains, faults and options that would be ignored are refused."""
    end = systems.run(asked).end
    assert end.status == "failed"
    assert message in end.reason


WORDS = {
    "device_lost": "Parent device is lost",
    "too_large": "is greater than the maximum buffer size",
    "shader_rejected": "parsing error",
}


@pytest.mark.wgpu
@pytest.mark.parametrize("kind", OF_ADAPTERS)
def test_an_adapter_fails_in_its_own_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a real failure of the adapter the next backend serves, and the trace has the reason.

    The process's own backend still works afterwards.
    """
    monkeypatch.undo()
    try:
        adapter = open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    fault = Fault(kind=kind, backend="wgpu")
    trace = backend_chain.run(scenario(fault, order=("wgpu", "cpu")))
    failed, served = trace.of(Attempt)
    assert [event.fault for event in trace.of(Injected)] == [fault.to_dict()]
    assert WORDS[kind] in failed.reason
    assert (failed.backend, served.backend, served.served) == ("wgpu", "cpu", True)
    assert [p.backend for p in trace.of(Product)] == ["cpu"]
    assert not adapter.lost()


@pytest.mark.parametrize("kind", OF_ADAPTERS)
def test_an_adapter_that_is_not_there_is_played(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an adapter, a simulated one fails instead, and is recorded as one."""
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent("wgpu"))
    trace = backend_chain.run(scenario(Fault(kind=kind, backend="wgpu"), order=("wgpu", "cpu")))
    failed, served = trace.of(Attempt)
    assert failed.device == "stand-in, for backend wgpu: no driver"
    assert f"{kind} (injected)" in failed.reason
    assert (served.backend, served.served) == ("cpu", True)


def test_only_an_adapter_is_lost() -> None:
    """Faults of adapters are refused on other backends."""
    with pytest.raises(UsageError, match=r"fault device_lost backend='cuda': use wgpu"):
        backend_chain.run(scenario(Fault(kind="device_lost", backend="cuda")))
