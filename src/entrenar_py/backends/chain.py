"""The fallback chain CUDA -> wgpu -> CPU: the first backend that yields a finite result serves.

Decides only whether a result is finite; `auto` also passes over a software adapter. A backend asked
for by name never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entrenar_py import backends
from entrenar_py.backends import Backend, rounding
from entrenar_py.errors import BackendUnavailable, UsageError

ORDER = ("cuda", "wgpu", "cpu")

# What device libraries raise. torch.OutOfMemoryError and torch.AcceleratorError are
# RuntimeErrors, wgpu's out-of-memory error is a MemoryError. Anything else is a bug, not a
# missing device, and is not swallowed.
FAILURES = (BackendUnavailable, MemoryError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One backend was tried: it served, or failed with `reason`. `device` is empty if unopened."""

    backend: str
    served: bool
    reason: str = ""
    device: str = ""
    software: bool = False


def first_finite(
    compute: Callable[[Backend], Tensor],
    *,
    on_attempt: Callable[[Attempt], None],
    order: Sequence[str] = ORDER,
    table: Mapping[str, Callable[[], Backend]] = backends.BACKENDS,
) -> tuple[Backend, Tensor]:
    """The first backend of `order` whose `compute(backend)` is finite, and that result.

    `on_attempt` hears of every try, in order. Raises UsageError for a name that `table` lacks,
    BackendUnavailable naming every backend and its reason when none served.
    """
    unknown = [name for name in order if name not in table]
    if unknown:
        raise UsageError(f"backend={unknown[0]!r} in order: allowed are {', '.join(table)}")
    reasons = []
    for name in order:
        backend = None
        try:
            backend = table[name]()
            result = compute(backend)
            reason = "" if is_finite(result) else _non_finite(result)
        except FAILURES as error:
            reason = _reason(name, error)
        on_attempt(
            Attempt(
                backend=name,
                served=not reason,
                reason=reason,
                device=backend.device if backend else "",
                software=backend is not None and backend.software,
            )
        )
        if not reason:
            assert backend is not None
            return backend, result
        reasons.append(f"{name}: {reason}")
    raise BackendUnavailable(f"no backend of {', '.join(order)} served: {'; '.join(reasons)}")


def auto(*, on_attempt: Callable[[Attempt], None]) -> Backend:
    """Return the first backend of the chain that multiplies two small matrices correctly.

    A software adapter, which computes on the CPU slower than torch does, is passed over.
    Raises BackendUnavailable when none serves.
    """
    return first_finite(_probe_hardware, on_attempt=on_attempt)[0]


def is_finite(result: Tensor) -> bool:
    """True if no element is NaN or infinite."""
    return bool(torch.isfinite(result).all())


def probe(backend: Backend) -> Tensor:
    """A product that float64 confirms; BackendUnavailable if rounding does not explain it."""
    a = torch.linspace(-1, 1, 17 * 19).reshape(17, 19)
    b = torch.linspace(1, -2, 19 * 23).reshape(19, 23)
    result = backend.matmul(a, b)
    found = rounding.compare(result, a, b, unit_roundoff=backend.unit_roundoff)
    if not found.explained:
        raise BackendUnavailable(
            f"probe product on {backend.device}: element {found.element} is off by "
            f"{found.error:.3g}, rounding explains {found.bound:.3g}"
        )
    return result


def _probe_hardware(backend: Backend) -> Tensor:
    if backend.software:
        raise BackendUnavailable(
            f"{backend.device} is a software adapter, slower than the CPU that it runs on; "
            f"--backend {backend.name} uses it all the same"
        )
    return probe(backend)


def _reason(name: str, error: Exception) -> str:
    """Return why backend `name` failed, for a message that names it already."""
    if isinstance(error, BackendUnavailable):
        return str(error).removeprefix(f"backend {name}: ")
    return f"{type(error).__name__}: {error}"


def _non_finite(result: Tensor) -> str:
    bad = ~torch.isfinite(result).reshape(-1)
    first = int(bad.int().argmax())
    return (
        f"result is not finite: {int(bad.sum())} of {result.numel()} elements, "
        f"the first at {first} ({float(result.reshape(-1)[first])})"
    )
