"""Compare the copies of one tensor that a rank holds under several names. Part of F-DP-001.

A tensor that is recorded under only one of its names is one tensor in memory, so there is nothing
to compare. Copies on the stages of a pipeline have one name in the trace: they are replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from entrenar_py.check.evidence import closeness, missing
from entrenar_py.shared.trace import Declared, Noticed, Start, Trace, Update
from entrenar_py.shared.verdict import Tally

Tie = tuple[str, ...]


def compare(tally: Tally, trace: Trace) -> None:
    """Compare each rank's copies of each tensor, before the first step and after each step."""
    declared = _ties(event.tied for event in trace.of(Declared))
    named = {name for tie in declared for name in tie}
    noticed = _ties(event.shared for event in trace.of(Noticed))
    for tie in declared:
        _compare_copies(tally, trace, tie)
    for tie in noticed:
        if named.isdisjoint(tie):
            _tell_parted(tally, trace, tie)
    for pair in _ties(event.alike for event in trace.of(Noticed)):
        if named.isdisjoint(pair):
            tally.note(
                f"{pair[0]} and {pair[1]} have the same values before the first step, and are two "
                f"tensors: if they were to be one, {_declare(pair)}"
            )


def have_copies(trace: Trace) -> bool:
    """Return whether a rank holds copies of a tensor that is declared tied, or that was one."""
    declared = _ties(event.tied for event in trace.of(Declared))
    noticed = _ties(event.shared for event in trace.of(Noticed))
    return any(True for tie in (*declared, *noticed) for _ in _holders(trace, tie))


def _ties(events: Iterable[Sequence[Tie]]) -> list[Tie]:
    return list(dict.fromkeys(tie for ties in events for tie in ties))


def _holders(trace: Trace, tie: Tie) -> Iterator[tuple[Start | Update, int, list[str]]]:
    """Yield each state with two copies of a tensor or more, its step, and their names."""
    for event in trace.standing.events:
        if isinstance(event, Start | Update):
            held = [name for name in tie if name in event.weights]
            if len(held) > 1:
                yield event, event.step - isinstance(event, Start), held


def _compare_copies(tally: Tally, trace: Trace, tie: Tie) -> None:
    for event, step, held in _holders(trace, tie):
        first = event.weights[held[0]]
        for name in held[1:]:
            copy = event.weights[name]
            if copy.digest == first.digest:
                tally.compared += 1
                continue
            tally.check(
                False,
                f"rank {event.rank} holds two copies of a tied tensor that differ: {name} is not "
                f"{held[0]}",
                step=step,
                rank=event.rank,
                tensor=name,
                scenario=trace.scenario,
                **closeness.difference(first, copy),
            )


def _tell_parted(tally: Tally, trace: Trace, tie: Tie) -> None:
    """Report that names of one tensor became two; whether that is right nobody declared."""
    for event, step, held in _holders(trace, tie):
        first = event.weights[held[0]]
        apart = next((name for name in held if event.weights[name].digest != first.digest), "")
        what = f"{held[0]} and {apart or held[1]} were one tensor when observe() was called, and"
        if apart:
            when = missing.when(step)
            tally.miss(f"{what} differ {when} on rank {event.rank}: {_declare(tie)}")
            return
        tally.note(f"{what} are two that agree: to have them compared, {_declare(tie)}")


def _declare(tie: Tie) -> str:
    return f"declare observe(..., tied=({tie!r},))"
