"""Helpers for bugs of the wgpu backend: their mutants, and the runs in which they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entrenar_py.compute.wgpu import tiles
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario

PACKAGE = "entrenar_py.compute.wgpu"
# A product whose threads share the sum along k.
SPLIT = tiles.Tiling(m=32, n=32, k=16, thread_m=4, thread_n=4, split=4)


def operations(*names: str) -> Scenario:
    """Return a run of the operations `names` alone."""
    return Scenario(
        system="wgpu_operations",
        workload="linear",
        world_size=1,
        seed=0,
        backends=("wgpu",),
        options={"operations": list(names)},
    )


def steps(workload: str, **changes: Any) -> Scenario:
    """Return a run of training steps of a workload."""
    return Scenario(
        system="wgpu_steps", workload=workload, world_size=1, seed=0, backends=("wgpu",), **changes
    )


LINEAR = steps("linear")
MLP = steps("mlp", dropout=0.3)
DECODER = steps("decoder", options={"samples": [1]})
REFUSALS = LINEAR.with_(system="wgpu_refusals")
TRAINING = Scenario(
    system="reference",
    workload="mlp",
    world_size=1,
    seed=0,
    num_shards=1,
    num_samples=21,
    batch_size=7,
    num_steps=20,
    learning_rate=0.1,
    backends=("wgpu",),
)


def mutant(
    name: str,
    summary: str,
    source: str,
    plants: dict[str, Callable[..., Any]],
    scenario: Scenario,
    *invariants: str,
    **place: Any,
) -> Variant:
    """Return a mutant that replaces the functions at the paths of `plants` in the backend."""
    return Variant(
        name=f"wgpu-{name}",
        summary=summary,
        source=source,
        plants={f"{PACKAGE}.{path}": new for path, new in plants.items()},
        scenario=scenario,
        invariants=invariants,
        place=place,
    )
