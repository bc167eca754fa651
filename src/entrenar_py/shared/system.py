"""The type of the rows in the table of systems."""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py import compute as backends
from entrenar_py.compute import BACKENDS
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import PLACES
from entrenar_py.shared.trace import Traits
from entrenar_py.shared.trace.traits import USUAL

# The backend name that makes a trainer use the first working backend of the fallback chain.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class System:
    """One system: its module, its description, and what a scenario may ask of it.

    `room` is its package below `systems`, or its module if there is a dot in it; `what` describes
    the system. `faults` lists the fault kinds that it can inject, `places` the messages at which a
    fault can strike, `options` the options that it accepts. `only` lists the backend names that it
    accepts, if it does not accept all. `in_step` is False if each worker makes some steps without
    the others: clauses on steps made by all together then do not apply. `bitwise` is False if the
    number of workers changes the bits: no clause then requires equal bits. With `powers_of_two` the
    numbers of workers and of micro-batches must be powers of two. `traits` hold for each run.
    """

    room: str
    what: str
    faults: tuple[str, ...] = ()
    places: tuple[str, ...] = PLACES
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    in_step: bool = True
    bitwise: bool = True
    powers_of_two: bool = False
    traits: Traits = USUAL

    @property
    def is_probe(self) -> bool:
        """True if the system tests one thing without training."""
        return self.room.startswith("probes")

    @property
    def trains(self) -> bool:
        """True if the system trains the workload that a scenario names, and not one of its own."""
        return not self.is_probe and not self.room.startswith("finetuned")

    @property
    def backends(self) -> tuple[str, ...]:
        """The kinds of backend that a scenario may name for this system."""
        if self.only:
            return self.only
        return (*BACKENDS, AUTO) if self.trains else tuple(BACKENDS)

    def require_backend(self, name: str, where: str) -> None:
        """Raise UsageError unless a scenario may name backend `name` for this system."""
        kind = name if name in self.backends or self.only else name.partition(":")[0]
        if kind not in self.backends:
            names = ", ".join(self.only) or backends.allowed(self.backends)
            raise UsageError(f"backend={name!r}{where}: allowed are {names}")
        if kind != AUTO:
            backends.kind_of(name)
