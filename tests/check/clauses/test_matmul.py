"""F-WGPU-001: the judge's findings on right, wrong and missing products."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from entrenar_py.check.clauses.devices import judge_products, plan_products
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event, Product, Trace
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses.traces import several

INVARIANT = Invariant(
    id="F-WGPU-001",
    name="gpu_matmul",
    statement="the product matches the CPU",
    position=Position("c.yaml", 1, 1),
    tolerance=1e-4,
)
SCENARIO = Scenario(system="matmul", workload="linear", world_size=1, seed=0)
RIGHT = Product(
    backend="wgpu",
    device="llvmpipe (Vulkan)",
    software=True,
    shape=(64, 64, 64),
    result_shape=(64, 64),
    layout="plain",
    magnitude=1.0,
    finite=True,
    error_cpu=2e-6,
    error_f64=1e-6,
    bound=2e-4,
    stated=True,
    digest="00",
    element=5,
)


def trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    end = End(status=status, reason=reason)
    return Trace(scenario=SCENARIO, environment={}, promises=(), events=(*events, end))


def test_right_products_hold() -> None:
    """Right products hold, the stated one by both bounds, and a software adapter is noted."""
    elsewhere = replace(RIGHT, shape=(3, 1024, 2), result_shape=(3, 2), stated=False, error_cpu=9.0)
    finding = judge_products(INVARIANT, several([trace(RIGHT, elsewhere)]))
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 4 + 3)
    assert finding.notes == ("software adapter llvmpipe (Vulkan)",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(RIGHT, error_f64=1.0), "wgpu product 64x64x64 plain is off by 1 from float64 at"),
        (replace(RIGHT, error_f64=math.nan), "is off by nan"),
        (replace(RIGHT, error_cpu=1e-4), "is off by 0.0001 from the CPU, the clause allows 0.0001"),
        (replace(RIGHT, finite=False), "is not finite at element 5"),
        (replace(RIGHT, result_shape=(64, 63)), "has another shape"),
        (replace(RIGHT, layout="a_transposed", error_f64=1.0), "64x64x64 a_transposed is off"),
    ],
)
def test_wrong_products_are_falsified(wrong: Product, message: str) -> None:
    """Each kind of wrong product is falsified, with shape, layout and element in the message."""
    finding = judge_products(INVARIANT, several([trace(RIGHT), trace(wrong)]))
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    assert message in finding.counterexample.message
    assert finding.counterexample.scenario == SCENARIO.to_dict()


def test_element_of_the_counterexample() -> None:
    """The counterexample names the element that broke its bound."""
    found = judge_products(
        INVARIANT, several([trace(replace(RIGHT, error_f64=1.0))])
    ).counterexample
    assert found is not None
    assert (found.place(), found.expected, found.got) == ("tensor product[5]", "<= 0.0002", "1")


def test_absolute_tolerance_applies_where_stated() -> None:
    """The tolerance applies to the stated shape only. Without one a note says so."""
    unstated = replace(RIGHT, stated=False, error_cpu=1.0)
    hardware = judge_products(INVARIANT, several([trace(replace(unstated, software=False))]))
    assert (hardware.verdict, hardware.notes) == (Verdict.HELD, ())
    finding = judge_products(
        replace(INVARIANT, tolerance=None), several([trace(replace(RIGHT, error_cpu=1.0))])
    )
    assert finding.verdict is Verdict.HELD
    assert "the clause has no tolerance: only the float32 bound was checked" in finding.notes


NO_PRODUCT = "no matrix product was computed on a GPU: F-WGPU-001 is decided by a probe"


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ([], NO_PRODUCT),
        ([trace()], NO_PRODUCT),
        ([trace(replace(RIGHT, backend="cpu"))], NO_PRODUCT),
        ([trace(RIGHT), trace(status="failed", reason="no adapter")], "no adapter"),
    ],
)
def test_nothing_to_compare_is_inconclusive(traces: list[Trace], reason: str) -> None:
    """No trace, no product, the CPU alone, or no adapter is inconclusive, with a reason."""
    finding = judge_products(INVARIANT, several(traces))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith(reason)


def test_plan_covers_the_hard_cases() -> None:
    """The plan holds the stated shape, transposed views, ragged tiles, long sums, large values."""
    options = [scenario.options for scenario in plan_products(INVARIANT)]
    assert {"m": 64, "k": 64, "n": 64} in options
    assert {o.get("k") for o in options} >= {1, 15, 17, 31, 67, 512, 1024}
    assert {o.get("layout") for o in options} >= {"a_transposed", "b_transposed", "both_transposed"}
    assert any(o.get("magnitude", 1) > 1 for o in options)
    assert all(scenario.backends == ("wgpu",) for scenario in plan_products(INVARIANT))
