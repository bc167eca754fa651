"""Clauses of devices: products, operations, whole steps and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.clauses import CHECKS, devices
from entrenar_py.check.clauses.devices import plan_products
from entrenar_py.check.evidence.needs import ON_CPU
from entrenar_py.check.harness import companions
from entrenar_py.compute.wgpu import program
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Declined,
    End,
    Event,
    Explained,
    Poisoned,
    Product,
    Stepped,
    Trace,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import falsified, held, left_open

# --- products -------------------------------------------------------------------------------------

OF_PRODUCTS = Scenario(system="matmul", workload="linear", world_size=1, seed=0)
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


def product_trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    end = End(status=status, reason=reason)
    return traces.hand_written(*events, subject=OF_PRODUCTS, end=end)


def test_right_products_hold() -> None:
    """Right products hold, the stated one by both bounds, and a software adapter is noted."""
    elsewhere = replace(RIGHT, shape=(3, 1024, 2), result_shape=(3, 2), stated=False, error_cpu=9.0)
    finding = traces.judge("matmul", [product_trace(RIGHT, elsewhere)], 1e-4)
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
    found = falsified("matmul", product_trace(RIGHT), product_trace(wrong), tolerance=1e-4)
    assert message in found.message
    assert found.scenario == OF_PRODUCTS.to_dict()


def test_element_of_the_counterexample() -> None:
    """The counterexample names the element that broke its bound."""
    found = falsified("matmul", product_trace(replace(RIGHT, error_f64=1.0)), tolerance=1e-4)
    assert (found.place(), found.expected, found.got) == ("tensor product[5]", "<= 0.0002", "1")


def test_absolute_tolerance_applies_where_stated() -> None:
    """The tolerance applies to the stated shape only. Without one a note says so."""
    unstated = replace(RIGHT, stated=False, error_cpu=1.0)
    hardware = traces.judge("matmul", [product_trace(replace(unstated, software=False))], 1e-4)
    assert (hardware.verdict, hardware.notes) == (Verdict.HELD, ())
    finding = traces.judge("matmul", [product_trace(replace(RIGHT, error_cpu=1.0))])
    assert finding.verdict is Verdict.HELD
    assert "the clause has no tolerance: only the float32 bound was checked" in finding.notes


NO_PRODUCT = "no matrix product was computed on a GPU: F-WGPU-001 is decided by a probe"


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], NO_PRODUCT),
        ([product_trace()], NO_PRODUCT),
        ([product_trace(replace(RIGHT, backend="cpu"))], NO_PRODUCT),
        ([product_trace(RIGHT), product_trace(status="failed", reason="no adapter")], "no adapter"),
    ],
)
def test_no_product_is_inconclusive(runs: list[Trace], reason: str) -> None:
    """No trace, no product, the CPU alone, or no adapter is inconclusive, with a reason."""
    assert left_open("matmul", *runs, tolerance=1e-4).startswith(reason)


def test_plan_covers_the_hard_cases() -> None:
    """The plan holds the stated shape, transposed views, ragged tiles, long sums, large values."""
    planned = plan_products(traces.clause("matmul"))
    options = [scenario.options for scenario in planned]
    assert {"m": 64, "k": 64, "n": 64} in options
    assert {o.get("k") for o in options} >= {1, 15, 17, 31, 67, 512, 1024}
    assert {o.get("layout") for o in options} >= {"a_transposed", "b_transposed", "both_transposed"}
    assert any(o.get("magnitude", 1) > 1 for o in options)
    assert all(scenario.backends == ("wgpu",) for scenario in planned)


# --- operations -----------------------------------------------------------------------------------

OF_OPERATIONS = Scenario(
    system="wgpu_operations", workload="linear", world_size=1, seed=0, backends=("wgpu",)
)
EXACT = Explained(
    of="relu",
    tensor="result 0",
    device="llvmpipe (Vulkan)",
    software=True,
    finite=True,
    num_elements=3,
    num_bounded=3,
    element=0,
    error=0.0,
    bound=0.0,
)
KEPT = Poisoned(
    of="relu", tensor="result 0", device="llvmpipe (Vulkan)", software=True, reached=2, lost=0
)
REFUSED = Declined(
    case="no kernel",
    operation="inv",
    error="UsageError",
    message="aten.linalg_inv at model.py:3 in forward: no kernel",
    in_line=True,
    right=False,
    submissions=0,
)


def operations_trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    """Return a run of a probe."""
    end = End(status=status, reason=reason)
    return traces.hand_written(*events, subject=OF_OPERATIONS, end=end)


@pytest.mark.parametrize(
    ("check", "compared"),
    [("device_operations", 2), ("device_finiteness", 2), ("device_refusals", 3)],
)
def test_right_results_hold(check: str, compared: int) -> None:
    """Exact results, preserved NaNs and a refusal hold. Without an adapter all is inconclusive."""
    finding = traces.judge(check, [operations_trace(EXACT, KEPT, REFUSED)])
    assert (finding.verdict, finding.compared) == (Verdict.HELD, compared), finding
    assert "no adapter" in left_open(check, operations_trace(status="failed", reason="no adapter"))


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        ("device_operations", replace(EXACT, error=1e-9), "relu: result 0 is off by 1e-09"),
        ("device_operations", replace(EXACT, finite=False), "relu: result 0 is not finite"),
        ("device_finiteness", replace(EXACT, finite=False), "though all its inputs are"),
        ("device_finiteness", replace(KEPT, lost=1, element=4), "reaches 2 elements of result 0"),
        ("device_refusals", replace(REFUSED, error="TypeError"), "no kernel: the error"),
        ("device_refusals", replace(REFUSED, message="no"), "does not name inv and its line: no"),
        ("device_refusals", replace(REFUSED, in_line=False), "does not name inv and its line"),
        ("device_refusals", replace(REFUSED, submissions=1), "submissions before the refusal"),
        ("device_refusals", replace(REFUSED, error=None), "its result differs from the CPU's"),
    ],
)
def test_wrong_results_are_found(check: str, wrong: Event, message: str) -> None:
    """A wrong result is named by its operation or case."""
    found = falsified(check, operations_trace(EXACT, KEPT, wrong))
    assert message in found.message


def test_elements_without_a_bound_are_told_of() -> None:
    """A note says how many elements have no bound."""
    finding = held("device_operations", operations_trace(replace(EXACT, num_bounded=1)))
    assert "relu: result 0: 2 of 3 elements have no bound" in finding.notes


def test_what_is_right_need_not_be_refused() -> None:
    """A device may compute a case that another device refuses."""
    taken = replace(REFUSED, error=None, right=True, submissions=1)
    held("device_refusals", operations_trace(taken))


def test_nans_that_reach_nothing_show_nothing() -> None:
    """A NaN that reaches no result, as in a comparison, makes the run inconclusive."""
    assert "no NaN reached a result" in left_open(
        "device_finiteness", operations_trace(EXACT, replace(KEPT, reached=0))
    )


# --- training ----------------------------------------------------------------------------------

SHORT = CHECKS["device_training"].plan(traces.clause("device_training"))[0].with_(num_steps=3)


def trained(scenario: Scenario, *losses: float) -> Trace:
    updates = [traces.update(step, loss=loss, weight=7.0) for step, loss in enumerate(losses)]
    return replace(operations_trace(*updates), scenario=scenario)


def judged(*losses: float, cpu: tuple[float, ...] = (2.0, 1.5, 1.0)) -> Finding:
    """Judge a run on a device with the run on the CPU, with a tolerance of 1e-4."""
    device, model = companions.of((ON_CPU,), SHORT)
    return traces.judge("device_training", [trained(device, *losses), trained(model, *cpu)], 1e-4)


def test_losses_that_agree_hold() -> None:
    """Losses hold within the tolerance, relative to the first loss."""
    assert judged(2.0, 1.5001, 1.0001).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("losses", "step"),
    [((2.0, 1.5003, 1.0), 1), ((2.0, 1.5, float("nan")), 2), ((2.0, 1.5, 0.9), 2)],
)
def test_a_loss_that_differs_is_found(losses: tuple[float, ...], step: int) -> None:
    """A loss that differs is named at its step, even if it is lower."""
    assert traces.broken(judged(*losses)).step == step


def test_who_does_not_learn_is_found() -> None:
    """Runs that agree are falsified if neither learns."""
    found = traces.broken(judged(2.0, 2.0, 2.0, cpu=(2.0, 2.0, 2.0)))
    assert "mlp on the CPU does not learn" in found.message


@pytest.mark.parametrize("losses", [(), (2.0, 1.5)])
def test_losses_that_are_missing_are_missing(losses: tuple[float, ...]) -> None:
    """A run with no losses, or too few, is inconclusive."""
    assert judged(*losses).verdict is Verdict.INCONCLUSIVE


def test_a_device_without_the_cpu_beside_it_is_inconclusive() -> None:
    """Without the run on the CPU there is nothing to compare with."""
    assert "no run on the CPU" in left_open(
        "device_training", trained(SHORT, 2.0, 1.5, 1.0), tolerance=1e-4
    )


def test_training_is_planned_for_a_hundred_steps() -> None:
    """The plan trains two models, on the device alone."""
    known: list[Any] = CHECKS["device_training"].plan(traces.clause("device_training"))
    assert {one.workload: one.num_steps for one in known} == {"mlp": 100, "decoder": 100}
    assert all(one.backends == ("wgpu",) for one in known)


# --- steps ----------------------------------------------------------------------------------------

OF_STEPS = Scenario(system="wgpu_steps", workload="mlp", world_size=1, seed=0, backends=("wgpu",))
ONES = {"loss": record_tensor(np.ones(1, np.float32)), "w": record_tensor(np.ones(3, np.float32))}
FIRST = Stepped(
    step=0,
    backend="wgpu",
    device="llvmpipe (Vulkan)",
    software=True,
    num_samples=3,
    given="samples 0 to 3",
    earlier=0,
    submissions=2,
    read_backs=1,
    uploads=9,
    upload_bytes=9000,
    declared_bytes=40,
    num_inputs=2,
    dispatches=5,
    compiled=10,
    traced=70,
    on_host=("aten.ones.default",),
    results=ONES,
)
AGAIN = replace(
    FIRST,
    step=1,
    earlier=1,
    submissions=1,
    uploads=1,
    upload_bytes=512,
    compiled=0,
    traced=0,
    on_host=(),
)
NEAR = Explained(
    of="mlp",
    tensor="w",
    device="llvmpipe (Vulkan)",
    software=True,
    finite=True,
    num_elements=3,
    num_bounded=3,
    element=2,
    error=1e-7,
    bound=1e-6,
    total_error=2e-7,
    total_bound=3e-6,
    step=1,
)
CHECKED = ("device_cost", "device_steps", "device_repetition", "device_compilation")


def steps_trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    """Return a run of the probe."""
    end = End(status=status, reason=reason)
    return traces.hand_written(*events, subject=OF_STEPS, end=end)


@pytest.mark.parametrize("check", CHECKED)
def test_right_steps_hold(check: str) -> None:
    """The first step of a size may compile and upload freely. A software adapter is noted."""
    finding = held(check, steps_trace(FIRST, AGAIN, NEAR))
    assert finding.compared > 0
    assert finding.notes == ("software adapter llvmpipe (Vulkan)",)


@pytest.mark.parametrize("check", CHECKED)
def test_a_run_without_an_adapter_is_inconclusive(check: str) -> None:
    """The reason repeats the message of the adapter's library."""
    assert "no adapter" in left_open(check, steps_trace(status="failed", reason="no adapter"))


