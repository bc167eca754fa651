"""Bugs in the fallback chain: failures hidden, results made up, backends not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain, on_torch
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario

_first_finite = chain.first_finite
_CHAIN = "entrenar_py.compute.chain"

Compute = Callable[[Backend], Tensor]
Openers = Mapping[str, Callable[[], Backend]]
Listener = Callable[[chain.Attempt], None]


def zeros_on_failure(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Returns zeros of the right shape if a backend fails while it computes."""

    def compute_or_zeros(backend: Backend) -> Tensor:
        try:
            return compute(backend)
        except (MemoryError, RuntimeError):
            return torch.zeros(33, 17)

    return _first_finite(compute_or_zeros, on_attempt=on_attempt, order=order, table=table)


def zeros_when_lost(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Returns zeros, as from memory never written to, if a backend's device is lost."""

    def compute_or_zeros(backend: Backend) -> Tensor:
        try:
            return compute(backend)
        except BackendUnavailable:
            return torch.zeros(33, 17)

    return _first_finite(compute_or_zeros, on_attempt=on_attempt, order=order, table=table)


def elsewhere(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Computes a product that a device refuses on the CPU, under the device's name."""

    def computed_anyway(backend: Backend) -> Tensor:
        try:
            return compute(backend)
        except BackendUnavailable:
            return compute(on_torch.open_cpu())

    def opened_anyway(name: str) -> Callable[[], Backend]:
        def open_backend() -> Backend:
            try:
                return table[name]()
            except BackendUnavailable:
                return replace(on_torch.open_cpu(), name=name)

        return open_backend

    opened = {name: opened_anyway(name) for name in order}
    return _first_finite(computed_anyway, on_attempt=on_attempt, order=order, table=opened)


def backwards(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Tries the slowest backend first."""
    return _first_finite(compute, on_attempt=on_attempt, order=order[::-1], table=table)


def always(result: Tensor) -> bool:
    """Calls every result finite."""
    return True


def silent(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Does not report the attempts that failed."""

    def tell(attempt: chain.Attempt) -> None:
        if attempt.served:
            on_attempt(attempt)

    return _first_finite(compute, on_attempt=tell, order=order, table=table)


def impatient(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """Tries only the first and the last backend of the chain."""
    order = (*order[:1], *order[-1:])
    return _first_finite(compute, on_attempt=on_attempt, order=order, table=table)


def _chain(*faults: Fault) -> Scenario:
    return Scenario(
        system="backend_chain",
        workload="linear",
        world_size=1,
        seed=0,
        backends=chain.ORDER,
        faults=faults,
    )


def _on_adapter(kind: str) -> Scenario:
    """Return a chain of an adapter that really fails, and the CPU."""
    return _chain(Fault(kind=kind, backend="wgpu")).with_(backends=("wgpu", "cpu"))


_WGPU_FAILS = {"tensor": "product", "expected": "wgpu fails", "got": "wgpu served"}
_NO_GPU = (Fault(kind="absent", backend="cuda"), Fault(kind="absent", backend="wgpu"))

VARIANTS = (
    Variant(
        name="fallback-zeros",
        summary="a backend that runs out of memory returns zeros",
        source="classic",
        plants={f"{_CHAIN}.first_finite": zeros_on_failure},
        scenario=_chain(*_NO_GPU, Fault(kind="out_of_memory", backend="cpu")),
        invariants=("F-DP-004",),
        place={"tensor": "product", "expected": "cpu fails", "got": "cpu served"},
    ),
    Variant(
        name="fallback-nan",
        summary="a result with a NaN is treated as finite",
        source="classic",
        plants={f"{_CHAIN}.is_finite": always},
        scenario=_chain(*_NO_GPU, Fault(kind="non_finite_output", backend="cpu")),
        invariants=("F-DP-004",),
        place={"tensor": "product", "expected": "cpu fails", "got": "cpu served"},
    ),
    Variant(
        name="fallback-backwards",
        summary="the chain starts with the CPU",
        source="classic",
        plants={f"{_CHAIN}.first_finite": backwards},
        scenario=_chain(),
        invariants=("F-DP-004",),
        place={"expected": "('cuda',)", "got": "('cpu',)"},
    ),
    Variant(
        name="fallback-silent",
        summary="failed attempts leave no record",
        source="classic",
        plants={f"{_CHAIN}.first_finite": silent},
        scenario=_chain(*_NO_GPU),
        invariants=("F-DP-004",),
        place={"expected": "('cuda',)", "got": "('cpu',)"},
    ),
    Variant(
        name="fallback-impatient",
        summary="after the first failure the CPU is used, and wgpu is never tried",
        source="classic",
        plants={f"{_CHAIN}.first_finite": impatient},
        scenario=_chain(Fault(kind="out_of_memory", backend="cuda")),
        invariants=("F-DP-004",),
        place={"expected": "('cuda', 'wgpu')", "got": "('cuda', 'cpu')"},
    ),
    Variant(
        name="fallback-lost",
        summary="an adapter that is lost in the middle of a step returns zeros",
        source="classic (a result buffer that is read though nothing wrote to it)",
        plants={f"{_CHAIN}.first_finite": zeros_when_lost},
        scenario=_on_adapter("device_lost"),
        invariants=("F-DP-004",),
        place=_WGPU_FAILS,
    ),
    Variant(
        name="fallback-too-large",
        summary="products too large for the adapter are computed on the CPU under its name",
        source="classic (silent fallback of one operation)",
        plants={f"{_CHAIN}.first_finite": elsewhere},
        scenario=_on_adapter("too_large"),
        invariants=("F-DP-004",),
        place=_WGPU_FAILS,
    ),
    Variant(
        name="fallback-shader",
        summary="the CPU silently replaces a shader that the adapter rejects",
        source="classic (silent fallback of one operation)",
        plants={f"{_CHAIN}.first_finite": elsewhere},
        scenario=_on_adapter("shader_rejected"),
        invariants=("F-DP-004",),
        place=_WGPU_FAILS,
    ),
)
