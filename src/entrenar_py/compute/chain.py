"""The fallback chain CUDA -> wgpu -> CPU: use the first backend that gives a finite result.

`auto` also checks the accuracy of a small product and skips software adapters. A backend that the
user selects by name isn't opened through the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, products
from entrenar_py.shared.errors import BackendUnavailable, UsageError

ORDER = ("cuda", "wgpu", "cpu")

# The exceptions of device libraries. torch.OutOfMemoryError and torch.AcceleratorError are
# RuntimeErrors, and wgpu's out-of-memory error is a MemoryError. Any other exception is a bug and
# is not caught.
FAILURES = (BackendUnavailable, MemoryError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to use a backend. `reason` is why it failed; `device` is "" if it didn't open."""

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
    """Return the first backend of `order` for which `compute(backend)` is finite, and the result.

    `on_attempt` is called after each attempt. Raises UsageError for a name that `table` lacks, and
    BackendUnavailable with the reason of every backend if all of them fail.
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
    raise BackendUnavailable(f"no backend of {', '.join(order)} works: {'; '.join(reasons)}")


def auto(*, on_attempt: Callable[[Attempt], None]) -> Backend:
    """Return the first backend of the chain that multiplies two small matrices correctly.

    Software adapters are skipped, because they compute on the CPU, more slowly than torch. Raises
    BackendUnavailable if all backends fail.
    """
    return first_finite(_probe_hardware, on_attempt=on_attempt)[0]


def is_finite(result: Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    return bool(torch.isfinite(result).all())


def probe(backend: Backend) -> Tensor:
    """Return a small product; raise BackendUnavailable if its error exceeds the rounding bound."""
    a = torch.linspace(-1, 1, 17 * 19).reshape(17, 19)
    b = torch.linspace(1, -2, 19 * 23).reshape(19, 23)
    result = backend.matmul(a, b)
    comparison = products.compare(result, a, b, unit_roundoff=backend.unit_roundoff)
    if not comparison.explained:
        raise BackendUnavailable(
            f"probe product on {backend.device}: element {comparison.element} is off by "
            f"{comparison.error:.3g}, rounding explains at most {comparison.bound:.3g}"
        )
    return result


def _probe_hardware(backend: Backend) -> Tensor:
    if backend.software:
        raise BackendUnavailable(
            f"{backend.device} is a software adapter, slower than the CPU that it runs on; "
            f"use it with --backend {backend.name}"
        )
    return probe(backend)


def _reason(name: str, error: Exception) -> str:
    """Return the text of `error` without the prefix `backend NAME: `."""
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
