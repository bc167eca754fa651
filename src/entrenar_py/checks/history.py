"""The ranks that took part in each step, and what a resume undid; judges nothing.

The events of a trace are taken to be in the order of time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from entrenar_py.trace import Membership, Start, Trace, Update


class Stay(NamedTuple):
    """The steps from `first` up to, but without, `end`: a rank was there."""

    first: int
    end: float


def stays(trace: Trace) -> dict[int, list[Stay]]:
    """Rank -> when it was there: from each start until it left. Without those that never started.

    Where others go back to an earlier step, who had left by then is not there when it is made
    again.
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
    """Stays that are over end by `step` at the latest; an open one stays open."""
    return [one if one.end == math.inf else one._replace(end=min(one.end, step)) for one in of_rank]


def members(stays_of: Mapping[int, Sequence[Stay]], step: int) -> set[int]:
    """The ranks that were there when `step` was made."""
    return {
        rank
        for rank, of_rank in stays_of.items()
        if any(one.first <= step < one.end for one in of_rank)
    }


def ghosts(trace: Trace) -> list[Update]:
    """The updates of steps for which their rank had left, and not come back, in order."""
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
