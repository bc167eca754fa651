"""What suspects are looked for in: the records of all ranks, cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from entrenar_py.check.anatomy import record, steps
from entrenar_py.check.anatomy.record import Event, Record, numbers
from entrenar_py.check.anatomy.steps import Step
from entrenar_py.check.anatomy.wording import Words

Kind = TypeVar("Kind", bound=Event)
_EXCHANGED = ("gradients", "parameters", "other")


class Seen(NamedTuple):
    """An anti-pattern seen at an event of a step of a rank; `detail` says of what."""

    rank: int
    step: int
    event: Event
    detail: str = ""


@dataclass(frozen=True)
class Evidence:
    """The records of a run by rank."""

    records: Mapping[int, Record]

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """The steps by rank."""
        return {rank: steps.cut(known) for rank, known in self.records.items()}

    @cached_property
    def words(self) -> dict[int, Words]:
        """The names of parameters by rank."""
        return {
            rank: Words(steps.names_of(known), steps.trained_of(known))
            for rank, known in self.records.items()
        }

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return max(known.world_size for known in self.records.values())

    @cached_property
    def are_replicas(self) -> bool:
        """True if all ranks reduce the gradients of all parameters that they train."""
        return self.world_size > 1 and all(map(self._reduces_all, self.records))

    def _reduces_all(self, rank: int) -> bool:
        known = self.records[rank]
        reduced = frozenset[int]().union(
            *(
                numbers(one.touched)
                for one in known.of(record.Collective)
                if one.contents == "gradients" and one.size == self.world_size
            )
        )
        trained = steps.trained_of(known)
        return bool(trained) and trained <= reduced

    def each(self) -> Iterator[tuple[int, Step]]:
        """Yield all steps with their ranks."""
        for rank, own in self.steps.items():
            for step in own:
                yield rank, step

    def every(self, kind: type[Kind]) -> Iterator[tuple[int, Step, Kind]]:
        """Yield all events of one kind in steps, with their ranks and steps."""
        for rank, step in self.each():
            for event in of(step, kind):
                yield rank, step, event

    def together(self) -> Iterator[tuple[int, dict[int, Step]]]:
        """Yield the steps that all ranks have taken, by rank."""
        if len(self.steps) < 2:
            return
        for number in range(min(map(len, self.steps.values()))):
            yield number, {rank: own[number] for rank, own in self.steps.items()}

    def named(self, rank: int, found: Iterator[int] | frozenset[int] | set[int]) -> str:
        """Return the names of parameters of a rank."""
        return self.words[rank].named(sorted(found))


def of(step: Step, kind: type[Kind]) -> list[Kind]:
    """Return a step's events of one kind."""
    return [event for event in step.events if isinstance(event, kind)]


def after(step: Step, event: Event) -> Sequence[Event]:
    """Return a step's events after one of them."""
    return step.events[_at(step, event) + 1 :]


def before(step: Step, event: Event) -> Sequence[Event]:
    """Return a step's events before one of them."""
    return step.events[: _at(step, event)]


def until_step(events: Sequence[Event], parameters: frozenset[int]) -> Iterator[Event]:
    """Yield events until gradients of `held` are applied by an optimizer, or cleared."""
    for event in events:
        if isinstance(event, record.Stepped) and numbers(event.held) & parameters:
            return
        if isinstance(event, record.Cleared) and numbers(event.touched) & parameters:
            return
        yield event


def accumulated(step: Step, update: record.Stepped) -> list[record.Backward]:
    """Return the passes with gradients that an optimizer's step applies: none was cleared since."""
    parameters, passes = numbers(update.held), list[record.Backward]()
    for event in before(step, update):
        if isinstance(event, record.Cleared) and numbers(event.touched) & parameters:
            passes.clear()
        elif isinstance(event, record.Backward) and numbers(event.touched) & parameters:
            passes.append(event)
    return passes


def _at(step: Step, event: Event) -> int:
    return next(n for n, one in enumerate(step.events) if one is event)
