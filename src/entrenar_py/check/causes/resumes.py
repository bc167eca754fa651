"""Compare a resumed run with the run without stops: its state, samples, draws and sums.

Checkpoints of users' trainers are not recorded. The state that a rank had before the stop is
recorded right after the optimizer's step, and a script may change the state between two steps
(clamp weights, reset moments). So a difference counts only if the next step then ends differently
than in the run without stops. Findings on samples say at which place in the data the resumed run
continues, if the run without stops was at that place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import common_steps, random_draws
from entrenar_py.check.evidence import closeness, factors, missing
from entrenar_py.shared.trace import (
    Drawn,
    Saved,
    Shard,
    Start,
    Synchronised,
    TensorRecord,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed, named

# dtype to which moments are cast when they are loaded for parameters of that dtype -> how many bits
# of float32's mantissa it lacks
_MANTISSAS = {"bfloat16": 16, "float16": 13}


@dataclass(frozen=True)
class Resume:
    """The start of a rank after a stop, and the records of all ranks before it.

    `begun` maps each rank to its first start, and `updates` maps rank and step to the updates
    before the stop.
    """

    start: Start
    begun: Mapping[int, Start]
    updates: Mapping[int, Mapping[int, Update]]

    @property
    def before(self) -> Update | None:
        """The rank's last update before the step at which it continues; None if unknown."""
        return self.updates.get(self.start.rank, {}).get(self.start.step - 1)

    def history(self, part: str, name: str) -> Iterator[tuple[TensorRecord | None, str]]:
        """Yield the records that a tensor may have been restored from, each with words for it."""
        rank, step = self.start.rank, self.start.step
        first, own = self.begun.get(rank), self.updates.get(rank, {})
        if self.before is not None:
            kind = name.rpartition("/")[2] if "/" in name else ""
            for other, record in getattr(self.before, part).items():
                if other != name and kind in ("", other.rpartition("/")[2]):
                    yield record, f"has the value of {other}: restored in a different order"
        if first is not None:
            words = "has its value from before the first step: it was not restored"
            yield getattr(first, part).get(name), words
        # A script may change parameters after the step.
        when = "in" if part == "buffers" else "after"
        for at, update in own.items():
            yield getattr(update, part).get(name), f"has the value that it had {when} step {at}"
        for other_rank, made in self.updates.items():
            if other_rank != rank and step - 1 in made:
                yield getattr(made[step - 1], part).get(name), f"has rank {other_rank}'s value"


def resumes(trace: Trace) -> Iterator[Resume]:
    """Yield each resume from a checkpoint that was not recorded."""
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


def _go_on_from(updates: dict[int, Update], event: Synchronised) -> None:
    if event.step in updates:
        updates[event.step] = replace(
            updates[event.step], weights={**updates[event.step].weights, **event.weights}
        )


def compare_state(tally: Tally, straight: Trace | None, trace: Trace, parts: Sequence[str]) -> None:
    """Compare `parts` of each resumed state with the rank's state before the stop, bit for bit.

    A rank without optimizer state before the stop has none to restore. Local buffers are compared
    on the lowest rank, since scripts save these for all ranks.
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
            on_purpose = None not in later and (
                evidence.digests(getattr(later[0], part))
                == evidence.digests(getattr(later[1], part))
            )
            if on_purpose:
                tally.compared += sum(n in got and due[n].digest == got[n].digest for n in due)
            else:
                _compare(tally, trace, resume, part, due, got)


def _kept(straight: Update | None, resumed: Update | None, start: Start) -> tuple[Tensors, Tensors]:
    """Return the buffers with which both runs took the first step, as far as they are known.

    Buffers that the script changed between the start and the step are left out.
    """
    if straight is None or resumed is None:
        return {}, {}
    buffers, due = start.buffers, straight.buffers
    got = {
        name: buffers[name]
        for name, record in resumed.buffers.items()
        if name in buffers and name in due and record.digest == buffers[name].digest
    }
    return {name: due[name] for name in got}, got


def _compare(
    tally: Tally, trace: Trace, resume: Resume, part: str, due: Tensors, got: Tensors
) -> None:
    start = resume.start
    message = (
        f"rank {start.rank} resumed at step {start.step} with different "
        f"{_WORDS.get(part, 'buffers')} than it had after step {start.step - 1}"
    )
    place = evidence.place(trace, start)
    if not got:
        what = f"{message}: it has none, so none was loaded"
        tally.check(False, what, tensor=next(iter(due)), **place)
        return
    for name in [*due, *(name for name in got if name not in due)]:
        left, right = due.get(name), got.get(name)
        if left is None or right is None:
            lacking = "is missing now" if right is None else "was missing before"
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
    """Return a phrase about what a tensor was restored as, as far as that is known."""
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
    wide = got.astype(np.float32)
    if (wide.view(np.uint32) & np.uint32(2**bits - 1)).any():
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        return bool((np.abs(wide - due) <= np.abs(due) * 2.0 ** (bits - 24) + 1e-37).all())


# --- samples and random numbers -------------------------------------------------------------------


Place = tuple[int, int, int]  # step, rank, index of the shard


def compare_data(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Compare samples and random numbers of each shard. Return whether samples are comparable.

    Samples aren't comparable if the sampler draws with replacement and the resumed run draws
    different ones, since that may be on purpose.
    """
    bare = missing.bare_fields(tally, straight, trace)
    expected = {_place(shard): shard for shard in straight.of(Shard)}
    for shard in trace.of(Shard):
        model = expected.get(_place(shard))
        if model is None:
            continue
        where = evidence.place(trace, shard)
        is_told = tally.would_keep(shard.step)  # words are needed for the counterexample only
        if shard.ids != model.ids and "ids" not in bare:
            is_sought = shard.ids and (is_told or trace.traits.replacement)
            same = (model for model in expected.values() if model.ids == shard.ids)
            seen = next(same, None) if is_sought else None
            if trace.traits.replacement:
                tally.miss(_others_on_purpose(shard, seen))
                return False
            moved = tuple(sorted(set(model.ids) ^ set(shard.ids))) or shard.ids
            how = ""
            if is_told:
                how = _goes_on(shard, seen, trace) or _other_order(straight, model, shard)
            message = f"after the resume different samples are drawn{how}"
            tally.check(False, message, sample_ids=moved, **where)
        if "draws" not in bare:
            owner = _owner(expected, shard) if is_told and model.draws != shard.draws else ""
            message = f"after the resume different random numbers are drawn{owner}"
            tally.equal(model.draws, shard.draws, message, **where)
    _same_numbers(tally, straight, trace)
    return True


