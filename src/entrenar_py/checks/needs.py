"""The runs that a check needs beside the one it judges, by name and once they are there.

Judges search for nothing: what runs a command, changes a scenario or reads stored traces says which
run is which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from entrenar_py.trace import Trace

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class Need:
    """One other run of the same training; `says` which.

    `free` are the fields of a scenario in which that run may differ from the one that is meant, and
    do as well. `knob` is the knob of somebody's command that is turned in it.
    """

    name: str
    says: str
    free: tuple[str, ...] = ()
    knob: str = ""


# --- of the run that is judged, another form ------------------------------------------------------
ALONE = Need(
    name="alone",
    says="the same run on one worker",
    free=("num_shards", "accumulation", "backends", "options", "repeat"),
)
COUNTS = Need(name="counts", says="the same run on other numbers of workers")
REPEATED = Need(name="repeated", says="the same run a second time", free=("repeat",))
ORACLE = Need(name="oracle", says="the same training on one device, by the independent trainer")
CALM = Need(name="calm", says="the same run with nothing wrong, and nobody audited")
TWIN = Need(name="twin", says="the same reduction in another network, or in one process")
ON_CPU = Need(name="on_cpu", says="the same run on the CPU")

# --- runs that are disturbed, beside the base, which is not ---------------------------------------
KILLED = Need(name="killed", says="the base with a worker lost")
RESUMED = Need(name="resumed", says="the base, stopped and resumed")

# --- runs that are disturbed and need no base -----------------------------------------------------
POISONED = Need(name="poisoned", says="a run with a value that is not finite")
SAVED = Need(name="saved", says="a run that wrote a checkpoint and loaded it")


def turned(knob: str) -> Need:
    """Return the need of a run of somebody's command with `knob` turned, beside the usual one."""
    return Need(name=f"turned {knob}", says=f"the base with {knob} turned", knob=knob)


@dataclass(frozen=True)
class Near(Generic[T]):
    """The run that comes nearest to one that is missing, and the fields in which it misses it.

    Field -> (what the run has, what it would have to have).
    """

    run: T
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Runs(Generic[T]):
    """The run that others are compared with, or that is judged by itself; and those beside it.

    `base` is None where it is not there. `undropped` are the runs of the same training without
    dropout, where its masks forbid to compare the run with others. `near` has the run that comes
    nearest to a need which nothing answers.
    """

    base: T | None = None
    beside: Mapping[Need, tuple[T, ...]] = field(default_factory=dict)
    undropped: Runs[T] | None = None
    near: Mapping[Need, Near[T]] = field(default_factory=dict)

    def of(self, *needs: Need) -> tuple[T, ...]:
        """Return the runs that answer any of `needs`."""
        return tuple(run for need in needs for run in self.beside.get(need, ()))

    def turned(self) -> Iterator[tuple[str, T]]:
        """Yield each knob and each run in which it is turned."""
        for need, runs in self.beside.items():
            if need.knob:
                yield from ((need.knob, run) for run in runs)

    def __iter__(self) -> Iterator[T]:
        """Yield every run once: the base, those beside it, and those without dropout."""
        yield from self.own
        if self.undropped is not None:
            yield from self.undropped

    @property
    def own(self) -> Sequence[T]:
        """The runs but those without dropout, each once."""
        base = () if self.base is None else (self.base,)
        runs = (*base, *self.of(*self.beside))
        return [run for place, run in enumerate(runs) if not any(run is r for r in runs[:place])]

    def chosen(self, choose: Callable[[T], U | None]) -> Runs[U]:
        """Return the same of what `choose` makes of each run, without those it makes None of."""
        beside = {need: tuple(map(choose, runs)) for need, runs in self.beside.items()}
        return Runs(
            base=None if self.base is None else choose(self.base),
            beside={
                need: tuple(run for run in runs if run is not None) for need, runs in beside.items()
            },
            undropped=None if self.undropped is None else self.undropped.chosen(choose),
            near={
                need: Near(run, near.fields)
                for need, near in self.near.items()
                if (run := choose(near.run)) is not None
            },
        )

    def nearly(self, need: Need) -> str:
        """Return what to end a reason with where `need` is not answered; empty if nothing is near.

        `; the nearest other trace differs in num_shards (4, needed 2)`.
        """
        fields = self.near[need].fields if need in self.near else {}
        listed = ", ".join(f"{name} ({was}, needed {due})" for name, (was, due) in fields.items())
        return f"; the nearest other trace differs in {listed}" if listed else ""


# What a judge is given.
Traces = Runs[Trace]
