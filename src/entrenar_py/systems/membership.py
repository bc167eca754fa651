"""The workers that take part in each step, as a scenario's faults say."""

from __future__ import annotations

import math

from entrenar_py.errors import UsageError
from entrenar_py.faults import MOVING, Fault
from entrenar_py.scenario import Scenario

_FREE = "use an earlier step"
_ORDER = ("join", "leave")  # of one step, joins come first; planted values strike who is left


def initial_ranks(scenario: Scenario) -> list[int]:
    """Everyone but those who are first heard of when they join."""
    first: dict[int | None, str] = {}
    for fault in _in_order(scenario):
        if fault.kind in _ORDER:
            first.setdefault(fault.rank, fault.kind)
    return [rank for rank in range(scenario.world_size) if first.get(rank) != "join"]


def require_possible(scenario: Scenario) -> None:
    """Returns if everyone who joins was away and everyone who leaves or is struck was there.

    Raises UsageError naming the first fault of which that is not so, and for a step without any
    worker.
    """
    _require_nobody_moved(scenario)
    present = initial_ranks(scenario)
    if not present:
        raise UsageError("faults join for every rank: leave one worker there to start with")
    for fault in _in_order(scenario):
        if fault.value == "one_too_many" and len(present) < scenario.world_size:
            there = f"{len(present)} of {scenario.world_size} workers are there"
            raise UsageError(f"fault stranger value=one_too_many step={fault.step}: {there}")
        if fault.rank is None:
            continue
        where = f"fault {fault.kind} rank={fault.rank} step={fault.step}"
        if fault.kind == "join":
            if fault.rank in present:
                raise UsageError(f"{where}: that worker is there already; let it leave first")
            present.append(fault.rank)
            continue
        if fault.rank not in present:
            there = ", ".join(map(str, sorted(present)))
            raise UsageError(f"{where}: that worker is not there; use one of {there}")
        if fault.kind == "leave":
            if len(present) == 1:
                raise UsageError(f"{where}: no other worker would be left; leave one there")
            present.remove(fault.rank)


def _require_nobody_moved(scenario: Scenario) -> None:
    """Returns if every stranger that is to find no place free really must find none.

    Whom something has befallen is away for a while, and how long is nobody's plan.
    """
    moved = [one.step or 0 for one in scenario.faults if one.kind in MOVING]
    for fault in scenario.faults:
        full = fault.value in ("taken_rank", "one_too_many")
        if full and min(moved, default=math.inf) <= (fault.step or 0):
            raise UsageError(
                f"fault stranger value={fault.value} step={fault.step}: something befalls a worker "
                f"in step {min(moved)}, and its rank may be free; {_FREE}"
            )


def _in_order(scenario: Scenario) -> list[Fault]:
    def turn(fault: Fault) -> tuple[int, int]:
        place = _ORDER.index(fault.kind) if fault.kind in _ORDER else len(_ORDER)
        return fault.step or 0, place

    return sorted(scenario.faults, key=turn)
