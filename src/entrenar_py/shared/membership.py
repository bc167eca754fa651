"""The workers that take part in each step, according to the faults of a scenario."""

from __future__ import annotations

import math

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import MOVING, Fault
from entrenar_py.shared.scenario import Scenario

_FREE = "use an earlier step"
_ORDER = ("join", "leave")  # joins come first in a step, then leaves, then all other faults


def initial_ranks(scenario: Scenario) -> list[int]:
    """Return the ranks present at the start: all but those whose first change is to join."""
    first: dict[int | None, str] = {}
    for fault in _in_order(scenario):
        if fault.kind in _ORDER:
            first.setdefault(fault.rank, fault.kind)
    return [rank for rank in range(scenario.world_size) if first.get(rank) != "join"]


def require_possible(scenario: Scenario) -> None:
    """Raise UsageError for the first fault that is impossible with the workers in its step.

    A worker that joins must be absent, and one that leaves or is struck must be present. At least
    one worker must always remain.
    """
    _require_nobody_moved(scenario)
    present = initial_ranks(scenario)
    if not present:
        raise UsageError("faults join for every rank: one worker must be there from the start")
    for fault in _in_order(scenario):
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


def _in_order(scenario: Scenario) -> list[Fault]:
    def turn(fault: Fault) -> tuple[int, int]:
        place = _ORDER.index(fault.kind) if fault.kind in _ORDER else len(_ORDER)
        return fault.step or 0, place

    return sorted(scenario.faults, key=turn)
