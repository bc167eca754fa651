"""Judge what a user's workers that step alone do with a value that is not finite.

A worker may stop, or leave its own step out: nobody waits for it within a round. What is not finite
may not reach its weights, and by the outer step the others.
"""

from __future__ import annotations

from entrenar_py.check import evidence
from entrenar_py.shared.trace import (
    Halt,
    Injected,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Tally

Place = tuple[int, int]  # step, rank


def compare(tally: Tally, trace: Trace) -> None:
    """Judge one run, step by step and round by round."""
    bad = _bad_places(trace)
    stopped = min((place for place in bad if not _has_stepped(trace, place)), default=None)
    held: dict[int, tuple[Tensors, Tensors]] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            held[event.rank] = event.weights, event.optimizer
        elif isinstance(event, Update):
            rested = _same(held.get(event.rank), (event.weights, event.optimizer))
            held[event.rank] = event.weights, event.optimizer
            _judge_step(tally, trace, event, is_bad=(event.step, event.rank) in bad, rested=rested)
        elif isinstance(event, Synchronised):
            held[event.rank] = event.weights, held.get(event.rank, ({}, {}))[1]
            _judge_round(tally, trace, event, stopped)
    if stopped is not None:
        step, rank = stopped
        ended = trace.end.status == "halted" or bool(trace.of(Halt))
        message = f"training went on without rank {rank}, which met a value that is not finite"
        tally.check(ended, message, step=step, rank=rank, scenario=trace.scenario)
        if ended:
            tally.note(f"with a value that is not finite on rank {rank} it stopped by itself")


def _bad_places(trace: Trace) -> set[Place]:
    """Return where a worker met a value that is not finite: planted, or its own."""
    places = {(shard.step, shard.rank) for shard in trace.of(Shard) if not shard.finite}
    return places | {
        (event.step or 0, event.rank or 0)
        for event in trace.of(Injected)
        if str(event.fault.get("kind")).startswith("non_finite_")
    }


def _has_stepped(trace: Trace, place: Place) -> bool:
    step, rank = place
    return rank in evidence.updates(trace).get(step, {})


def _judge_step(tally: Tally, trace: Trace, update: Update, *, is_bad: bool, rested: bool) -> None:
    place = evidence.place(trace, update)
    if is_bad and rested and update.finite:
        tally.compared += 1
        tally.note(f"rank {update.rank} left out its step {update.step}, whose value is not finite")
        return
    if is_bad and update.finite and trace.traits.losses == "backward":
        tally.miss(
            f"rank {update.rank} went on after a value that is not finite in step {update.step}, "
            "and whether it left that step out is unknown: call obs.synchronised() where a round "
            "ends"
        )
        return
    message = f"rank {update.rank} updated its own weights with a value that is not finite"
    found = evidence.non_finite(update.weights) or (None, None)
    shown = {"tensor": found[0], "element": found[1]}
    tally.check(update.finite and not is_bad, message, **shown, **place)


def _judge_round(tally: Tally, trace: Trace, event: Synchronised, stopped: Place | None) -> None:
    place = evidence.place(trace, event)
    if stopped is not None and event.step >= stopped[0]:
        message = (
            f"an outer step was made after step {event.step}, although rank {stopped[1]} met a "
            f"value that is not finite in step {stopped[0]}, and stopped"
        )
        tally.check(False, message, **place)
        return
    found = evidence.non_finite(event.weights) or (None, None)
    message = f"rank {event.rank} was given weights that are not finite"
    tally.check(found[0] is None, message, tensor=found[0], element=found[1], **place)


def _same(before: tuple[Tensors, Tensors] | None, now: tuple[Tensors, Tensors]) -> bool:
    """Return whether nothing moved; False if no weights were recorded."""
    return bool(before and now[0]) and all(
        one.keys() == other.keys() and all(one[n].digest == other[n].digest for n in one)
        for one, other in zip(before or (), now, strict=True)
    )
