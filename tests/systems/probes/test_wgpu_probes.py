"""The probes of a wgpu adapter count what was done, and correct steps pass their clauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.check.clauses import CHECKS
from entrenar_py.compute import wgpu
from entrenar_py.compute.wgpu.bounds.intervals import Bounded
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Declined, Explained, Poisoned, Stepped
from entrenar_py.shared.verdict import Verdict
from entrenar_py.systems.probes import device_meter, wgpu_operations, wgpu_steps
from entrenar_py.systems.probes.wgpu_operations import CASES
from tests import traces

PROBES = ("wgpu_steps", "wgpu_operations", "wgpu_refusals")


def scenario(system: str, **changes: Any) -> Scenario:
    return Scenario(
        system=system, workload="linear", world_size=1, seed=3, backends=("wgpu",)
    ).with_(**changes)


@pytest.fixture
def adapter() -> None:
    """Return an adapter, or skip the test with the reason."""
    try:
        backends.open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("system", PROBES)
def test_without_an_adapter_a_probe_fails_with_the_reason(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an adapter the run fails, and its clauses are inconclusive."""

    def absent(index: int | None = None) -> wgpu.WgpuBackend:
        raise BackendUnavailable("backend wgpu: no adapter")

    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    trace = systems.run(scenario(system))
    assert (trace.end.status, trace.end.reason) == ("failed", "backend wgpu: no adapter")


@pytest.mark.wgpu
@pytest.mark.usefixtures("adapter")
def test_right_steps_hold() -> None:
    """A small model holds all clauses of steps, and none of the compared values is zero."""
    trace = systems.run(scenario("wgpu_steps", options={"samples": [3, 7]}))
    checked = [name for name, check in CHECKS.items() if name.startswith("device_")]
    for name in checked:
        if name in ("device_operations", "device_refusals", "device_training"):
            continue
        finding = traces.judge(name, [trace])
        assert finding.verdict is Verdict.HELD, (name, finding)
    assert len(trace.of(Stepped)) == 11
    assert {one.tensor for one in trace.of(Explained)} == {"loss", "weight", "bias"}
    assert all(one.reached == 1 for one in trace.of(Poisoned))
    first, *_ = trace.of(Stepped)
    assert first.traced > 0, "the first step of a size is traced, and that is seen"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 3}, "samples=3: use a list of different whole numbers >= 1"),
        ({"samples": [3, 3]}, r"samples=\[3, 3\]: use a list of different"),
        ({"samples": [26]}, r"samples=\[26\] with num_samples=50: use num_samples>=52"),
    ],
)
def test_sizes_that_no_step_has_are_refused(options: dict[str, Any], message: str) -> None:
    """Impossible numbers of samples are refused with the allowed ones."""
    with pytest.raises(UsageError, match=message):
        wgpu_steps.run(scenario("wgpu_steps", options=options))


@pytest.mark.wgpu
@pytest.mark.usefixtures("adapter")
def test_few_operations_hold() -> None:
    """Exact operations have no error, NaNs stay NaNs, and an unknown name is refused."""
    wanted = ["relu", "amax", "mm_square"]
    trace = systems.run(scenario("wgpu_operations", options={"operations": wanted}))
    for name in ("device_operations", "device_finiteness"):
        finding = traces.judge(name, [trace])
        assert finding.verdict is Verdict.HELD, (name, finding)
    assert [one.of for one in trace.of(Explained)] == [name for name in wanted for _ in range(4)]
    assert all(one.error == one.bound == 0 for one in trace.of(Explained) if one.of == "relu")
    with pytest.raises(UsageError, match="operations='relus': allowed are abs, add"):
        wgpu_operations.run(scenario("wgpu_operations", options={"operations": ["relus"]}))


@pytest.mark.wgpu
@pytest.mark.usefixtures("adapter")
def test_refusals_hold() -> None:
    """Each case is refused with the names of its operation and line, or needs no elements."""
    trace = systems.run(scenario("wgpu_refusals"))
    finding = traces.judge("device_refusals", [trace])
    assert finding.verdict is Verdict.HELD, finding
    computed = {one.case for one in trace.of(Declined) if one.error is None}
    assert computed == {"a slice of no rows", "a product over no elements", "an input of no rows"}


@pytest.mark.wgpu
@pytest.mark.usefixtures("adapter")
def test_a_meter_counts_what_was_done() -> None:
    """The meter counts a program's two runs, and the operations that torch computes on the host."""
    device = backends.open_backend("wgpu").programs.device  # type: ignore[attr-defined]
    x = torch.ones(5)
    with device_meter.watching() as compiling:
        program = compile_step(device, lambda x: (x * 7.25,), [x])
    assert compiling.compiled == 2 * program.counts.pipelines
    assert compiling.traced > 0
    with device_meter.watching() as meter:
        program.run([np.ones(5, np.float32)])
        program.run([np.ones(5, np.float32)])
    assert (meter.submissions, meter.read_backs, meter.uploads) == (2, 2, 2)
    assert (meter.dispatches, meter.compiled, meter.traced) == (2, 0, 0)
    assert meter.upload_bytes == program.counts.upload_bytes
    assert meter.on_host == []
    with device_meter.watching() as meter:
        x.view(1, 5).detach()
        meter.leaving_out(x.exp)()
        x.sum()
    assert meter.on_host == ["aten.sum.default"]


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_tried(name: str) -> None:
    """Operands and results of each case are finite; poisoning adds NaNs to a copy only."""
    case = CASES[name]
    given = wgpu_operations.operands(case, torch.Generator().manual_seed(0))
    assert all(one.isfinite().all() for group in given for one in group)
    for one in wgpu_operations.results(case, *given):
        assert one.numel() > 0
        assert one.isfinite().all()
    assert wgpu_operations.poisoned(case, given[0])[0].isnan().any()
    assert not given[0][0].isnan().any()


def test_an_interval_that_is_beside_its_own_value_explains_nothing() -> None:
    """An element outside its interval is reported as the worst, even if others are inside."""
    one = torch.ones(2)
    beside = Bounded(torch.ones(2).double(), torch.tensor([0.5, 2.0]), torch.tensor([1.5, 3.0]))
    device = cast("Any", SimpleNamespace(name="none", software=True))
    found = wgpu_operations._explained("op", "result 0", one * 0.75, one, beside, device)
    assert (found.element, found.error, found.bound) == (1, 0.25, 0.0)
