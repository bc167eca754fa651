"""Random scenarios around the planned ones, and the search through them with Hypothesis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st

from entrenar_py.errors import UsageError
from entrenar_py.faults import Fault
from entrenar_py.scenario import CHOICES, Scenario


class _Found(Exception):
    """The search has hit a falsifying scenario."""


def search(
    bases: Sequence[Scenario],
    *,
    seed: int,
    num_examples: int,
    fixed: Sequence[str],
    falsifies: Callable[[Scenario], bool],
) -> Scenario | None:
    """The first of `num_examples` scenarios around `bases` that `falsifies`; None if none does.

    The same arguments give the same scenarios in the same order. Fields named in `fixed` are left
    as the bases have them. What is found is not shrunk (see `shrink`).
    """
    found: list[Scenario] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(around(bases, fixed))
    def attempt(scenario: Scenario) -> None:
        if not found and falsifies(scenario):
            found.append(scenario)
        if found and scenario == found[0]:
            raise _Found

    with contextlib.suppress(_Found):
        attempt()
    return found[0] if found else None


@st.composite
def around(draw: st.DrawFn, bases: Sequence[Scenario], fixed: Sequence[str] = ()) -> Scenario:
    """A scenario near one of `bases`: other sizes, seed, optimizer; faults and stops moved."""
    base = draw(st.sampled_from(list(bases)))
    changes: dict[str, Any] = {"seed": draw(st.integers(0, 2**32 - 1))}
    changes["world_size"] = draw(st.integers(min(2, base.world_size), 8))
    if "world_size" in fixed:
        changes["world_size"] = base.world_size
    changes["num_shards"] = draw(st.integers(changes["world_size"], 12))
    changes["num_samples"] = draw(st.integers(max(8, changes["world_size"]), 40))
    changes["batch_size"] = draw(st.integers(1, changes["num_samples"]))
    changes["num_steps"] = draw(st.integers(3, 8)) if base.num_steps <= 8 else base.num_steps
    changes["accumulation"] = draw(st.sampled_from((1, 2, 3, 4)))
    changes["optimizer"] = draw(st.sampled_from(CHOICES["optimizer"]))
    changes["schedule"] = draw(st.sampled_from(CHOICES["schedule"]))
    changes["warmup_steps"] = draw(st.integers(0, 2))
    changes["weight_decay"] = draw(st.sampled_from((0.0, 0.1)))
    changes["clip_norm"] = draw(st.sampled_from((None, 0.05, 10.0)))
    if base.workload == "linear":
        changes["workload"] = draw(st.sampled_from(("linear", "mlp")))
    if base.stops:
        changes["stops"] = draw(_stops(changes["num_steps"]))
    changes = {name: value for name, value in changes.items() if name not in fixed}
    if base.faults:
        changes["faults"] = draw(_moved(base, changes))
    try:
        return base.with_(**changes)
    except UsageError:  # a fixed field rules the drawn ones out
        return base


def _stops(num_steps: int) -> st.SearchStrategy[tuple[int, ...]]:
    steps = st.lists(st.integers(1, num_steps - 1), min_size=1, max_size=2, unique=True)
    return steps.map(lambda stops: tuple(sorted(stops)))


@st.composite
def _moved(draw: st.DrawFn, base: Scenario, changes: dict[str, Any]) -> tuple[Fault, ...]:
    """The base's faults; a single one moves to any rank and step, several keep their plot."""
    world_size = changes.get("world_size", base.world_size)
    num_steps = changes.get("num_steps", base.num_steps)
    if len(base.faults) > 1 or world_size < 2:
        return base.faults
    fault = base.faults[0].to_dict()
    if "rank" in fault:
        fault["rank"] = draw(st.integers(0, world_size - 1))
    if "step" in fault:
        fault["step"] = draw(st.integers(0, num_steps - 1))
    return (Fault.from_dict(fault),)
