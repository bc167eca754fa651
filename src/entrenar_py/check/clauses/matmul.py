"""F-WGPU-001: a matrix product on a device is the CPU's, as far as float32 rounding allows.

Source: distributed-training-v1, F-WGPU-001; the bound is derived in docs/numerics.md.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check.clauses import probes
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Product
from entrenar_py.shared.verdict import Finding, Tally

# Options of the system `matmul`. Ragged and prime sizes test every edge of a tile, a long k the
# drift of float32 sums, a large magnitude a case in which an absolute tolerance is meaningless. The
# last two are about the smallest for which wgpu chooses the kernels with medium and large tiles.
PLANNED: tuple[dict[str, Any], ...] = (
    {"m": 64, "k": 64, "n": 64},
    {"m": 64, "k": 64, "n": 64, "layout": "both_transposed"},
    {"m": 1, "k": 1, "n": 1},
    {"m": 1, "k": 37, "n": 1},
    {"m": 15, "k": 17, "n": 31, "layout": "a_transposed"},
    {"m": 31, "k": 15, "n": 17, "layout": "b_transposed"},
    {"m": 17, "k": 31, "n": 15, "layout": "both_transposed"},
    {"m": 61, "k": 67, "n": 71, "layout": "b_transposed"},
    {"m": 33, "k": 512, "n": 65},
    {"m": 17, "k": 1024, "n": 48, "layout": "a_transposed"},
    {"m": 29, "k": 101, "n": 13, "magnitude": 1e5},
    {"shapes": [[5, 3, 2], [64, 64, 64], [2, 3, 5]]},
    {"m": 999, "k": 51, "n": 1001, "layout": "a_transposed"},
    {"m": 1924, "k": 260, "n": 1924},
)


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan products of the stated shape, and ragged, long, transposed, large and multiple ones."""
    return [
        probes.scenario("matmul", seed=seed, backends=("wgpu",), options=options)
        for seed, options in enumerate(PLANNED)
    ]


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that every product is finite, has its shape, and is within its bound and the tolerance.

    The bound on the distance from float64 applies to every shape. The clause's absolute tolerance
    on the distance from the CPU's float32 applies to the stated shape and range only.
    """
    tally = Tally(invariant.id)
    for trace in traces:
        if trace.end.status == "failed":
            tally.miss(trace.end.reason)
        for product in trace.of(Product):
            if product.backend != "cpu":  # compared with itself it would show nothing
                _judge_product(tally, product, trace.scenario, invariant.tolerance)
    nothing = "no matrix product was computed on a GPU"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _judge_product(
    tally: Tally, product: Product, scenario: Scenario, tolerance: float | None
) -> None:
    m, k, n = product.shape
    what = f"{product.backend} product {m}x{k}x{n} {product.layout}"
    where = {"tensor": "product", "scenario": scenario}
    place = {**where, "element": product.element}
    probes.note_software(tally, product)
    if not tally.equal((m, n), product.result_shape, f"{what} has another shape", **place):
        return
    element = f"at element {product.element}"
    if not tally.check(product.finite, f"{what} is not finite {element}", **place):
        return
    message = (
        f"{what} is off by {product.error_f64:.3g} from float64 {element}, "
        f"float32 rounding explains {product.bound:.3g}"
    )
    tally.at_most(product.bound, product.error_f64, message, form=".3g", **place)
    if not product.stated:
        return
    if tolerance is None:
        tally.note("the clause has no tolerance: only the float32 bound was checked")
        return
    # Without the element: the largest distance from the CPU may lie at another one.
    tally.check(
        product.error_cpu < tolerance,
        f"{what} is off by {product.error_cpu:.3g} from the CPU, the clause allows {tolerance:g}",
        expected=f"< {tolerance:g}",
        got=f"{product.error_cpu:.3g}",
        **where,
    )
