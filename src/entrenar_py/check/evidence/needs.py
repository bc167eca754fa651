"""The other runs that a check compares a run with: their names (Need) and the runs (Runs).

A judge does not search for runs, and does not know how they are made. It declares needs, and
receives the runs that answer them. `check/harness/companions.py` answers a need by changing a
scenario or by searching stored traces, `check/command/run_plan.py` by launching the user's command
again. So the same judge handles all three cases, and a check that needs a new type of run adds a
row here. If only one check uses that run, the row stands next to the check.

`Runs` is generic: its runs are either planned scenarios or the traces of these scenarios (`chosen`
maps the first to the second). Witnesses are runs that are never judged. They show whether the
presuppositions of a comparison hold, such as that two plain runs agree. They are found by the
`faults` of their row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from entrenar_py.shared import faults
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Trace

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class Need:
    """A kind of run of the same training that a judge compares with. `says` describes it.

    A run still answers the need if its scenario differs in the fields named by `free`. `knob` is
    the knob of a user's command that is turned in the run; "" if no knob is. `faults` are the kinds
    of fault that a witness has. If `is_paired`, two witnesses answer the need: a run without these
    faults, and the same run with them. `planned` returns the fault of the second one if the first
    run of a user's command calls for it, else None.
    """

    name: str
    says: str
    free: tuple[str, ...] = ()
    knob: str = ""
    faults: tuple[str, ...] = ()
    is_paired: bool = False
    planned: Callable[[Trace], Fault | None] | None = None


# --- the judged run in another form ---------------------------------------------------------------
ALONE = Need(
    name="alone",
    says="the same run on one worker",
    free=("num_shards", "accumulation", "backends", "options", "repeat"),
)
COUNTS = Need(name="counts", says="the same run on different numbers of workers")
REPEATED = Need(name="repeated", says="the same run a second time", free=("repeat",))
NUDGED = Need(
    name="nudged",
    says="the same run on one worker, with its first weights changed by some roundings",
    faults=(faults.NUDGED,),
    is_paired=True,
)
CONTROLLED = Need(
    name="controlled",
    says="the same run, and the run on one worker, with equal random numbers, or equal shares",
    faults=(*faults.CONTROLLED, *faults.JOINED),
)
SHORTENED = Need(
    name="shortened",
    says="the same run, in which an epoch ends: after two steps, by its loaders, or by more steps",
    faults=(faults.SHORTENED, faults.LONGER),
)
ORACLE = Need(name="oracle", says="the same training on one device, by the independent trainer")
PEER = Need(name="peer", says="the same fine-tuning by transformers.Trainer with peft")
SINGLE = Need(name="single", says="the same fine-tuning by one worker, without ranks")
CALM = Need(name="calm", says="the same run without faults and audits")
TWIN = Need(name="twin", says="the same reduction over a different topology, or in one process")
ON_CPU = Need(name="on_cpu", says="the same run on the CPU")

# --- runs with a fault or stop, judged together with the base, which has none ---------------------
KILLED = Need(name="killed", says="the base with a worker lost")
RESUMED = Need(name="resumed", says="the base, stopped and resumed")

# --- runs that are judged without a base ----------------------------------------------------------
POISONED = Need(name="poisoned", says="a run with a non-finite value")
SAVED = Need(name="saved", says="a run that wrote a checkpoint and loaded it")
PROBED = Need(name="probed", says="a run that passed its tokens to the model again, some replaced")


def witnesses(
    needs: Iterable[Need],
    planned: Mapping[T, tuple[Fault, ...]],
    without: Callable[[T], T | None],
) -> dict[Need, tuple[T, ...]]:
    """Return need -> the witnesses that answer it, for needs that are recognised by their faults.

    Every check gets those for NUDGED, CONTROLLED and SHORTENED, and those for its own `needs`.
    `planned` maps the runs without stops to their faults, and `without` returns the same run
    without faults, or None.
    """
    by_need: dict[Need, tuple[T, ...]] = {}
    for need in dict.fromkeys((NUDGED, CONTROLLED, SHORTENED, *needs)):
        if not need.faults:
            continue
        runs = [run for run, those in planned.items() if faults.has_kind(those, *need.faults)]
        pairs = ((plain, run) for run in runs if (plain := without(run)) is not None)
        by_need[need] = next(pairs, ()) if need.is_paired else tuple(runs)
    return by_need


def turned(knob: str) -> Need:
    """Return the need for a run in which the knob `knob` of a user's command is turned."""
    return Need(name=f"turned {knob}", says=f"the base with {knob} turned", knob=knob)


@dataclass(frozen=True)
class Near(Generic[T]):
    """The run most similar to a missing one, and the scenario fields in which it differs.

    `fields` maps each such field to two values: the value in `run`, and the needed value.
    """

    run: T
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Runs(Generic[T]):
    """The run to judge (`base`), and the runs that answer each need.

    `base` is None if there is no such run. `undropped` has runs of the same training without
    dropout, for cases in which dropout masks make runs incomparable. `near` maps each need that no
    run answers to the most similar run. `witnesses` are runs of a user's own trainer that are not
    judged, but show whether the presuppositions of a comparison hold.
    """

    base: T | None = None
    beside: Mapping[Need, tuple[T, ...]] = field(default_factory=dict)
    undropped: Runs[T] | None = None
    near: Mapping[Need, Near[T]] = field(default_factory=dict)
    witnesses: Mapping[Need, tuple[T, ...]] = field(default_factory=dict)

    def of(self, *needs: Need) -> tuple[T, ...]:
        """Return the runs that answer any of `needs`."""
        return tuple(run for need in needs for run in self.beside.get(need, ()))

    def turned(self) -> Iterator[tuple[str, T]]:
        """Yield (knob, run) for each run in which a knob is turned."""
        for need, runs in self.beside.items():
            if need.knob:
                yield from ((need.knob, run) for run in runs)

    def __iter__(self) -> Iterator[T]:
        """Yield every judged run once: the base, the runs for needs, and those without dropout."""
        yield from self.own
        if self.undropped is not None:
            yield from self.undropped

    @property
    def own(self) -> Sequence[T]:
        """Return the base and the runs for needs, each once, without `undropped`."""
        base = () if self.base is None else (self.base,)
        runs = (*base, *self.of(*self.beside))
        return [run for place, run in enumerate(runs) if not any(run is r for r in runs[:place])]

    def chosen(self, choose: Callable[[T], U | None]) -> Runs[U]:
        """Return Runs with `choose(run)` for each run. A run is left out if that is None."""

        def chosen(answers: Mapping[Need, tuple[T, ...]]) -> dict[Need, tuple[U, ...]]:
            mapped = {need: map(choose, runs) for need, runs in answers.items()}
            return {need: tuple(r for r in runs if r is not None) for need, runs in mapped.items()}

        return Runs(
            base=None if self.base is None else choose(self.base),
            beside=chosen(self.beside),
            undropped=None if self.undropped is None else self.undropped.chosen(choose),
            witnesses=chosen(self.witnesses),
            near={
                need: Near(run, near.fields)
                for need, near in self.near.items()
                if (run := choose(near.run)) is not None
            },
        )

    def nearly(self, need: Need) -> str:
        """Return how the nearest run differs from `need`, to end a reason; "" if there is none.

        For example `; the nearest other trace differs in num_shards (4, needed 2)`.
        """
        fields = self.near[need].fields if need in self.near else {}
        listed = ", ".join(f"{name} ({was}, needed {due})" for name, (was, due) in fields.items())
        return f"; the nearest other trace differs in {listed}" if listed else ""


# The argument `runs` of a judge.
Traces = Runs[Trace]
