"""The systems that the harness runs: `run` runs a scenario on its system and returns the trace.

Their table is in `entrenar_py.shared.systems`.

Systems know nothing of contracts. A crash inside a system raises nothing: its trace ends `failed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from entrenar_py.shared import mutants, systems, trace
from entrenar_py.shared.scenario import Scenario


def run(scenario: Scenario, *, every_fault: bool = True) -> trace.Trace:
    """Run `scenario` on one thread, with its mutant planted if it names one.

    Raises UsageError for an unknown system or mutant. Any other error ends the trace as `failed`,
    with the reason. With `every_fault`, a trainer's trace also fails if a planned fault never
    occurs. Pass False if an earlier fault may remove the worker of a later fault.
    """
    systems.require("system", scenario.system, tuple(systems.SYSTEMS))
    module = module_of(scenario.system)
    with mutants.planted(scenario.mutant) as planting, _one_thread():
        try:
            systems.require_possible(scenario)
            require_workload(scenario)
            result: trace.Trace = module.run(scenario)
            result = replace(result, traits=systems.traits_of(scenario))
        except Exception as error:  # noqa: BLE001  (a system's crash is a result: inconclusive)
            return failed(scenario, f"{type(error).__name__}: {error}")
    absent = (
        systems.missed(result)
        if every_fault and not systems.SYSTEMS[scenario.system].is_probe
        else None
    )
    if absent is not None:
        return failed(
            scenario, f"fault {absent.to_dict()} was never injected: no worker reaches it"
        )
    if scenario.mutant is not None and planting.struck:
        return replace(result, events=(trace.Planted(name=scenario.mutant), *result.events))
    return result


def module_of(system: str) -> ModuleType:
    """Return the module with the function `run` of `system`, which is one of SYSTEMS."""
    room = systems.SYSTEMS[system].room
    name = room if room.count(".") == 2 else f"{room}.{system}"
    return import_module(f"entrenar_py.{name}")


def load(scenario: Scenario) -> None:
    """Load torch and the code of the scenario's system, so that the run itself loads little."""
    if scenario.system in systems.SYSTEMS:
        import torch  # noqa: F401

        module_of(scenario.system)


def require_workload(scenario: Scenario) -> None:
    """Raise UsageError if a fault of `scenario` is at a place that its workload doesn't have.

    Loads torch. `scenario` must already be valid for `entrenar_py.shared.systems`.
    """
    if not systems.SYSTEMS[scenario.system].trains:
        return
    from entrenar_py.train.coordinator import models  # loads torch

    workload = models.model_of(scenario)
    for fault in scenario.faults:
        models.place_of(fault, workload)


def failed(scenario: Scenario, reason: str) -> trace.Trace:
    """Return the trace of a run of `scenario` that recorded only the reason why it failed."""
    end = trace.End(status="failed", reason=reason)
    return trace.Trace(scenario=scenario, environment={}, promises=(), events=(end,))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: the number of threads changes the order in which sums are added."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
