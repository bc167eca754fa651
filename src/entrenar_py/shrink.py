"""A smaller scenario that still breaks the invariant: fewer steps, workers, samples, features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.verdict import Finding, Verdict

MAX_RUNS = 100

# field -> values to try, simplest first; a value is tried only if it comes before the present one.
_SIMPLER: dict[str, tuple[Any, ...]] = {
    "workload": ("linear", "mlp"),
    "optimizer": ("sgd", "momentum"),
    "schedule": ("constant",),
    "warmup_steps": (0,),
    "dropout": (0.0,),
    "weight_decay": (0.0,),
    "clip_norm": (None,),
    "accumulation": (1, 2),
    "seed": (0,),
}
_SMALLER = ("num_steps", "world_size", "num_shards", "batch_size", "num_samples", "width")


def shrink(
    scenario: Scenario, finding: Finding, attempt: Callable[[Scenario], Finding]
) -> tuple[Scenario, Finding]:
    """The simplest scenario found within MAX_RUNS attempts that is still FALSIFIED.

    Greedy and deterministic. Ends with a run that records values, if that breaks too, so that the
    counterexample names element, expected and got.
    """
    runs = 0
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(scenario):
            if runs >= MAX_RUNS:
                break
            runs += 1
            result = attempt(candidate)
            if result.verdict is Verdict.FALSIFIED:
                scenario, finding, improved = candidate, result, True
                break
    valued = scenario.with_(detail="values")
    result = attempt(valued)
    return (valued, result) if result.verdict is Verdict.FALSIFIED else (scenario, finding)


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    for changes in _changes(scenario):
        try:
            yield scenario.with_(**changes)
        except UsageError:
            continue


def _changes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    for index in range(len(scenario.faults)):
        yield {"faults": scenario.faults[:index] + scenario.faults[index + 1 :]}
    for index in range(len(scenario.stops)):
        yield {"stops": scenario.stops[:index] + scenario.stops[index + 1 :]}
    for name, values in _SIMPLER.items():
        present = getattr(scenario, name)
        if present in values:
            values = values[: values.index(present)]
        yield from ({name: value} for value in values)
    for name in _SMALLER:
        present = getattr(scenario, name)
        for value in dict.fromkeys((1, 2, 3, present // 2, present - 1)):
            if 0 < value < present:
                yield {name: value}
