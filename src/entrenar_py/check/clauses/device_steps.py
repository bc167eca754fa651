"""F-WGPU-002, 003, 005, 006: the cost, results, repetition and compilation of steps on a device.

Source: wgpu-backend-v1. All four are judged on the same runs of the system `wgpu_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Explained, Stepped, Trace
from entrenar_py.shared.verdict import Tally

DISPATCHES = 256  # that a backend may submit together
_ALIGNMENT = 256  # bytes; WebGPU's largest min-storage-buffer-offset-alignment
NOTHING = "no step on a device was recorded"

PLANNED: tuple[dict[str, Any], ...] = (
    {"workload": "linear", "options": {"samples": [1, 13]}},
    {"workload": "mlp", "width": 17, "dropout": 0.3},
    {"workload": "decoder", "dropout": 0.1, "options": {"samples": [1, 3]}},
    {"workload": "decoder_full", "options": {"samples": [3]}},
)


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan steps of every workload with odd numbers of samples, two of the workloads with dropout.

    The largest workload has one number of samples only, since tracing takes long.
    """
    return [probes.scenario("wgpu_steps", backends=("wgpu",), **fields) for fields in PLANNED]


def _steps(tally: Tally, trace: Trace) -> list[Stepped]:
    steps = trace.of(Stepped)
    for step in steps[:1]:
        probes.note_software(tally, step)
    return steps


def _later(tally: Tally, trace: Trace) -> Iterator[Stepped]:
    """Yield steps with as many samples as an earlier one. Count it as missing if there are none."""
    steps = _steps(tally, trace)
    later = [step for step in steps if step.earlier]
    if steps and not later:
        tally.miss(f"no step of {trace.scenario.workload} had as many samples as an earlier one")
    yield from later


def compare_cost(tally: Tally, trace: Trace) -> None:
    """Check that each step with as many samples as an earlier one makes one upload, one submission
    for every DISPATCHES and one read-back, uploads only its inputs, and computes nothing on the
    CPU.
    """
    for step in _later(tally, trace):
        what = f"a step of {step.num_samples} samples of {trace.scenario.workload}"
        place = evidence.place(trace, step)
        submissions = max(1, -(-step.dispatches // DISPATCHES))
        tally.equal(submissions, step.submissions, f"{what}: submissions", **place)
        tally.equal(1, step.read_backs, f"{what}: read-backs", **place)
        tally.equal(1, step.uploads, f"{what}: uploads", **place)
        most = step.declared_bytes + _ALIGNMENT * step.num_inputs
        tally.check(
            step.declared_bytes <= step.upload_bytes <= most,
            f"{what} uploaded {step.upload_bytes} bytes for weights, samples and masks of "
            f"{step.declared_bytes} bytes",
            expected=f"{step.declared_bytes} to {most}",
            got=str(step.upload_bytes),
            **place,
        )
        tally.equal((), step.on_host, f"{what} was computed on the CPU in part", **place)
        tally.check(step.dispatches > 0, f"{what} dispatched nothing", **place)


def compare_results(tally: Tally, trace: Trace) -> None:
    """Check that rounding explains the errors of the loss and of every gradient."""
    results = trace.of(Explained)
    if _steps(tally, trace) and not results:
        tally.miss(f"no result of {trace.scenario.workload} was compared with float64")
    for result in results:
        closeness.judge_explained(tally, result, trace)


def compare_repetition(tally: Tally, trace: Trace) -> None:
    """Check that steps with the same inputs give the same bits, whatever ran in between."""
    first: dict[str, Stepped] = {}
    repeated = 0
    for step in _steps(tally, trace):
        before = first.setdefault(step.given, step)
        if before is step:
            continue
        repeated += 1
        closeness.compare_exact(
            tally,
            before.results,
            step.results,
            f"step {step.step} had the same input as step {before.step} ({step.given}) and gave "
            "another result",
            **evidence.place(trace, step),
        )
    if first and not repeated:
        tally.miss(f"no two steps of {trace.scenario.workload} were given the same input")


def compare_compilation(tally: Tally, trace: Trace) -> None:
    """Check that a step with as many samples as an earlier one compiles and traces nothing."""
    for step in _later(tally, trace):
        what = f"step {step.earlier + 1} of {step.num_samples} samples of {trace.scenario.workload}"
        place = evidence.place(trace, step)
        tally.equal(0, step.compiled, f"{what} compiled shaders or pipelines", **place)
        tally.equal(0, step.traced, f"{what} was traced again, operation by operation", **place)
