"""F-WGPU-004, 007, 009: each operation alone, numbers that are none, and what is refused.

Source: wgpu-backend-v1.
"""

from __future__ import annotations

from entrenar_py.checks import device_steps, evidence, missing, rounding_bound
from entrenar_py.checks.needs import Traces
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Declined, Explained, Poisoned
from entrenar_py.verdict import Finding, Tally


def _probe(system: str) -> Scenario:
    return Scenario(system=system, workload="linear", world_size=1, seed=0, backends=("wgpu",))


def plan_operations(invariant: Invariant) -> list[Scenario]:
    """Every operation, alone."""
    return [_probe("wgpu_operations")]


def plan_finiteness(invariant: Invariant) -> list[Scenario]:
    """Every operation, and steps of every workload."""
    return [_probe("wgpu_operations"), *device_steps.plan(invariant)]


def plan_refusals(invariant: Invariant) -> list[Scenario]:
    """Operations, types, sizes and programs that have no kernel."""
    return [_probe("wgpu_refusals")]


def judge_operations(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if every element of every result lies where a float32 device may take it."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Explained):
            _note(tally, one)
            rounding_bound.judge(tally, one, trace.scenario)
    return tally.finding(nothing=missing.probed(invariant, "no operation was tried on a device"))


def judge_finiteness(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if finite inputs gave finite results, and a NaN was a NaN wherever it reaches."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Explained):
            tally.check(
                one.finite,
                f"{one.of}: {one.tensor} is not finite, though all that it is made of is",
                tensor=one.tensor,
                step=one.step,
                scenario=trace.scenario,
            )
        reached = [one for one in trace.of(Poisoned) if one.reached]
        if trace.of(Explained) and not reached:
            tally.miss(f"no NaN reached a result on {trace.scenario.system}")
        for poisoned in reached:
            _note(tally, poisoned)
            _judge_poisoned(tally, poisoned, trace.scenario)
    return tally.finding(nothing=missing.probed(invariant, "no NaN was given to a device"))


def _judge_poisoned(tally: Tally, one: Poisoned, scenario: Scenario) -> None:
    tally.check(
        not one.lost,
        f"{one.of}: of {one.reached} elements of {one.tensor} that a NaN reaches, {one.lost} are "
        "numbers on the device",
        tensor=one.tensor,
        step=one.step,
        element=one.element,
        expected="nan",
        got="a number",
        scenario=scenario,
    )


def judge_refusals(invariant: Invariant, traces: Traces) -> Finding:
    """HELD if each was refused by a UsageError with operation and line, and nothing was run; where
    nothing was refused, the result is right."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Declined):
            place = {"tensor": one.case, "scenario": trace.scenario}
            if one.error is None:
                message = f"{one.case}: was taken, and what came out is not what the CPU computes"
                tally.check(one.right, message, expected="a UsageError", got="a result", **place)
                continue
            tally.equal("UsageError", one.error, f"{one.case}: the error", **place)
            named = one.operation in one.message and one.in_line
            tally.check(
                named,
                f"{one.case}: the message does not name {one.operation} and its line: "
                f"{one.message}",
                expected=f"{one.operation} at a line",
                got=one.message,
                **place,
            )
            tally.equal(0, one.submissions, f"{one.case}: submissions before the refusal", **place)
    return tally.finding(nothing=missing.probed(invariant, "nothing was asked that has no kernel"))


def _note(tally: Tally, one: Explained | Poisoned) -> None:
    if one.software:
        tally.note(f"software adapter {one.device}")
