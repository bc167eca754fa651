"""The trace of one run: its scenario, what the run was and promises, and its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from entrenar_py.scenario import Scenario
from entrenar_py.trace.events import E, End, Event
from entrenar_py.trace.standing import standing
from entrenar_py.trace.traits import USUAL, Traits


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of one run of `scenario`, in order.

    `environment` holds versions and devices. `promises` are what the system claims for itself:
    "bitwise" (the same bits for any number of workers of one backend), or at least "draws" (what is
    drawn, samples and masks, is keyed by logical shard and not by who computes it). `traits` are
    what the run was, beyond what its scenario asks for.
    """

    scenario: Scenario
    environment: Mapping[str, Any]
    promises: tuple[str, ...]
    events: tuple[Event, ...]
    traits: Traits = USUAL

    @property
    def draws_by_shard(self) -> bool:
        """Return whether it promises the same draws for any number of workers."""
        return bool({"bitwise", "draws"}.intersection(self.promises))

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind, in order."""
        return list(self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> dict[type, list[Any]]:
        found: dict[type, list[Any]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return found

    @cached_property
    def standing(self) -> Trace:
        """The same without what a resume undid; itself where nothing was."""
        kept = standing(self.events)
        return self if kept is self.events else replace(self, events=tuple(kept))

    @property
    def end(self) -> End:
        """Return how the run ended; `failed` when the trace does not say."""
        ends = self.of(End)
        return ends[-1] if ends else End(status="failed", reason="the trace has no end event")
