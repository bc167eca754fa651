"""Random scenarios near the planned ones, drawn by Hypothesis until one breaks a clause."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import hypothesis
from hypothesis import strategies as st

from entrenar_py.shared import systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import CHOICES, Scenario
from entrenar_py.shared.systems import unplaced

_LOCAL_CONSTANTS = "hypothesis.internal.conjecture.providers._get_local_constants"


class _Over(Exception):
    """Raised to end a search once `visit` returned True."""


def search(
    bases: Sequence[Scenario],
    *,
    seed: int,
    num_examples: int,
    fixed: Collection[str],
    visit: Callable[[Scenario], bool],
) -> None:
    """Call `visit` with up to `num_examples` scenarios near `bases`, until it returns True.

    Equal arguments give the same scenarios in the same order. Fields named in `fixed` keep the
    values that they have in the bases.
    """
    over = False

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(around(bases, fixed))
    def attempt(scenario: Scenario) -> None:
        nonlocal over
        over = over or visit(scenario)
        if over:  # Hypothesis repeats the example that raised
            raise _Over

    with _whatever_is_imported(), contextlib.suppress(_Over):
        attempt()


def _whatever_is_imported() -> Any:
    """Keep Hypothesis from drawing constants out of the modules that happen to be loaded.

    Such constants would make the scenarios of a seed depend on the checks that ran before, and
    would write files into the working folder. Hypothesis has no public switch for this. Nothing is
    done for versions of Hypothesis without such constants.
    """

    def none() -> Any:
        from hypothesis.internal.constants_ast import Constants

        return Constants()

    return patch(_LOCAL_CONSTANTS, none, create=True)


@st.composite
def around(draw: st.DrawFn, bases: Sequence[Scenario], fixed: Collection[str] = ()) -> Scenario:
    """Draw a scenario near one of `bases`, with new sizes, seed, optimizer, fault and stops.

    Sizes are rounded to what the system of the base accepts. Fields in `fixed` stay.
    """
    base = draw(st.sampled_from(list(bases)))
    workers = st.integers(min(2, base.world_size), 8)
    world_size = base.world_size if "world_size" in fixed else draw(workers)
    num_samples = draw(st.integers(max(8, world_size), max(40, world_size)))
    num_steps = draw(st.integers(3, 8)) if base.num_steps <= 8 else base.num_steps
    changes: dict[str, Any] = {
        "world_size": world_size,
        "num_samples": num_samples,
        "num_steps": num_steps,
        "seed": base.seed + draw(st.integers(0, 2**32 - 1)),
        "num_shards": draw(st.integers(world_size, max(12, world_size))),
        "batch_size": draw(st.integers(1, num_samples)),
        "accumulation": draw(st.integers(1, 4)),
        "optimizer": draw(st.sampled_from(CHOICES["optimizer"])),
        "schedule": draw(st.sampled_from(CHOICES["schedule"])),
        "warmup_steps": draw(st.integers(0, 2)),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "clip_norm": draw(st.sampled_from((None, 0.05, 10.0))),
    }
    if base.workload == "linear" and not any(f.tensor or f.element for f in base.faults):
        changes["workload"] = draw(st.sampled_from(("linear", "mlp")))
    if world_size != base.world_size:
        changes["options"] = unplaced(base.options)
    if base.stops:
        changes["stops"] = draw(_stops(num_steps))
    for name in fixed:
        changes.pop(name, None)
    if len(base.faults) == 1:  # several faults depend on each other
        changes["faults"] = draw(_moved(base.faults[0], {**vars(base), **changes}))
    try:
        return systems.fitted(base.with_(**changes), fixed=fixed)
    except UsageError:  # a fault or a fixed field doesn't fit the drawn sizes
        hypothesis.reject()


def _stops(num_steps: int) -> st.SearchStrategy[tuple[int, ...]]:
    steps = st.lists(st.integers(1, num_steps - 1), min_size=1, max_size=2, unique=True)
    return steps.map(lambda stops: tuple(sorted(stops)))


@st.composite
def _moved(draw: st.DrawFn, fault: Fault, sizes: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Draw a copy of `fault` with a new step, rank and shard within `sizes`, where it has them.

    A fault that names a shard loses its rank, because another rank may own the new shard.
    """
    record = fault.to_dict()
    if "shard" in record:
        record.pop("rank", None)
    for name, limit in (("step", "num_steps"), ("rank", "world_size"), ("shard", "num_shards")):
        if name in record:
            record[name] = draw(st.integers(0, sizes[limit] - 1))
    return (Fault.from_dict(record),)
