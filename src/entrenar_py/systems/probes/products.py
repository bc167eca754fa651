"""Matrix products on a device, each compared with the CPU's product in float32 and in float64.

Options: `m`, `k`, `n` (one product) or `shapes` (a list of [m, k, n], computed together),
`layout`, and `magnitude` (operands are uniform in [-magnitude, magnitude]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, Pair, products
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder

# layout -> whether a is a transposed view, whether b is one
LAYOUTS: dict[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "a_transposed": (True, False),
    "b_transposed": (False, True),
    "both_transposed": (True, True),
}

Shape = tuple[int, int, int]
# The size for which the contract states an absolute tolerance (F-WGPU-001).
STATED_SHAPE: Shape = (64, 64, 64)
STATED_MAGNITUDE = 1.0


def run(scenario: Scenario) -> trace.Trace:
    """Record a Product event for each product of the options, all computed in one submission.

    The run ends `failed`, with the reason, if the device is absent or fails. Raises UsageError for
    impossible options.
    """
    wanted = request(scenario.options)
    recorder = Recorder(scenario)
    pairs = operands(scenario, wanted)
    try:
        backend = backends.open_backend(compared_backend(scenario))
        results = backend.products(pairs)
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    for pair, result in zip(pairs, results, strict=True):
        recorder.emit(measure(backend, pair, result, wanted))
    return recorder.finish(status="completed")


def compared_backend(scenario: Scenario) -> str:
    """Return the scenario's first backend other than the CPU; `wgpu` if it has none.

    Products are compared with the CPU's products, so testing the CPU itself would show nothing.
    """
    return next((name for name in scenario.backends if name != "cpu"), "wgpu")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The requested products: a shape (m, k, n) for each, with one layout and magnitude for all."""

    shapes: tuple[Shape, ...]
    layout: str
    magnitude: float


def request(options: Mapping[str, Any]) -> Request:
    """Return the products that `options` request.

    The default is one product with m = k = n = 64 and operands in [-1, 1]. Raises UsageError for
    values that no float32 product can have.
    """
    if "shapes" in options and {"m", "k", "n"} & set(options):
        raise UsageError("options with shapes and m, k or n: use one or the other")
    single = [options.get(name, 64) for name in ("m", "k", "n")]
    wanted = options.get("shapes", [single])
    if not isinstance(wanted, list | tuple) or not wanted:
        raise UsageError(f"options shapes={wanted!r}: use a list of [m, k, n]")
    shapes = tuple(_shape(shape) for shape in wanted)
    layout = options.get("layout", "plain")
    if layout not in LAYOUTS:
        raise UsageError(f"options layout={layout!r}: allowed are {', '.join(LAYOUTS)}")
    longest = max(k for _, k, _ in shapes)
    return Request(
        shapes=shapes, layout=layout, magnitude=_magnitude(options.get("magnitude", 1.0), longest)
    )


def _shape(shape: Any) -> Shape:
    sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if len(sizes) != 3 or not whole or min(sizes) < 1:
        raise UsageError(f"options shape={shape!r}: use three whole numbers >= 1: [m, k, n]")
    return sizes


def _magnitude(magnitude: Any, length: int) -> float:
    if isinstance(magnitude, bool) or not isinstance(magnitude, int | float) or not magnitude > 0:
        raise UsageError(f"options magnitude={magnitude!r}: use a number > 0")
    # Half the largest float32, so that rounding can't make a valid sum overflow.
    highest = math.sqrt(float(np.finfo(np.float32).max) / 2 / length)
    if magnitude > highest:
        raise UsageError(
            f"options magnitude={magnitude} with k={length}: a float32 sum could overflow; "
            f"use magnitude<={highest:.3g}"
        )
    return float(magnitude)


def operands(scenario: Scenario, wanted: Request) -> list[Pair]:
    """Return the float32 operands of each product, drawn in order from the streams `a` and `b`.

    A transposed operand is a view of memory that holds [k, m] (or [n, k]).
    """
    a_transposed, b_transposed = LAYOUTS[wanted.layout]
    a_rng, b_rng = scenario.rng("a"), scenario.rng("b")
    return [
        (
            _draw(a_rng, m, k, wanted.magnitude, transposed=a_transposed),
            _draw(b_rng, k, n, wanted.magnitude, transposed=b_transposed),
        )
        for m, k, n in wanted.shapes
    ]


def _draw(
    rng: np.random.Generator, rows: int, columns: int, magnitude: float, *, transposed: bool
) -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    drawn = torch.from_numpy(rng.uniform(-magnitude, magnitude, shape).astype(np.float32))
    return drawn.t() if transposed else drawn


def measure(backend: Backend, pair: Pair, result: Tensor, wanted: Request) -> trace.Product:
    """Return the record of `result`, which `backend` computed from the operands `pair`.

    `element` has the largest error relative to its rounding bound; `error_f64`
    and `bound` are its error and bound. `error_cpu` is the largest difference from the product on
    the CPU. If the shape is not [m, n], these three numbers are nan, and `element` is None.
    """
    a, b = pair
    shape = (a.shape[0], a.shape[1], b.shape[1])
    error_cpu = error_f64 = bound = float("nan")
    finite, element = bool(torch.isfinite(result).all()), None
    if result.shape == (shape[0], shape[2]):
        comparison = products.compare(result, a, b, unit_roundoff=backend.unit_roundoff)
        error_cpu = float((result - a @ b).abs().max())
        error_f64, bound, element = comparison.error, comparison.bound, comparison.element
    return trace.Product(
        backend=backend.name,
        device=backend.device,
        software=backend.software,
        shape=shape,
        result_shape=tuple(result.shape),
        layout=wanted.layout,
        magnitude=wanted.magnitude,
        finite=finite,
        error_cpu=error_cpu,
        error_f64=error_f64,
        bound=bound,
        stated=shape == STATED_SHAPE and wanted.magnitude <= STATED_MAGNITUDE,
        digest=trace.record_tensor(result.contiguous().numpy()).digest,
        element=element,
    )
