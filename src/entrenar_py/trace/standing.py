"""What of a run stands in the end: who goes back to a checkpoint makes its steps again."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.trace.events import Event, Membership, Saved, Shard, Start, Synchronised, Update


def standing(events: Sequence[Event]) -> Sequence[Event]:
    """`events` without what a resume undid: who goes back to a checkpoint makes its steps again.

    A resumed start before step s voids what its rank recorded earlier of step s and later; and of
    those who had left by then, since they can't void their own. Any start before step s where all
    had left voids what they had computed of it: that step did not happen. Faults, halts and
    departures happened all the same and stay.
    """
    if not any(isinstance(one, Membership) or _resumes(one) for one in events):
        return events
    there: set[int] = set()
    gone: set[int] = set()
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            deserted = bool(gone) and not there
            gone.discard(event.rank)
            if event.resumed:
                ranks = {event.rank, *gone}
                kept = [one for one in kept if not _undone(one, ranks, event.step)]
            elif deserted:
                kept = [one for one in kept if not _abandoned(one, event.step)]
            there.add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            gone.add(event.rank)
            there.discard(event.rank)
        kept.append(event)
    return kept


def _resumes(event: Event) -> bool:
    return isinstance(event, Start) and event.resumed


def _abandoned(event: Event, step: int) -> bool:
    """Return whether `event` is a shard of a step that nobody was left to make."""
    return isinstance(event, Shard) and event.step >= step


def _undone(event: Event, ranks: set[int], back_to: int) -> bool:
    """Return whether `event` is of one of `ranks`, and after the state before step `back_to`."""
    if isinstance(event, Shard | Update | Synchronised):
        return event.rank in ranks and event.step >= back_to
    if isinstance(event, Start | Saved):
        return event.rank in ranks and event.step > back_to
    return False
