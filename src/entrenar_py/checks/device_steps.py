"""F-WGPU-002, 003, 005, 006: what steps of training on a device cost, give, and give again.

Source: wgpu-backend-v1. All four are judged on the same runs of the system `wgpu_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from entrenar_py.checks import evidence, missing, rounding_bound
from entrenar_py.checks.needs import Traces
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Explained, Stepped, Trace
from entrenar_py.verdict import Finding, Tally

_ALIGNMENT = 256  # bytes; WebGPU's largest min-storage-buffer-offset-alignment
_NOTHING = "no step on a device was recorded"

PLANNED: tuple[dict[str, Any], ...] = (
    {"workload": "linear", "options": {"samples": [1, 13]}},
    {"workload": "mlp", "width": 17, "dropout": 0.3},
    {"workload": "decoder", "dropout": 0.1, "options": {"samples": [1, 3]}},
    {"workload": "decoder_full", "options": {"samples": [3]}},
)


def plan(invariant: Invariant) -> list[Scenario]:
    """Every workload, in odd numbers of samples, two of them with dropout.

    Tracing is what takes time: of the largest, one number has to do.
    """
    return [
        Scenario(system="wgpu_steps", world_size=1, seed=0, backends=("wgpu",), **fields)
        for fields in PLANNED
    ]


def judge_cost(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if each step but the first of its size was one upload of what it was given, one
    submission and one read-back, and nothing was computed on the CPU meanwhile."""
    return _judged(invariant, traces, _judge_cost)


def judge_results(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if rounding explains how far the loss and every gradient are off, tensor by tensor."""
    return _judged(invariant, traces, _judge_results)


def judge_repetition(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if steps that were given the same gave the same bits, whatever was done in between."""
    return _judged(invariant, traces, _judge_repetition)


def judge_compilation(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if a step of as many samples as an earlier one compiled and traced nothing."""
    return _judged(invariant, traces, _judge_compilation)


def _judged(invariant: Invariant, traces: Traces, judge: Callable[[Tally, Trace], None]) -> Finding:
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for step in trace.of(Stepped)[:1]:
            if step.software:
                tally.note(f"software adapter {step.device}")
        judge(tally, trace)
    return tally.finding(nothing=missing.probed(invariant, _NOTHING))


def _later(tally: Tally, trace: Trace) -> Iterator[Stepped]:
    """The steps that were not the first of their size; a run without one is missing something."""
    steps = trace.of(Stepped)
    later = [step for step in steps if step.earlier]
    if steps and not later:
        tally.miss(f"no step of {trace.scenario.workload} was as large as one before it")
    yield from later


def _judge_cost(tally: Tally, trace: Trace) -> None:
    for step in _later(tally, trace):
        what = f"a step of {step.num_samples} samples of {trace.scenario.workload}"
        place = {"step": step.step, "scenario": trace.scenario}
        tally.equal(1, step.submissions, f"{what}: submissions", **place)
        tally.equal(1, step.read_backs, f"{what}: read-backs", **place)
        tally.equal(1, step.uploads, f"{what}: uploads", **place)
        most = step.declared_bytes + _ALIGNMENT * step.num_inputs
        tally.check(
            step.declared_bytes <= step.upload_bytes <= most,
            f"{what} uploaded {step.upload_bytes} bytes of weights, samples and masks that take "
            f"{step.declared_bytes}",
            expected=f"{step.declared_bytes} to {most}",
            got=str(step.upload_bytes),
            **place,
        )
        tally.equal((), step.on_host, f"{what} was computed on the CPU in part", **place)
        tally.check(step.dispatches > 0, f"{what} dispatched nothing", **place)


def _judge_results(tally: Tally, trace: Trace) -> None:
    found = trace.of(Explained)
    if trace.of(Stepped) and not found:
        tally.miss(f"no result of {trace.scenario.workload} was compared with float64")
    for one in found:
        rounding_bound.judge(tally, one, trace.scenario)


def _judge_repetition(tally: Tally, trace: Trace) -> None:
    first: dict[str, Stepped] = {}
    repeated = 0
    for step in trace.of(Stepped):
        before = first.setdefault(step.given, step)
        if before is step:
            continue
        repeated += 1
        evidence.compare_exact(
            tally,
            before.results,
            step.results,
            f"step {step.step} was given what step {before.step} was ({step.given}) and gave "
            "something else",
            step=step.step,
            scenario=trace.scenario,
        )
    if first and not repeated:
        tally.miss(f"no step of {trace.scenario.workload} was given the same as another")


def _judge_compilation(tally: Tally, trace: Trace) -> None:
    for step in _later(tally, trace):
        what = f"step {step.earlier + 1} of {step.num_samples} samples of {trace.scenario.workload}"
        place = {"step": step.step, "scenario": trace.scenario}
        tally.equal(0, step.compiled, f"{what} compiled shaders or pipelines", **place)
        tally.equal(0, step.traced, f"{what} was traced again, operation by operation", **place)
