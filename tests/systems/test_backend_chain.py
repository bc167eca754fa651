"""The chain under injected faults, on a machine where all three backends work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from entrenar_py import backends
from entrenar_py.backends import Backend, chain
from entrenar_py.backends.cpu import open_cpu
from entrenar_py.errors import BackendUnavailable, UsageError
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.systems import backend_chain
from entrenar_py.trace import Attempt, Halt, Injected, Product

KINDS = ("absent", "init_error", "out_of_memory", "non_finite_output")


@pytest.fixture(autouse=True)
def _three_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under the names of the GPUs: a machine where everything works."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", named("cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", named("wgpu"))


def named(name: str) -> Callable[[], Backend]:
    return lambda: replace(open_cpu(), name=name)


def scenario(*faults: Fault, **options: Any) -> Scenario:
    return Scenario(
        system="backend_chain",
        workload="linear",
        world_size=1,
        seed=1,
        faults=faults,
        options=options,
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
    """A faulty backend fails for a reason that names the fault's effect; the next one serves."""
    fault = Fault(kind=kind, backend="cuda")
    trace = backend_chain.run(scenario(fault))
    assert [event.fault for event in trace.of(Injected)] == [fault.to_dict()]
    failed, served = trace.of(Attempt)
    assert (failed.backend, served.backend, served.served) == ("cuda", "wgpu", True)
    expected = "not finite" if kind == "non_finite_output" else "(injected)"
    assert expected in failed.reason
    assert [p.backend for p in trace.of(Product)] == ["wgpu"]


def test_everything_fails() -> None:
    """When nothing is left the run halts, names every reason, and shows no product."""
    faults = [Fault(kind="out_of_memory", backend=name) for name in chain.ORDER]
    trace = backend_chain.run(scenario(*faults))
    (halt,) = trace.of(Halt)
    assert all(attempt.reason in halt.reason for attempt in trace.of(Attempt))
    assert (len(trace.of(Attempt)), trace.of(Product)) == (3, [])
    assert trace.end.status == "halted"


def test_really_absent_backend_is_not_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails by itself shows its own reason, and its fault is not reported."""

    def absent() -> Backend:
        raise BackendUnavailable("no driver")

    monkeypatch.setitem(backends.BACKENDS, "cuda", absent)
    trace = backend_chain.run(scenario(Fault(kind="init_error", backend="cuda")))
    assert trace.of(Injected) == []
    assert trace.of(Attempt)[0].reason == "BackendUnavailable: no driver"


def test_only_the_fault_that_struck_is_reported() -> None:
    """Of two faults on one backend the second, never reached, is not reported."""
    faults = [Fault(kind=kind, backend="cuda") for kind in ("out_of_memory", "non_finite_output")]
    trace = backend_chain.run(scenario(*faults))
    assert [event.fault["kind"] for event in trace.of(Injected)] == ["out_of_memory"]


def test_a_panicking_chain_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that lets a device's error through halts, and the trace shows who was not tried."""

    def panics(compute: Callable[[Backend], Tensor], **_: Any) -> None:
        compute(open_cpu())

    monkeypatch.setattr(chain, "first_finite", panics)
    trace = backend_chain.run(scenario(Fault(kind="out_of_memory", backend="cpu")))
    assert trace.of(Halt)[0].reason.startswith("OutOfMemoryError: backend cpu: out of memory")
    assert trace.of(Attempt) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (scenario(Fault(kind="leave", rank=0, step=1)), "it can inject absent, init_error"),
        (scenario(Fault(kind="absent", backend="tpu")), "backend='tpu': allowed are cuda"),
        (scenario(Fault(kind="absent")), "backend=None: allowed are cuda"),
        (scenario(shapes=[[1, 2, 3]]), "it computes one product; use m, k, n"),
    ],
)
def test_impossible_requests(asked: Scenario, message: str) -> None:
    """Faults and options that would be ignored are refused."""
    with pytest.raises(UsageError, match=message):
        backend_chain.run(asked)
