"""Compare what a resumed run draws with what the run without stops draws: samples, random numbers.

Findings say where the resumed run goes on, if it is a place that the other run has been to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrenar_py.check import evidence
from entrenar_py.check.causes import random_draws
from entrenar_py.check.evidence import missing
from entrenar_py.shared.trace import Drawn, Shard, Start, Trace
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed, named

Place = tuple[int, int, int]  # step, rank, number of the shard


def compare(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Compare samples and random numbers of each shard; return whether the samples can be compared.

    They can't if the sampler draws with replacement and the resumed run draws others: that may be
    on purpose.
    """
    bare = missing.bare_fields(tally, straight, trace)
    expected = {_place(shard): shard for shard in straight.of(Shard)}
    for shard in trace.of(Shard):
        model = expected.get(_place(shard))
        if model is None:
            continue
        where = evidence.place(trace, shard)
        is_told = tally.would_keep(shard.step)  # words are sought for the counterexample only
        if shard.ids != model.ids and "ids" not in bare:
            seen = _seen_at(expected, shard) if is_told or trace.traits.replacement else None
            if trace.traits.replacement:
                tally.miss(_others_on_purpose(shard, seen))
                return False
            moved = tuple(sorted(set(model.ids) ^ set(shard.ids))) or shard.ids
            how = ""
            if is_told:
                how = _goes_on(shard, seen, trace) or _other_order(straight, model, shard)
            message = f"after the resume other samples are drawn{how}"
            tally.check(False, message, sample_ids=moved, **where)
        if "draws" not in bare:
            whose = _whose(expected, shard) if is_told and model.draws != shard.draws else ""
            message = f"after the resume other random numbers are drawn{whose}"
            tally.equal(model.draws, shard.draws, message, **where)
    _same_numbers(tally, straight, trace)
    return True


def _same_numbers(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare what a script draws outside of the forward pass: noise, timesteps, augmentation."""
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
        whose = f": rank {drawn.rank} has rank {others[0]}'s" if others else ""
        whose = whose or _late(straight, trace, drawn)
        where, generator = random_draws.PLACES[drawn.where], random_draws.named(drawn.generator)
        tally.check(
            model.after == drawn.after,  # before it the generator may have had to be restored
            f"after the resume other random numbers are drawn {where}, from {generator}{whose}",
            step=drawn.step,
            rank=drawn.rank,
            scenario=trace.scenario,
        )


def _late(straight: Trace, trace: Trace, drawn: Drawn) -> str:
    """Return in words that a generator may have been restored too late, if it draws before, too.

    It does if its state isn't the one that it had after the draw before.
    """
    resumes = {(start.step, start.rank) for start in trace.of(Start) if start.resumed}
    whose = drawn.rank, drawn.generator
    own = [one for one in straight.standing.of(Drawn) if (one.rank, one.generator) == whose]
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


def _seen_at(expected: Mapping[Place, Shard], shard: Shard) -> Shard | None:
    """Return the first shard of the run without stops that has these samples; None if none has."""
    return next(
        (model for model in expected.values() if model.ids == shard.ids and shard.ids), None
    )


def _goes_on(shard: Shard, seen: Shard | None, trace: Trace) -> str:
    """Return in words where the resumed run goes on in the data, as far as that is known."""
    back = [start.step for start in trace.of(Start) if start.resumed and start.step <= shard.step]
    if seen is None or shard.step not in back:
        return ""
    if seen.step == 0:
        return f": the data starts over, step {shard.step} has the samples of step 0"
    if seen.step == shard.step:
        return ", in another order, or by another rank"
    micro = f", micro-batch {seen.shard}" if trace.scenario.accumulation > 1 else ""
    is_behind = seen.step == shard.step - 1 and shard.step in back
    why = (
        "; what was saved counts a step less than its weights have made, as where they are not "
        "copied before they are saved in the background"
    )
    return (
        f": step {shard.step} has the samples of step {seen.step}{micro}{why if is_behind else ''}"
    )


def _other_order(straight: Trace, model: Shard, shard: Shard) -> str:
    """Return in words how the samples differ from those of the `model`, one by one.

    New samples are said to be from the past or the rest of the epoch only if epochs are known.
    """
    lost = [one for one in model.ids if one not in shard.ids]
    new = [one for one in shard.ids if one not in model.ids]
    if lost and not new:
        return f": without samples {listed(lost, most=8)}"
    if not new:
        return ""
    is_told = straight.traits.epochs == "told"
    epoch = [at for at in straight.of(Shard) if is_told and at.epoch == model.epoch]
    made = {one: at.step for at in epoch if at.step < shard.step for one in at.ids}
    again = [one for one in new if one in made]
    if again:
        steps = named("step", {made[one] for one in again})
        return f": samples {listed(again, most=8)} again, which this epoch had in {steps}"
    rest = {one for at in epoch if at.step >= shard.step for one in at.ids}
    if strange := [one for one in new if one not in rest]:
        shown = listed(strange, most=8)
        return f": samples {shown}, which the run without stops doesn't draw there"
    return ": the rest of the epoch comes in another order"


def _others_on_purpose(shard: Shard, seen: Shard | None) -> str:
    again = "" if seen is None else f" (those of step {seen.step} again)"
    return (
        f"the sampler draws with replacement, and after the resume step {shard.step} has other "
        f"samples than without stops{again}: to be compared, the script has to restore the "
        "sampler's generator"
    )


def _whose(expected: Mapping[Place, Shard], shard: Shard) -> str:
    """Return whose random numbers a rank draws, if another rank drew them in this step."""
    others: Sequence[int] = [
        model.rank
        for model in expected.values()
        if model.step == shard.step and model.rank != shard.rank and model.draws == shard.draws
    ]
    return f": rank {shard.rank} has rank {others[0]}'s" if others and shard.draws else ""
