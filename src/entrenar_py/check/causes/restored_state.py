"""Compare the state with which ranks resume with the state that they had before the stop.

This is for users' trainers, whose checkpoints are not recorded. What a rank had before is recorded
after the optimizer's step. A script may change it between two steps (clamp weights, reset moments).
So a difference counts only if the next step then ends elsewhere than in the run without stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, factors, missing
from entrenar_py.shared.trace import (
    Saved,
    Start,
    Synchronised,
    TensorRecord,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Tally

# Number formats that moments are cast to when they are loaded for parameters of that format.
_MANTISSAS = {"bfloat16": 16, "float16": 13}  # name -> how many bits of float32's it has not


@dataclass(frozen=True)
class Resume:
    """The start of a rank after a stop, and what all ranks had until then.

    `begun` are the first starts by rank, `updates` those before the stop by rank and step.
    """

    start: Start
    begun: Mapping[int, Start]
    updates: Mapping[int, Mapping[int, Update]]

    @property
    def before(self) -> Update | None:
        """The rank's last update before the step with which it goes on; None if unknown."""
        return self.updates.get(self.start.rank, {}).get(self.start.step - 1)

    def history(self, part: str, name: str) -> Iterator[tuple[TensorRecord | None, str]]:
        """Yield what a tensor may have been restored from, each with words that say so."""
        rank, step = self.start.rank, self.start.step
        first, own = self.begun.get(rank), self.updates.get(rank, {})
        if self.before is not None:
            kind = name.rpartition("/")[2] if "/" in name else ""
            for other, record in getattr(self.before, part).items():
                if other != name and kind in ("", other.rpartition("/")[2]):
                    yield record, f"has what {other} had: restored in another order"
        if first is not None:
            words = "is as it was before the first step: it was not restored"
            yield getattr(first, part).get(name), words
        when = "in" if part == "buffers" else "after"  # a script may change them after the step
        for at, update in own.items():
            yield getattr(update, part).get(name), f"is as it was {when} step {at}"
        for other_rank, made in self.updates.items():
            if other_rank != rank and step - 1 in made:
                yield getattr(made[step - 1], part).get(name), f"is what rank {other_rank} had"


def resumes(trace: Trace) -> Iterator[Resume]:
    """Yield each resume in a run whose checkpoint was not recorded."""
    saved = {event.step for event in trace.of(Saved)}
    begun: dict[int, Start] = {}
    updates: dict[int, dict[int, Update]] = {}
    for event in trace.events:
        if isinstance(event, Update):
            updates.setdefault(event.rank, {})[event.step] = event
        elif isinstance(event, Synchronised):
            _go_on_from(updates.get(event.rank, {}), event)
        elif isinstance(event, Start) and not event.resumed:
            begun.setdefault(event.rank, event)
        elif isinstance(event, Start) and event.step not in saved:
            yield Resume(event, begun, updates)


def _go_on_from(made: dict[int, Update], event: Synchronised) -> None:
    """Give the update of a synchronised step the weights that the rank was given then."""
    if event.step in made:
        made[event.step] = replace(
            made[event.step], weights={**made[event.step].weights, **event.weights}
        )


def compare(tally: Tally, straight: Trace | None, trace: Trace, parts: Sequence[str]) -> None:
    """Compare `parts` of each resume's state with those of its rank before the stop, bit for bit.

    A rank whose optimizer had no state before has none to restore. Local buffers are those of the
    lowest rank, which people save for all.
    """
    gone_on = (evidence.updates(straight) if straight else {}), evidence.updates(trace)
    recorded = missing.recorded(trace)
    for resume in resumes(trace):
        start = resume.start
        if resume.before is None:
            tally.miss(
                f"rank {start.rank} resumed at step {start.step}, and its state after step "
                f"{start.step - 1} is unknown"
            )
            continue
        later = [steps.get(start.step, {}).get(start.rank) for steps in gone_on]
        for part in parts:
            if part == "local" and start.rank:
                continue
            due, got = getattr(resume.before, part), getattr(start, part)
            if part == "buffers":
                due, got = _kept(later[0], later[1], start)
            if not due or (not got and missing.is_unknown(recorded, start, part)):
                continue
            on_purpose = None not in later and _same(*(getattr(one, part) for one in later))
            if on_purpose:
                tally.compared += sum(n in got and due[n].digest == got[n].digest for n in due)
            else:
                _compare(tally, trace, resume, part, due, got)


def _kept(straight: Update | None, resumed: Update | None, start: Start) -> tuple[Tensors, Tensors]:
    """Return the buffers with which the first step was made in both runs, where they are known.

    Those are left out that the script changed between the start and the step.
    """
    if straight is None or resumed is None:
        return {}, {}
    held, due = start.buffers, straight.buffers
    got = {
        name: held[name]
        for name, record in resumed.buffers.items()
        if name in held and name in due and record.digest == held[name].digest
    }
    return {name: due[name] for name in got}, got


def _compare(
    tally: Tally, trace: Trace, resume: Resume, part: str, due: Tensors, got: Tensors
) -> None:
    start = resume.start
    message = (
        f"rank {start.rank} resumed at step {start.step} with other {_WORDS.get(part, 'buffers')} "
        f"than it had after step {start.step - 1}"
    )
    place = evidence.place(trace, start)
    if not got:
        what = f"{message}: it has none, so none was loaded"
        tally.check(False, what, tensor=next(iter(due)), **place)
        return
    for name in [*due, *(name for name in got if name not in due)]:
        left, right = due.get(name), got.get(name)
        if left is None or right is None:
            lacking = "is not there any more" if right is None else "was not there before"
            tally.check(False, f"{message}: {name} {lacking}", tensor=name, **place)
        elif left.digest == right.digest:
            tally.compared += 1
        else:
            how = _how_it_differs(left, right, resume.history(part, name))
            shown = closeness.difference(left, right)
            tally.check(False, f"{message}: {name} {how}", tensor=name, **shown, **place)


_WORDS = {"weights": "weights", "optimizer": "optimizer state"}


def _how_it_differs(
    due: TensorRecord, got: TensorRecord, history: Iterator[tuple[TensorRecord | None, str]]
) -> str:
    """Return in words what a tensor was restored as, as far as that can be told."""
    left, right = due.elements(), got.elements()
    if left is not None and right is not None and left.any() and not right.any():
        return "is zero: it was not restored"
    for record, words in history:
        if record is not None and record.digest == got.digest:
            return words
    if left is None or right is None:
        return "differs"
    if left.dtype == np.float32 and left.size == right.size:
        for form, bits in _MANTISSAS.items():
            if _was_rounded(left, right, bits):
                return f"was rounded to {form}"
    words = factors.of(left, right)
    return f"differs: {words}" if words else "differs"


def _was_rounded(due: Any, got: Any, bits: int) -> bool:
    """Return whether `got` is `due` with its last `bits` bits rounded away."""
    wide = got.astype(np.float32)
    if (wide.view(np.uint32) & np.uint32(2**bits - 1)).any():
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        return bool((np.abs(wide - due) <= np.abs(due) * 2.0 ** (bits - 24) + 1e-37).all())


def _same(one: Tensors, other: Tensors) -> bool:
    return _digests(one) == _digests(other)


def _digests(tensors: Tensors) -> Mapping[str, str]:
    return {name: record.digest for name, record in tensors.items()}
