"""Searches for a smaller scenario that still breaks its clause: fewer steps, workers, samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict

MAX_RUNS = 150

# Field -> values to try, simplest first. Only values before the present one are tried.
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
    scenario: Scenario,
    attempt: Callable[[Scenario], Finding],
    *,
    fixed: Collection[str] = (),
) -> Iterator[tuple[Scenario, Finding]]:
    """Yield ever simpler scenarios that are still FALSIFIED, with their findings; the last is best.

    Greedy and deterministic, within MAX_RUNS attempts. A caller may stop after any scenario. Fields
    named in `fixed` stay. The last scenario also records the tensors' values, if it is FALSIFIED
    with them, too, so that the counterexample names element, expected and got.
    """
    tried = {scenario}
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(scenario, fixed):
            if candidate in tried:
                continue
            if len(tried) > MAX_RUNS:
                break
            tried.add(candidate)
            finding = attempt(candidate)
            if finding.verdict is Verdict.FALSIFIED:
                scenario, improved = candidate, True
                yield scenario, finding
                break
    if scenario.detail != "values":
        scenario = scenario.with_(detail="values")
        finding = attempt(scenario)
        if finding.verdict is Verdict.FALSIFIED:
            yield scenario, finding


def _candidates(scenario: Scenario, fixed: Collection[str]) -> Iterator[Scenario]:
    for changes in _changes(scenario):
        if fixed and not changes.keys().isdisjoint(fixed):
            continue
        try:
            yield scenario.with_(**changes)
        except UsageError:
            continue


def _changes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    for name in ("faults", "stops"):
        parts = getattr(scenario, name)
        for index, part in enumerate(parts):
            for less in ((), *_earlier(part)):
                yield {name: (*parts[:index], *less, *parts[index + 1 :])}
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


def _earlier(part: Fault | int) -> Iterator[tuple[Fault | int]]:
    """Yield `part` at half its step, rank or shard, so that sizes can shrink afterwards."""
    if isinstance(part, int):
        yield (part // 2,)
        return
    for name in ("step", "rank", "shard"):
        value = getattr(part, name)
        if value:
            yield (replace(part, **{name: value // 2}),)
