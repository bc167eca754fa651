"""The workers of a scenario: which are present in each step, and which side takes the step.

Faults decide which workers are present. The option `updates` decides whether every worker of a star
takes the optimizer steps, or the server takes them for all. `Outer` has the settings and the
schedule of the outer step, which synchronises workers that have stepped alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import MOVING, SERVED_PLACES, Fault
from entrenar_py.shared.scenario import Scenario, TrainingPlan

_FREE = "use an earlier step"
_ORDER = ("join", "leave")  # within a step, joins come first, then leaves, then all other faults


def initial_ranks(world_size: int, faults: Sequence[Fault]) -> list[int]:
    """Return the ranks that are present at the start: all except those that join later."""
    first: dict[int | None, str] = {}
    for fault in _in_order(faults):
        if fault.kind in _ORDER:
            first.setdefault(fault.rank, fault.kind)
    return [rank for rank in range(world_size) if first.get(rank) != "join"]


def require_possible(scenario: Scenario) -> None:
    """Raise UsageError for the first fault that the workers present in its step make impossible.

    A worker that joins must be absent. A worker that leaves or is struck must be present. At least
    one worker must always remain.
    """
    _require_nobody_moved(scenario)
    present = initial_ranks(scenario.world_size, scenario.faults)
    if not present:
        raise UsageError("faults join for every rank: one worker must be present from the start")
    for fault in _in_order(scenario.faults):
        if fault.value == "one_too_many" and len(present) < scenario.world_size:
            there = f"{len(present)} of {scenario.world_size} workers are present; use a full step"
            raise UsageError(f"fault stranger value=one_too_many step={fault.step}: {there}")
        if fault.rank is None:
            continue
        where = f"fault {fault.kind} rank={fault.rank} step={fault.step}"
        if fault.kind == "join":
            if fault.rank in present:
                raise UsageError(f"{where}: that worker is already present; let it leave first")
            present.append(fault.rank)
            continue
        if fault.rank not in present:
            there = ", ".join(map(str, sorted(present)))
            raise UsageError(f"{where}: that worker is not present; use one of {there}")
        if fault.kind == "leave":
            if len(present) == 1:
                raise UsageError(f"{where}: no other worker would be left; keep one")
            present.remove(fault.rank)


def _require_nobody_moved(scenario: Scenario) -> None:
    """Raise UsageError if a stranger that must find no free rank might find one.

    After a fault in MOVING a worker may be absent, for a time that the scenario does not determine.
    """
    moved = [one.step or 0 for one in scenario.faults if one.kind in MOVING]
    for fault in scenario.faults:
        full = fault.value in ("taken_rank", "one_too_many")
        if full and min(moved, default=math.inf) <= (fault.step or 0):
            raise UsageError(
                f"fault stranger value={fault.value} step={fault.step}: a fault strikes a worker "
                f"in step {min(moved)}, and its rank may be free; {_FREE}"
            )


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    def turn(fault: Fault) -> tuple[int, int]:
        place = _ORDER.index(fault.kind) if fault.kind in _ORDER else len(_ORDER)
        return fault.step or 0, place

    return sorted(faults, key=turn)


OPTION = "updates"
WORKERS, SERVER = "workers", "server"
# the workers' optimizer if the server takes the steps: plain SGD, which has no state
_STATELESS = "sgd"


def by_server(plan: TrainingPlan) -> bool:
    """Return whether the server takes the steps; by default the workers do."""
    who = plan.options.get(OPTION, WORKERS)
    if who not in (WORKERS, SERVER):
        raise UsageError.of(OPTION, who, f"use {WORKERS} or {SERVER}")
    return bool(who == SERVER)


def optimizer_of_workers(plan: TrainingPlan) -> str:
    """Return the name of the workers' optimizer, which is `sgd` if the server takes the steps."""
    return _STATELESS if by_server(plan) else plan.optimizer


def places_of_faults(scenario: Scenario, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the messages at which a fault can strike: SERVED_PLACES if the server takes the steps.

    If the workers take the steps, return `usual`.
    """
    return SERVED_PLACES if by_server(scenario) else usual


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The settings of DiLoCo: `inner_steps` local steps of each worker, then one outer step.

    The outer step is a Nesterov step, which all workers take together.

    The defaults are the paper's. Raises UsageError if a value is out of range.
    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.
    """

    inner_steps: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        steps = self.inner_steps
        if type(steps) is not int or steps < 1:
            raise UsageError(f"inner_steps={steps!r}: use a whole number >= 1")
        for name, most in (("outer_learning_rate", math.inf), ("outer_momentum", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < most:
                raise UsageError(f"{name}={value!r}: use a number >= 0 and below {most:g}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Outer:
        """Return the settings in a scenario's `options`, with defaults for missing ones."""
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in options.items() if name in names})

    def round_end(self, step: int, num_steps: int) -> int:
        """Return the first step after the round that contains `step`.

        The last round may be short.
        """
        return min((step // self.inner_steps + 1) * self.inner_steps, num_steps)

    def ends_round(self, step: int, num_steps: int) -> bool:
        """Return whether the workers synchronise after `step`."""
        return step + 1 == self.round_end(step, num_steps)
