"""The trace of a run of which only its ranks' files are left.

No process observed the end of the run, so its ending is known only from those files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from entrenar_py.check.rank_files import assembly, rank_trace, resumed_lives, shown_scenario
from entrenar_py.check.rank_files.assembly import LastLives
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Injected, Start
from entrenar_py.shared.untrusted import escaping


def load(files: Iterable[Path]) -> trace.Trace:
    """Return the trace of the run whose ranks' files these are, one for each life of a rank.

    It ends `failed` if a rank is missing, or didn't come to its end. Raises TraceError for a file
    that no rank wrote.
    """
    ranks = resumed_lives.recognised([rank_trace.load(path) for path in sorted(files)])
    events = assembly.ordered(ranks)
    world_sizes = sorted({int(rank.header["world_size"]) for rank in ranks})
    scenario, traits = shown_scenario.of(ranks, events, world_sizes[-1])
    ending = _ending(LastLives(ranks, events), world_sizes)
    return shown_scenario.trace_of(ranks, events, _disturbed(scenario, events), traits, ending)


def _disturbed(scenario: Scenario, events: Sequence[Event]) -> Scenario:
    """Return `scenario` with the planted faults, and the steps where it was stopped and resumed."""
    injected = [event.fault for event in events if isinstance(event, Injected)]
    faults = tuple(dict.fromkeys(Fault.from_dict(fault) for fault in injected))
    begun = {event.step for event in events if isinstance(event, Start)}
    stops = sorted(step for step in begun if 0 < step < scenario.num_steps)
    # If a fault killed or halted all ranks, none made its step; the run was meant to have it.
    num_steps = max([scenario.num_steps, *((fault.step or 0) + 1 for fault in faults)])
    return scenario.with_(faults=faults, num_steps=num_steps, stops=() if faults else tuple(stops))


def _ending(last: LastLives, world_sizes: Sequence[int]) -> tuple[str, str]:
    """Return how the run ended, and why, as far as the files show."""
    if len(world_sizes) > 1:
        sizes = ", ".join(map(str, world_sizes))
        return "failed", f"files of runs with {sizes} workers: keep each run in a folder of its own"
    (world_size,) = world_sizes
    absent = sorted(set(range(world_size)) - last.ranks.keys())
    if absent:
        numbers = ", ".join(map(str, absent))
        return (
            "failed",
            f"no file of rank {numbers}: give the files of all ranks; each must call observe()",
        )
    if problem := escaping.shortened(last.problem):
        return ("halted" if last.met_a_planted_value else "failed"), f"it ended with {problem}"
    if last.closed == last.ranks.keys() or last.all_made_the_same(world_size):
        return "completed", ""
    steps = ", ".join(f"rank {n} after {last.num_steps.get(n, 0)} steps" for n in last.ranks)
    return "failed", f"not every rank came to its end: the files end with {steps}"
