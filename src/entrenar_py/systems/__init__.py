"""What can be run: `run(scenario) -> Trace`; systems know nothing of contracts.

A crash inside a system is a record, not an exception: the trace then ends `failed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from entrenar_py import mutants, trace
from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario

# name -> what it is; the module of the same name holds `run`.
SYSTEMS: dict[str, str] = {
    "reference": "the deterministic data-parallel trainer, all workers in this process",
    "textbook": "a plain torch data-parallel loop, independent of the reference",
    "matmul": "matrix products on one backend against the CPU and float64",
    "backend_chain": "the fallback chain under failing backends",
    "manifest": "the gradients that each backend really produces",
    "memory": "one worker's share in a process of its own, its memory measured",
}


def run(scenario: Scenario) -> trace.Trace:
    """Runs `scenario`, with its mutant planted if it names one, on one thread.

    Raises UsageError for an unknown system or mutant; whatever goes wrong in the run itself ends
    the trace as `failed`, with the reason.
    """
    if scenario.system not in SYSTEMS:
        raise UsageError(f"system={scenario.system!r}: allowed are {', '.join(SYSTEMS)}")
    module = import_module(f"entrenar_py.systems.{scenario.system}")
    with mutants.planted(scenario.mutant), _one_thread():
        try:
            result: trace.Trace = module.run(scenario)
        except Exception as error:  # noqa: BLE001  (a system's crash is a result: inconclusive)
            return _failed(scenario, f"{type(error).__name__}: {error}")
    return result


def _failed(scenario: Scenario, reason: str) -> trace.Trace:
    end = trace.End(status="failed", reason=reason)
    return trace.Trace(scenario=scenario, environment={}, promises=(), events=(end,))


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread: how a sum is split over threads is part of its order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
