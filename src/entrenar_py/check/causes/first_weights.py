"""Weights that are no good beginning: not finite, all zeros, or memory that was never written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from entrenar_py.check.evidence import missing
from entrenar_py.shared.trace import Noticed, Start, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

_INITIALISE = "initialise every parameter after to_empty() (reset_parameters), or load a checkpoint"


def judge_finite(tally: Tally, traces: Iterable[Trace]) -> None:
    """Check that no run trains from weights with a NaN or Inf. Report one that stopped at them."""
    for trace in traces:
        for look, words in (("nan", "NaN"), ("inf", "Inf")):
            places = _places(trace, look)
            if not places:
                continue
            ranks = set().union(*places.values())
            message = (
                f"weights hold {words} before the first step ({listed([*places], most=3)} on "
                f"{missing.named(ranks)}): {_INITIALISE}"
            )
            if trace.of(Update):
                place = {"step": -1, "rank": min(ranks), "scenario": trace.scenario}
                tally.check(False, message, tensor=next(iter(places)), **place)
            else:
                tally.miss(message)


def tell_peculiar(tally: Tally, trace: Trace) -> None:
    """Note matrices that start from zero, and report what looks as if nobody had initialised it.

    A matrix may rightly be zero (LoRA's B, the last layer of a block). All matrices may not, since
    then none of several layers has a gradient.
    """
    unwritten = _places(trace, "uninitialised")
    if unwritten:
        held = set().union(*unwritten.values())
        tally.miss(
            f"{listed([*unwritten], most=3)} look uninitialised on {missing.named(held)}: before "
            f"the first step they hold numbers that no initialisation draws; {_INITIALISE}"
        )
    ranks = {event.rank for event in trace.of(Noticed)}
    zero = [name for name, held in _places(trace, "zero").items() if held == ranks]
    if not zero:
        return
    if len(zero) > 1 and not _other_matrices(trace, zero):
        tally.miss(
            f"all matrices are zero before the first step ({listed(zero, most=3)}), so that no "
            f"layer behind another has a gradient: {_INITIALISE}"
        )
    else:
        tally.note(f"zero before the first step: {listed(zero, most=3)}")


def _places(trace: Trace, look: str) -> Mapping[str, set[int]]:
    """Return the tensors that look so before the first step, with the ranks that hold them."""
    places: dict[str, set[int]] = {}
    for event in trace.of(Noticed):
        for name, seen in event.peculiar.items():
            if seen == look and not event.step:
                places.setdefault(name, set()).add(event.rank)
    return places


def _other_matrices(trace: Trace, zero: Iterable[str]) -> bool:
    """Return whether a rank holds a matrix other than those, or the shapes are unknown."""
    shapes = [start.shapes for start in trace.of(Start) if start.shapes]
    names = {name for known in shapes for name, shape in known.items() if len(shape) > 1}
    return not shapes or bool(names - set(zero))
