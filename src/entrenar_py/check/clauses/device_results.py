"""F-WGPU-004, 007, 009: the results of single operations, NaN and Inf, and refusals on a device.

Source: wgpu-backend-v1.
"""

from __future__ import annotations

from entrenar_py.check import evidence
from entrenar_py.check.clauses import device_steps, probes
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Declined, Explained, Poisoned, Trace
from entrenar_py.shared.verdict import Tally


def plan_operations(invariant: Invariant) -> list[Scenario]:
    """Plan single operations."""
    return [probes.scenario("wgpu_operations", backends=("wgpu",))]


def plan_finiteness(invariant: Invariant) -> list[Scenario]:
    """Plan single operations, and steps of every workload."""
    return [*plan_operations(invariant), *device_steps.plan(invariant)]


def plan_refusals(invariant: Invariant) -> list[Scenario]:
    """Plan operations, types, sizes and programs that have no kernel."""
    return [probes.scenario("wgpu_refusals", backends=("wgpu",))]


def compare_operations(tally: Tally, trace: Trace) -> None:
    """Check that every element of every result is within its float32 rounding bound."""
    for result in trace.of(Explained):
        probes.note_software(tally, result)
        closeness.judge_explained(tally, result, trace)


def compare_finiteness(tally: Tally, trace: Trace) -> None:
    """Check that finite inputs give finite results, and each element that a NaN reaches is NaN."""
    for result in trace.of(Explained):
        message = f"{result.of}: {result.tensor} is not finite, though all its inputs are"
        place = evidence.place(trace, result)
        tally.check(result.finite, message, tensor=result.tensor, **place)
    reached = [result for result in trace.of(Poisoned) if result.reached]
    if trace.of(Explained) and not reached:
        tally.miss(f"no NaN reached a result on {trace.scenario.system}")
    for poisoned in reached:
        probes.note_software(tally, poisoned)
        tally.check(
            not poisoned.lost,
            f"{poisoned.of}: a NaN reaches {poisoned.reached} elements of {poisoned.tensor}, and "
            f"{poisoned.lost} of them are numbers on the device",
            tensor=poisoned.tensor,
            element=poisoned.element,
            expected="nan",
            got="a number",
            **evidence.place(trace, poisoned),
        )


def compare_refusals(tally: Tally, trace: Trace) -> None:
    """Check that each case gives a right result, or a UsageError that names operation and line."""
    for case in trace.of(Declined):
        place = {"tensor": case.case, "scenario": trace.scenario}
        if case.error is None:
            message = f"{case.case}: was not refused, and its result is not the CPU's"
            tally.check(case.right, message, expected="a UsageError", got="a result", **place)
            continue
        tally.equal("UsageError", case.error, f"{case.case}: the error", **place)
        tally.check(
            case.operation in case.message and case.in_line,
            f"{case.case}: the message does not name {case.operation} and its line: {case.message}",
            expected=f"{case.operation} at a line",
            got=case.message,
            **place,
        )
        tally.equal(0, case.submissions, f"{case.case}: submissions before the refusal", **place)