@pytest.mark.parametrize(
    ("check", "events", "reason"),
    [
        ("device_cost", (FIRST, NEAR), "as many samples as an earlier one"),
        ("device_compilation", (FIRST, NEAR), "as many samples as an earlier one"),
        ("device_repetition", (FIRST, NEAR), "given the same input"),
        ("device_steps", (FIRST, AGAIN), "no result of mlp was compared"),
        ("device_steps", (FIRST, replace(NEAR, num_bounded=0)), "no element of 3 has a bound"),
        ("device_steps", (FIRST, replace(NEAR, bound=inf)), "no element of 3 has a bound"),
        ("device_steps", (FIRST, replace(NEAR, total_bound=inf)), "together have no bound"),
    ],
)
def test_no_later_step_is_inconclusive(check: str, events: tuple[Event, ...], reason: str) -> None:
    """Steps made once each, and results without a bound, are inconclusive."""
    assert reason in left_open(check, steps_trace(*events))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"submissions": 6}, "submissions"),
        ({"dispatches": 257}, "submissions"),
        ({"submissions": 0}, "submissions"),
        ({"read_backs": 5}, "read-backs"),
        ({"uploads": 2}, "uploads"),
        ({"upload_bytes": 39}, "uploaded 39 bytes for weights"),
        ({"upload_bytes": 40 + 513}, "uploaded 553 bytes for weights"),
        ({"on_host": ("aten.mm.default",)}, "was computed on the CPU in part"),
        ({"dispatches": 0}, "dispatched nothing"),
    ],
)
def test_a_step_that_costs_more_is_found(changed: dict[str, Any], message: str) -> None:
    """A step that costs more is named, with its cost."""
    wrong = replace(AGAIN, **changed)
    found = falsified("device_cost", steps_trace(FIRST, AGAIN, replace(wrong, step=2)))
    assert (found.step, message in found.message) == (2, True), found


