"""A run of a command as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.faults import Fault


@dataclass(frozen=True)
class Turn:
    """A knob of the script that does not stand as usual; and others that are to change nothing,
    but for what this one may do wrong beside them.
    """

    knob: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """What stands for each of these knobs in the command."""
        return {self.knob: self.value, **dict(self.beside)}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run was launched as."""

    world_size: int
    seed: int
    repeat: int = 0
    faults: tuple[Fault, ...] = ()
    stops: tuple[int, ...] = ()
    turn: Turn | None = None
