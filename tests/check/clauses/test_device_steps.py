"""F-WGPU-002, 003, 005, 006 on right and wrong steps of a device."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.clauses import devices
from entrenar_py.compute.wgpu import program
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event, Explained, Stepped, Trace, record_tensor
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces

SCENARIO = Scenario(system="wgpu_steps", workload="mlp", world_size=1, seed=0, backends=("wgpu",))
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


def trace(*events: Event, status: str = "completed", reason: str = "") -> Trace:
    """Return a run of the probe."""
    end = End(status=status, reason=reason)
    return Trace(scenario=SCENARIO, environment={}, promises=(), events=(*events, end))


@pytest.mark.parametrize("check", CHECKED)
def test_right_steps_hold(check: str) -> None:
    """The first step of a size may compile and upload freely. A software adapter is noted."""
    finding = traces.judge(check, [trace(FIRST, AGAIN, NEAR)])
    assert finding.verdict is Verdict.HELD, finding
    assert finding.compared > 0
    assert finding.notes == ("software adapter llvmpipe (Vulkan)",)


@pytest.mark.parametrize("check", CHECKED)
def test_a_run_without_an_adapter_is_inconclusive(check: str) -> None:
    """The reason repeats the message of the adapter's library."""
    finding = traces.judge(check, [trace(status="failed", reason="no adapter")])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no adapter" in finding.reason


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
def test_nothing_to_compare_is_inconclusive(
    check: str, events: tuple[Event, ...], reason: str
) -> None:
    """Steps made once each, and results without a bound, are inconclusive."""
    finding = traces.judge(check, [trace(*events)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert reason in finding.reason


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
    found = traces.broken(
        traces.judge("device_cost", [trace(FIRST, AGAIN, replace(wrong, step=2))])
    )
    assert (found.step, message in found.message) == (2, True), found


@pytest.mark.parametrize(("dispatches", "submissions"), [(256, 1), (257, 2), (1817, 8)])
def test_many_dispatches_are_submitted_in_parts(dispatches: int, submissions: int) -> None:
    """The backend submits as many together as the check allows, so that it isn't waited for."""
    assert program.DISPATCHES == devices.DISPATCHES
    long = replace(AGAIN, step=2, dispatches=dispatches, submissions=submissions)
    right = traces.judge("device_cost", [trace(FIRST, AGAIN, long)])
    assert right.verdict is Verdict.HELD


@pytest.mark.parametrize("changed", [{"compiled": 2}, {"traced": 60}])
def test_a_step_that_is_compiled_again_is_found(changed: dict[str, Any]) -> None:
    """A later step that compiles shaders or traces the model is falsified."""
    wrong = replace(AGAIN, step=2, earlier=2, **changed)
    found = traces.broken(traces.judge("device_compilation", [trace(FIRST, AGAIN, wrong)]))
    assert found.step == 2
    assert "step 3 of 3 samples of mlp" in found.message


def test_other_bits_are_found() -> None:
    """Equal inputs must give equal bits; other inputs need not."""
    other = {**ONES, "w": record_tensor(np.zeros(3, np.float32))}
    elsewhere = replace(AGAIN, step=2, given="samples 3 to 6", results=other)
    assert traces.judge("device_repetition", [trace(FIRST, AGAIN, elsewhere)]).verdict == "held"
    wrong = replace(elsewhere, given=FIRST.given)
    found = traces.broken(traces.judge("device_repetition", [trace(FIRST, AGAIN, wrong)]))
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
    found = traces.broken(traces.judge("device_steps", [trace(FIRST, AGAIN, wrong)]))
    assert (found.step, found.tensor, found.element) == (1, "w", element)