@pytest.mark.parametrize(("dispatches", "submissions"), [(256, 1), (257, 2), (1817, 8)])
def test_many_dispatches_are_submitted_in_parts(dispatches: int, submissions: int) -> None:
    """The backend submits as many together as the check allows, so that it isn't waited for."""
    assert program.DISPATCHES == devices.DISPATCHES
    long = replace(AGAIN, step=2, dispatches=dispatches, submissions=submissions)
    held("device_cost", steps_trace(FIRST, AGAIN, long))


@pytest.mark.parametrize("changed", [{"compiled": 2}, {"traced": 60}])
def test_a_step_that_is_compiled_again_is_found(changed: dict[str, Any]) -> None:
    """A later step that compiles shaders or traces the model is falsified."""
    wrong = replace(AGAIN, step=2, earlier=2, **changed)
    found = falsified("device_compilation", steps_trace(FIRST, AGAIN, wrong))
    assert found.step == 2
    assert "step 3 of 3 samples of mlp" in found.message


def test_other_bits_are_found() -> None:
    """Equal inputs must give equal bits; other inputs need not."""
    other = {**ONES, "w": record_tensor(np.zeros(3, np.float32))}
    elsewhere = replace(AGAIN, step=2, given="samples 3 to 6", results=other)
    held("device_repetition", steps_trace(FIRST, AGAIN, elsewhere))
    wrong = replace(elsewhere, given=FIRST.given)
    found = falsified("device_repetition", steps_trace(FIRST, AGAIN, wrong))
    assert (found.step, found.tensor) == (2, "w")


@pytest.mark.parametrize(
    ("changed", "element"),
    [
        ({"error": 2e-6}, 2),
        ({"error": float("inf")}, 2),
        ({"total_error": 4e-6}, None),
        ({"finite": False}, None),
    ],
)
def test_a_result_that_rounding_does_not_explain_is_found(
    changed: dict[str, Any], element: int | None
) -> None:
    """An error in one element, in all together, or a non-finite result is falsified."""
    wrong = replace(NEAR, **changed)
    found = falsified("device_steps", steps_trace(FIRST, AGAIN, wrong))
    assert (found.step, found.tensor, found.element) == (1, "w", element)
