"""The ranks that took part in each step. Judges nothing.

The events of a trace are taken to be in the order of time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from entrenar_py.shared.trace import Membership, Start, Trace, Update


class Stay(NamedTuple):
    """A range of steps, `first <= step < end`, in which a rank was a member."""

    first: int
    end: float


def stays(trace: Trace) -> dict[int, list[Stay]]:
    """Return rank -> its stays, each from a start until the rank left.

    If the others resume at an earlier step, a rank that had left is no member in the repeated
    steps: its stay is cut at that step.
    """
    stays_of: dict[int, list[Stay]] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            if event.resumed:
                stays_of = {rank: _cut(of_rank, event.step) for rank, of_rank in stays_of.items()}
            of_rank = stays_of.setdefault(event.rank, [])
            if not of_rank or of_rank[-1].end < math.inf:
                of_rank.append(Stay(event.step, math.inf))
        elif isinstance(event, Membership) and event.change == "left":
            of_rank = stays_of.get(event.rank, [])
            if of_rank and of_rank[-1].end == math.inf:
                of_rank[-1] = of_rank[-1]._replace(end=event.step)
    return stays_of


def _cut(of_rank: Sequence[Stay], step: int) -> list[Stay]:
    """Return the stays. One that has ended is cut to end by `step`; an open one stays open."""
    return [one if one.end == math.inf else one._replace(end=min(one.end, step)) for one in of_rank]


def members(stays_of: Mapping[int, Sequence[Stay]], step: int) -> set[int]:
    """Return the ranks that were members in `step`."""
    return {
        rank
        for rank, of_rank in stays_of.items()
        if any(stay.first <= step < stay.end for stay in of_rank)
    }


def ghosts(trace: Trace) -> list[Update]:
    """Return the updates that ranks made after they had left and before they came back."""
    gone: dict[int, int] = {}
    updates = []
    for event in trace.standing.events:
        if isinstance(event, Start):
            gone.pop(event.rank, None)
            if event.resumed:
                gone = {rank: min(step, event.step) for rank, step in gone.items()}
        elif isinstance(event, Membership):
            if event.change == "left":
                gone[event.rank] = event.step
            else:
                gone.pop(event.rank, None)
        elif isinstance(event, Update) and event.step >= gone.get(event.rank, math.inf):
            updates.append(event)
    return updates
