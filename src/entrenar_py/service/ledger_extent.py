"""From where to where a ledger goes: its lines, the steps in it, made twice, or not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from entrenar_py import trace
from entrenar_py.service import ledger_continuity


@dataclass
class Extent:
    """The part of a run that is in a ledger, whose first line has the digest `first`.

    `made` are stretches of steps, first and last, in the order that they were made: a resume begins
    a new one. `num_lines` and `last` are of all lines read.
    """

    first: str
    last: str = ""
    num_lines: int = 0
    made: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[trace.Gap] = field(default_factory=list)
    _goes_back: bool = False  # somebody has started before a step that was made

    def take(self, event: trace.Event) -> None:
        """Reads on."""
        if isinstance(event, trace.Gap):
            self.gaps.append(event)
        elif isinstance(event, trace.Start) and self.made and event.step <= self.made[-1][1]:
            self._goes_back = True
        elif isinstance(event, trace.Update):
            begun, last = self.made[-1] if self.made else (event.step, -1)
            if self.made and not self._goes_back and event.step in (last, last + 1):
                self.made[-1] = (begun, event.step)
            else:
                self.made.append((event.step, event.step))
            self._goes_back = False

    def missing(self) -> Iterator[tuple[int, int]]:
        """First and last of the steps that are not there, and no gap says so."""
        told = {gap.step for gap in self.gaps}
        reached = -1
        for begun, last in self.made:
            if 0 <= reached < begun - 1 and begun not in told:
                yield reached + 1, begun - 1
            reached = max(reached, last)

    def twice(self) -> Iterator[tuple[int, int]]:
        """First and last of the steps that were made again."""
        reached = -1
        for begun, last in self.made:
            if begun <= reached:
                yield begun, min(last, reached)
            reached = max(reached, last)

    def sentences(self) -> Iterator[str]:
        """Yield where it begins and what is made twice, if there is anything to say of that."""
        yield (
            f"{self.num_lines} lines, none changed, moved or missing from the first (digest "
            f"{self.first}) to the last (digest {self.last})"
        )
        yield from (f"begins anew: {ledger_continuity.say(gap)}" for gap in self.gaps)
        begun = self.made[0][0] if self.made else 0
        if begun and not self.gaps:
            yield f"begins with step {begun}: {steps(0, begun - 1)} not in it, nothing says why"
        for again in self.twice():
            yield f"{steps(*again)} in it again: the run was resumed from a checkpoint before"


def steps(first: int, last: int) -> str:
    """These steps, and the verb."""
    return f"step {first} is" if first == last else f"steps {first} to {last} are"
