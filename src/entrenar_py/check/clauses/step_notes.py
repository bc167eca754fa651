"""Note what the steps of a user's trainer do that may be meant and may be a bug. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterator

from entrenar_py.check import evidence
from entrenar_py.check.evidence import factors
from entrenar_py.shared.trace import Start, Trace
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed


def tell(tally: Tally, trace: Trace) -> None:
    """Note each such fact of a run, once."""
    if trace.scenario.workload == "own":
        for fact in (*_schedule(trace), *_decay(trace)):
            tally.note(fact)


def _schedule(trace: Trace) -> Iterator[str]:
    """Yield how far the schedule moves in a step, if it moves further than one position."""
    places = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        place = evidence.any_rank(by_rank).schedule
        if place is not None:
            places[step] = place
    moves = {places[step + 1] - place for step, place in places.items() if step + 1 in places}
    if len(moves) == 1 and (move := moves.pop()) > 1:
        simple = factors.named(move, trace.scenario)
        reason = f" ({simple[1]})" if simple and simple[1] else ""
        yield (
            f"the schedule moves {move} positions in each step{reason}, which could mean: it is "
            "stepped too often"
        )


def _decay(trace: Trace) -> Iterator[str]:
    """Yield the tensors of one dimension that are decayed, if others of one dimension are not."""
    starts = [start for start in trace.of(Start) if start.shapes and start.decayed]
    if not starts:
        return
    start = starts[0]
    flat = [name for name in start.trainable if len(start.shapes.get(name, (0, 0))) == 1]
    decayed = [name for name in flat if name in (start.decayed or ())]
    if 0 < len(decayed) < len(flat):
        yield (
            f"weight decay acts on {listed(decayed, most=2)}, which "
            f"{'have' if decayed[1:] else 'has'} one dimension, and not on other such tensors"
        )