def _same_numbers(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare what a script draws outside the forward pass: noise, timesteps, augmentation."""
    expected = {_stream(drawn): drawn for drawn in straight.standing.of(Drawn) if _counts(drawn)}
    for drawn in trace.standing.of(Drawn):
        model = expected.get(_stream(drawn))
        if model is None or not _counts(drawn):
            continue
        others = [
            other.rank
            for other in expected.values()
            if other.after == drawn.after
            and (other.step, other.where) == (drawn.step, drawn.where)
            and other.rank != drawn.rank
        ]
        owner = f": rank {drawn.rank} has rank {others[0]}'s" if others else ""
        owner = owner or _late(straight, trace, drawn)
        where, generator = random_draws.PLACES[drawn.where], random_draws.named(drawn.generator)
        tally.check(
            # The generator may have had to be restored before this draw.
            model.after == drawn.after,
            f"after the resume different random numbers are drawn {where}, from {generator}{owner}",
            step=drawn.step,
            rank=drawn.rank,
            scenario=trace.scenario,
        )


def _late(straight: Trace, trace: Trace, drawn: Drawn) -> str:
    """Return a phrase if a generator was perhaps restored too late; "" otherwise.

    In the run without stops, the generator's state before the step's draw may differ from its state
    after the previous step's draw. Then it also draws between the two steps, and must be restored
    before that.
    """
    resumes = {(start.step, start.rank) for start in trace.of(Start) if start.resumed}
    owner = drawn.rank, drawn.generator
    own = [one for one in straight.standing.of(Drawn) if (one.rank, one.generator) == owner]
    earlier = [one for one in own if one.step < drawn.step]
    same = [one for one in own if one.step == drawn.step]
    if (drawn.step, drawn.rank) not in resumes or not earlier or not same:
        return ""
    if earlier[-1].after == same[0].before:
        return ""
    return (
        f": between steps {drawn.step - 1} and {drawn.step} this generator draws, too (a loader "
        "draws a seed where an epoch begins): restore it before that"
    )


def _counts(drawn: Drawn) -> bool:
    return drawn.where in ("batch", "loss", "loader") and drawn.worker is None


def _stream(drawn: Drawn) -> tuple[int, int, int | None, str, str]:
    return drawn.step, drawn.rank, drawn.micro_batch, drawn.where, drawn.generator


def _place(shard: Shard) -> Place:
    return shard.step, shard.rank, shard.shard


def _goes_on(shard: Shard, seen: Shard | None, trace: Trace) -> str:
    """Return a phrase about where in the data the resumed run continues, as far as is known."""
    back = [start.step for start in trace.of(Start) if start.resumed and start.step <= shard.step]
    if seen is None or shard.step not in back:
        return ""
    if seen.step == 0:
        return f": the data starts over, step {shard.step} has the samples of step 0"
    if seen.step == shard.step:
        return ", in another order, or by another rank"
    micro = f", micro-batch {seen.shard}" if trace.scenario.accumulation > 1 else ""
    is_behind = seen.step == shard.step - 1 and shard.step in back
    meaning = (
        "; the saved step number is one lower than the step of the saved weights, as happens if "
        "weights are not copied before they are saved in the background"
    )
    told = f": step {shard.step} has the samples of step {seen.step}{micro}"
    return told + meaning if is_behind else told


def _other_order(straight: Trace, model: Shard, shard: Shard) -> str:
    """Return a phrase about how the samples differ from those of `model`, the shard without stops.

    Samples are called drawn again, or the rest of the epoch, only if epochs are known.
    """
    lost = [id_ for id_ in model.ids if id_ not in shard.ids]
    new = [id_ for id_ in shard.ids if id_ not in model.ids]
    if lost and not new:
        return f": without samples {listed(lost, most=8)}"
    if not new:
        return ""
    is_told = straight.traits.epochs == "told"
    epoch = [at for at in straight.of(Shard) if is_told and at.epoch == model.epoch]
    step_of = {id_: at.step for at in epoch if at.step < shard.step for id_ in at.ids}
    again = [id_ for id_ in new if id_ in step_of]
    if again:
        steps = named("step", {step_of[id_] for id_ in again})
        return f": samples {listed(again, most=8)} again, which this epoch had in {steps}"
    rest = {id_ for at in epoch if at.step >= shard.step for id_ in at.ids}
    if strange := [id_ for id_ in new if id_ not in rest]:
        shown = listed(strange, most=8)
        return f": samples {shown}, which the run without stops doesn't draw in this step"
    return ": the rest of the epoch comes in another order"


def _others_on_purpose(shard: Shard, seen: Shard | None) -> str:
    again = "" if seen is None else f" (those of step {seen.step} again)"
    return (
        f"the sampler draws with replacement, and after the resume step {shard.step} has "
        f"different samples than without stops{again}: to make the runs comparable, let the "
        "script restore the sampler's generator"
    )


def _owner(expected: Mapping[Place, Shard], shard: Shard) -> str:
    others: Sequence[int] = [
        model.rank
        for model in expected.values()
        if model.step == shard.step and model.rank != shard.rank and model.draws == shard.draws
    ]
    return f": rank {shard.rank} has rank {others[0]}'s" if others and shard.draws else ""


# --- the order of a sum over ranks ----------------------------------------------------------------


# Of the sum of the terms' norms: one rounding for each rank's term, and a few for the division.
_ROUNDINGS = 2.0**-20


def summed_alike(tally: Tally, straight: Trace, trace: Trace) -> tuple[Trace, Trace]:
    """Return both runs without the steps from the first one that adds in a different order on.

    If there is such a step, count it as missing.
    """
    if trace.scenario.world_size < 3:
        return straight, trace
    step = _first_apart(straight, trace)
    if step is None:
        return straight, trace
    tally.miss(
        f"in step {step} every rank's own gradient has the bits of the "
        "uninterrupted run, but their sum is rounded differently: they were added "
        "in a different order, as DistributedDataParallel does in its first step; "
        "to compare bits after a resume, run it on two workers (--world-size 2)"
    )
    return common_steps.until(straight, step), common_steps.until(trace, step)


def _first_apart(straight: Trace, trace: Trace) -> int | None:
    """Return the first step in which gradients differ by the rounding of their sum, or None."""
    expected, shards = evidence.updates(straight), evidence.shards(straight)
    resumed_shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            continue
        for rank, update in by_rank.items():
            model = expected[step].get(rank)
            if model is None or evidence.digests(model.gradient) == evidence.digests(
                update.gradient
            ):
                continue
            terms, others = shards.get(step, []), resumed_shards.get(step, [])
            same_terms = [evidence.digests(s.gradient) for s in terms] == [
                evidence.digests(s.gradient) for s in others
            ]
            known = bool(terms) and all(shard.gradient for shard in terms)
            if known and same_terms and _is_rounding(model.gradient, update.gradient, terms):
                return step
            return None
    return None


def _is_rounding(expected: Tensors, got: Tensors, terms: list[Shard]) -> bool:
    """Return whether two gradients differ by no more than the rounding of a sum of `terms`."""
    due, now = evidence.vectors(expected), evidence.vectors(got)
    norms = [closeness.norm_l2(shard.gradient) for shard in terms]
    size = closeness.norm_l2(expected)
    if due is None or now is None or due.keys() != now.keys() or not size:
        return False
    whole = math.fsum(norm or math.inf for norm in norms)
    # The terms and their sum are divided by the same number, which is unknown.
    total = np.sqrt(
        sum(np.square(_sum_of(terms, name)).sum() for name in due)  # float64
    )
    scale = whole * size / float(total) if total else math.inf
    gaps = (
        np.linalg.norm(now[name].astype(np.float64) - due[name].astype(np.float64)) for name in due
    )
    return all(float(gap) <= _ROUNDINGS * scale for gap in gaps)


def _sum_of(terms: list[Shard], name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = [shard.gradient[name].values() for shard in terms if name in shard.gradient]
    known = [value.astype(np.float64) for value in values if value is not None]
    return np.sum(known, axis=0) if known else np.zeros(1)
