"""A run of a command as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

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
