"""The trace of one run: its scenario, traits, promises and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from entrenar_py.shared.scenario import Scenario, TrainingPlan
from entrenar_py.shared.trace.events import (
    E,
    End,
    Event,
    Membership,
    Saved,
    Shard,
    Start,
    Synchronised,
    Update,
)
from entrenar_py.shared.trace.script_events import Drawn
from entrenar_py.shared.trace.traits import USUAL, Traits


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of one run of `scenario`, in order.

    - `environment`: versions and devices.
    - `promises`: the system's own claims. "bitwise": equal bits for any number of workers with one
      backend. "draws": samples and masks depend on the logical shard, not on the worker. "rounds":
      workers synchronise only every few steps.
    - `traits`: facts of the run that its scenario does not state.
    """

    scenario: Scenario
    environment: Mapping[str, Any]
    promises: tuple[str, ...]
    events: tuple[Event, ...]
    traits: Traits = USUAL

    @classmethod
    def of_plan(cls, plan: TrainingPlan, **named: Any) -> Trace:
        """Return the trace of a run of `plan`. `named` has the other fields of the trace."""
        return cls(scenario=Scenario.of(plan), **named)

    @property
    def draws_by_shard(self) -> bool:
        """True if the system promises the same samples and masks for any number of workers."""
        return bool({"bitwise", "draws"}.intersection(self.promises))

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of the class `kind`, in order."""
        return list(self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> dict[type, list[Any]]:
        by_kind: dict[type, list[Any]] = defaultdict(list)
        for event in self.events:
            by_kind[type(event)].append(event)
        return by_kind

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter name -> shape, as far as any rank recorded it."""
        return {name: shape for start in self.of(Start) for name, shape in start.shapes.items()}

    @cached_property
    def standing(self) -> Trace:
        """This trace without the events that a resume undid; the trace itself if there are none."""
        kept = _standing(self.events)
        return self if kept is self.events else replace(self, events=tuple(kept))

    @property
    def end(self) -> End:
        """The last End event, or a `failed` one if the trace has none."""
        ends = self.of(End)
        return ends[-1] if ends else End(status="failed", reason="the trace has no end event")


def _standing(events: Sequence[Event]) -> Sequence[Event]:
    """Return `events` without those that a resume undid.

    A resumed Start at step s undoes all events from step s on of its rank and of ranks that have
    left. A Start at step s that is not resumed, after all ranks had left, undoes the shards from
    step s on, because no worker completed that step. Faults, halts and departures are never undone.
    """
    if not any(isinstance(earlier, Membership) or _resumes(earlier) for earlier in events):
        return events
    present: set[int] = set()
    departed: set[int] = set()
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            deserted = bool(departed) and not present
            departed.discard(event.rank)
            if event.resumed:
                ranks = {event.rank, *departed}
                kept = [earlier for earlier in kept if not _undone(earlier, ranks, event.step)]
            elif deserted:
                kept = [earlier for earlier in kept if not _abandoned(earlier, event.step)]
            present.add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            departed.add(event.rank)
            present.discard(event.rank)
        kept.append(event)
    return kept


def _resumes(event: Event) -> bool:
    return isinstance(event, Start) and event.resumed


def _abandoned(event: Event, step: int) -> bool:
    """Return whether `event` is a shard of `step` or of a later step."""
    return isinstance(event, Shard | Drawn) and event.step >= step


def _undone(event: Event, ranks: set[int], back_to: int) -> bool:
    """Return whether `event` is undone when `ranks` resume from the state before step `back_to`."""
    if isinstance(event, Shard | Update | Synchronised | Drawn):
        return event.rank in ranks and event.step >= back_to
    if isinstance(event, Start | Saved):
        return event.rank in ranks and event.step > back_to
    return False
