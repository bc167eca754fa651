"""A run that somebody launched without the harness, by its ranks' files alone: one trace of it.

Nobody saw it end: what is known of that is what its ranks wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from entrenar_py import trace
from entrenar_py.command import ranks
from entrenar_py.faults import Fault
from entrenar_py.rank_files import assembly, rank_file
from entrenar_py.rank_files.rank_file import RankTrace
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Event, Injected, Start, Update
from entrenar_py.untrusted import escaping


def trace_of(files: Iterable[Path]) -> trace.Trace:
    """The trace of the run whose ranks' files these are, each in each of its lives; `failed` where
    one is missing or came to no end. TraceError for a file that no rank wrote.
    """
    lives = [rank_file.load(path) for path in sorted(files)]
    events = assembly.ordered(lives)
    world_sizes = sorted({int(one.header["world_size"]) for one in lives})
    scenario = ranks.scenario_of(lives, events, world_sizes[-1])
    events = ranks.in_their_epochs(events, scenario)
    status, reason = _ending(lives, _made(events), world_sizes)
    return trace.Trace(
        scenario=_disturbed(scenario, events),
        environment=dict(lives[0].header.get("versions", {})),
        promises=(),
        events=(
            *assembly.numbered(events, scenario.accumulation, assembly.places(lives)),
            trace.End(status=status, reason=reason),
        ),
    )


def _disturbed(scenario: Scenario, events: Sequence[Event]) -> Scenario:
    """`scenario` with what went wrong on purpose, and where it was stopped and gone on with."""
    injected = [event.fault for event in events if isinstance(event, Injected)]
    faults = tuple(dict.fromkeys(Fault.from_dict(fault) for fault in injected))
    begun = {event.step for event in events if isinstance(event, Start)}
    stops = sorted(step for step in begun if 0 < step < scenario.num_steps)
    # Who was killed, or halted, before a step has not made it, and it was to be made all the same.
    num_steps = max([scenario.num_steps, *((fault.step or 0) + 1 for fault in faults)])
    stopped = () if faults else tuple(stops)
    return scenario.with_(faults=faults, num_steps=num_steps, stops=stopped)


def _made(events: Sequence[Event]) -> Mapping[int, int]:
    """Rank -> steps that it had made at its end."""
    made: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, Update):
            made[event.rank] = max(made[event.rank], event.step + 1)
    return made


def _ending(
    lives: Sequence[RankTrace], made: Mapping[int, int], world_sizes: Sequence[int]
) -> tuple[str, str]:
    """How it ended, and why: as `ranks` has it of a run that was watched."""
    if len(world_sizes) > 1:
        found = ", ".join(map(str, world_sizes))
        return "failed", f"files of runs with {found} workers: keep each run in a folder of its own"
    last = [*{one.rank: one for one in sorted(lives, key=lambda one: one.life)}.values()]
    absent = sorted(set(range(world_sizes[0])) - {one.rank for one in last})
    if absent:
        told = ", ".join(map(str, absent))
        return "failed", f"no file of rank {told}: give the files of all ranks, each has to observe"
    problem = escaping.shortened(next((one.problem for one in last if one.problem), ""))
    if problem:
        struck = [event for one in lives for event in one.events if isinstance(event, Injected)]
        halted = any(event.fault["kind"].startswith("non_finite") for event in struck)
        return ("halted" if halted else "failed"), f"it ended by {problem}"
    steps = {made.get(rank, 0) for rank in range(world_sizes[0])}
    if all(one.ended for one in last) or (len(steps) == 1 and any(one.ended for one in last)):
        return "completed", ""
    told = ", ".join(f"rank {one.rank} after {made.get(one.rank, 0)} steps" for one in last)
    return "failed", f"not every rank came to its end: the files end with {told}"
