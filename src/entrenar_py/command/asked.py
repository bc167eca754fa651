"""A run of a command as it was asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import (
    ALONE,
    KILLED,
    POISONED,
    REPEATED,
    RESUMED,
    SAVED,
    Need,
    Runs,
)
from entrenar_py.faults import Fault


@dataclass(frozen=True)
class Turn:
    """A knob of the script that is set to another than its usual value.

    The knobs `beside` it are turned with it. They change nothing by themselves, but `knob` may be
    applied at the wrong place among them.
    """

    knob: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """The value of each knob that is turned, by name."""
        return {self.knob: self.value, **dict(self.beside)}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings that a run was launched with.

    `stops` are the steps before which it is stopped and launched again, and `repeat` tells a second
    run with the same settings apart.
    """

    world_size: int
    seed: int
    repeat: int = 0
    faults: tuple[Fault, ...] = ()
    stops: tuple[int, ...] = ()
    turn: Turn | None = None


def judges(check: Check, asked: Asked) -> bool:
    """Return whether `check` says something of such a run.

    A run that was disturbed or stopped is there for the checks that need it.
    """
    struck = {fault.kind for fault in asked.faults}
    borne = {"non_finite_gradient" for need in check.needs if need is POISONED}
    borne |= {"leave" for need in check.needs if need is KILLED}
    stops = not asked.stops or bool({RESUMED, SAVED}.intersection(check.needs))
    return struck <= borne and stops and (check.takes_turned or asked.turn is None)


def beside(needs: Collection[Need], asked: Asked) -> Runs[Asked]:
    """Return `asked`, and the runs that a check with `needs` judges it beside.

    A disturbed run stands beside its base, as does one with a knob turned: then it is not the base.
    """
    for need in needs:
        base = asked
        if need is KILLED:
            base = replace(asked, faults=())
        elif need is RESUMED:
            base = replace(asked, stops=())
        elif asked.turn is not None and need.knob == asked.turn.knob and not asked.stops:
            base = replace(asked, turn=None)
        if base != asked:
            return Runs(base, {need: (asked,)})
    runs = {
        ALONE: replace(asked, world_size=1, repeat=0, faults=(), stops=()),
        REPEATED: replace(asked, repeat=asked.repeat + 1),
    }
    if asked.turn is not None:
        return Runs(asked)
    return Runs(
        asked, {need: (run,) for need, run in runs.items() if need in needs and run != asked}
    )
