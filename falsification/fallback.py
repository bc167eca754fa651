"""Bugs in the fallback chain: what fails is hidden, made up, or not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from entrenar_py import backends
from entrenar_py.backends import Backend, chain
from entrenar_py.faults import Fault
from entrenar_py.mutants import Variant
from entrenar_py.scenario import Scenario

_first_finite = chain.first_finite
_CHAIN = "entrenar_py.backends.chain"

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
    """A backend that fails while it computes serves zeros of the right shape."""

    def compute_or_zeros(backend: Backend) -> Tensor:
        try:
            return compute(backend)
        except (MemoryError, RuntimeError):
            return torch.zeros(33, 17)

    return _first_finite(compute_or_zeros, on_attempt=on_attempt, order=order, table=table)


def backwards(
    compute: Compute,
    *,
    on_attempt: Listener,
    order: Sequence[str] = chain.ORDER,
    table: Openers = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """The slowest backend first."""
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
    """Tells nobody of the attempts that failed."""

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
    """After one failure the CPU, whatever stands between."""
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


_NO_GPU = (Fault(kind="absent", backend="cuda"), Fault(kind="absent", backend="wgpu"))

VARIANTS = (
    Variant(
        name="fallback-zeros",
        summary="a backend that runs out of memory serves zeros",
        source="classic",
        plants={f"{_CHAIN}.first_finite": zeros_on_failure},
        scenario=_chain(*_NO_GPU, Fault(kind="out_of_memory", backend="cpu")),
        invariants=("F-DP-004",),
        place={"tensor": "product", "expected": "cpu fails", "got": "cpu served"},
    ),
    Variant(
        name="fallback-nan",
        summary="a result with a NaN is taken for finite",
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
        summary="after the first failure the CPU serves, and wgpu is never tried",
        source="classic",
        plants={f"{_CHAIN}.first_finite": impatient},
        scenario=_chain(Fault(kind="out_of_memory", backend="cuda")),
        invariants=("F-DP-004",),
        place={"expected": "('cuda', 'wgpu')", "got": "('cuda', 'cpu')"},
    ),
)
