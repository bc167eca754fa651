"""Correct variants of the wgpu backend: no check may report any of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.compute.wgpu import lower, program, tiles
from entrenar_py.compute.wgpu.program import Plan
from entrenar_py.compute.wgpu.values import Step
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario

from .wgpu_subjects import MLP, PACKAGE, SPLIT, operations

_plan, _lower = program.plan, lower.lower
STEPS = ("F-WGPU-002", "F-WGPU-003", "F-WGPU-005", "F-WGPU-006", "F-WGPU-007")


def split(given: tiles.Product, limits: tiles.Limits) -> tiles.Tiling:
    """Uses small tiles whose threads share the sum along k."""
    return SPLIT


def unfused(*arguments: Any, **keywords: Any) -> lower.Lowered:
    """Makes a separate dispatch for each operation."""
    return _lower(*arguments, **{**keywords, "fused": False})


def unshared(
    steps: Sequence[Step], changing: Any, results: Any
) -> tuple[dict[Any, int], tuple[int, ...]]:
    """Gives each buffer its own memory."""
    written = list(dict.fromkeys(step.writes for step in steps))
    return {one: number for number, one in enumerate(written)}, tuple(
        one.num_bytes for one in written
    )


def late(lowered: lower.Lowered, given: Any) -> Plan:
    """Always runs the last dispatch that can run, among independent ones."""
    return _plan(replace(lowered, steps=_reordered(lowered.steps)), given)


def _reordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return `steps` in another order, where each still follows those that it depends on."""
    waiting = {
        number: {
            other
            for other in range(number)
            if steps[other].writes in steps[number].bindings
            or steps[number].writes in steps[other].bindings
        }
        for number in range(len(steps))
    }
    order: list[int] = []
    while waiting:
        following = max(number for number, before in waiting.items() if not before)
        del waiting[following]
        for before in waiting.values():
            before.discard(following)
        order.append(following)
    return tuple(steps[number] for number in order)


def _benign(
    name: str,
    summary: str,
    plants: dict[str, Callable[..., Any]],
    scenario: Scenario = MLP,
    tried: tuple[str, ...] = STEPS,
) -> Variant:
    return Variant(
        name=f"wgpu-{name}",
        summary=summary,
        plants={f"{PACKAGE}.{path}": new for path, new in plants.items()},
        scenario=scenario,
        tried=tried,
    )


VARIANTS = (
    _benign("late", "independent dispatches run in another order", {"program.plan": late}),
    _benign("unshared", "no two buffers share memory", {"program._assign": unshared}),
    _benign("unfused", "every operation is a separate dispatch", {"program.lower": unfused}),
    _benign(
        "split",
        "products have other tiles, and add along k in parts",
        {"tiles.choose": split},
        operations("mm", "mm_tall", "bmm"),
        ("F-WGPU-004", "F-WGPU-007"),
    ),
)
