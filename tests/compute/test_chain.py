"""The fallback chain on fake backends that fail in every way, and on this machine's real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain
from entrenar_py.compute.on_torch import CpuBackend, open_cpu
from entrenar_py.shared.errors import BackendUnavailable, UsageError

FAILURES = {
    "absent": BackendUnavailable("not here"),
    "init": RuntimeError("driver too old"),
    "out_of_memory": torch.OutOfMemoryError("2 GiB wanted"),
    "host_memory": MemoryError("no pages"),
}
OUTCOMES = ("works", "nan", "inf", *FAILURES)


def opener(name: str, outcome: str) -> Callable[[], Backend]:
    """Return an opener of the CPU backend under another name, or one that fails."""

    def open_fake() -> Backend:
        if outcome in ("absent", "init"):
            raise FAILURES[outcome]
        return replace(open_cpu(), name=name)

    return open_fake


def computed(outcomes: dict[str, str]) -> Callable[[Backend], Tensor]:
    def compute(backend: Backend) -> Tensor:
        outcome = outcomes[backend.name]
        if outcome in FAILURES:
            raise FAILURES[outcome]
        value = {"works": 1.0}.get(outcome) or float(outcome)
        return torch.tensor([[1.0, value]])

    return compute


@settings(deadline=None)
@given(outcomes=st.tuples(*[st.sampled_from(OUTCOMES)] * 3))
def test_first_finite_result_serves(outcomes: tuple[str, str, str]) -> None:
    """The first backend that works is used. Backends that fail are reported with a reason."""
    by_name = dict(zip(chain.ORDER, outcomes, strict=True))
    tries: list[chain.Attempt] = []

    def attempt() -> tuple[Backend, Tensor]:
        return chain.first_finite(
            computed(by_name),
            on_attempt=tries.append,
            table={name: opener(name, outcome) for name, outcome in by_name.items()},
        )

    if "works" in outcomes:
        backend, result = attempt()
        assert backend.name == chain.ORDER[outcomes.index("works")]
        assert torch.equal(result, torch.ones(1, 2))
        assert tries.pop() == chain.Attempt(
            backend=backend.name, served=True, device=backend.device
        )
    else:
        with pytest.raises(BackendUnavailable) as refused:
            attempt()
        assert len(tries) == 3
        assert all(f"{t.backend}: {t.reason}" in str(refused.value) for t in tries)
    assert [t.backend for t in tries] == list(chain.ORDER[: len(tries)])
    assert all(t.reason and not t.served for t in tries)
    assert all(bool(t.device) == (by_name[t.backend] not in ("absent", "init")) for t in tries)


def test_non_finite_reason_names_the_element() -> None:
    """The reason has the number of non-finite elements and the index of the first."""
    tries: list[chain.Attempt] = []
    with pytest.raises(BackendUnavailable):
        chain.first_finite(computed({"cpu": "nan"}), on_attempt=tries.append, order=("cpu",))
    assert tries[0].reason == "result is not finite: 1 of 2 elements, the first at 1 (nan)"


def test_bugs_are_not_swallowed() -> None:
    """Exceptions other than those of device libraries are raised to the caller."""

    def buggy(backend: Backend) -> Tensor:
        raise TypeError(backend.name)

    with pytest.raises(TypeError, match="cpu"):
        chain.first_finite(buggy, on_attempt=lambda attempt: None, order=("cpu",))


def test_unknown_name_in_order() -> None:
    """An unknown name in the order is refused before any backend is tried."""
    with pytest.raises(UsageError, match=r"backend='tpu' in order: allowed are cuda"):
        chain.first_finite(computed({}), on_attempt=lambda attempt: None, order=("cpu", "tpu"))


class Zeros(CpuBackend):
    """A backend whose results are finite but wrong."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return zeros of the right shape."""
        return torch.zeros(a.shape[0], b.shape[1])


def test_auto_refuses_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` skips a backend whose probe product is wrong."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: Zeros("zeros", name="cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", opener("wgpu", "works"))
    tries: list[chain.Attempt] = []
    assert chain.auto(on_attempt=tries.append).name == "wgpu"
    assert tries[0].reason.startswith("probe product on zeros: element")


def test_auto_passes_over_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` skips a software adapter."""
    emulated = CpuBackend("llvmpipe", name="wgpu", software=True)
    monkeypatch.setitem(backends.BACKENDS, "cuda", opener("cuda", "absent"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", lambda: emulated)
    tries: list[chain.Attempt] = []
    assert chain.auto(on_attempt=tries.append).name == "cpu"
    assert "llvmpipe is a software adapter" in tries[1].reason
    assert "--backend wgpu" in tries[1].reason


def test_auto_on_this_machine() -> None:
    """`auto` finds a backend on any machine."""
    tries: list[chain.Attempt] = []
    assert chain.auto(on_attempt=tries.append).name == tries[-1].backend
    assert tries[-1].served
