"""Anti-patterns between the beginning of a backward pass and the end of an optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.evidence import (
    Evidence,
    Seen,
    accumulated,
    after,
    before,
    of,
    until_step,
)
from entrenar_py.check.anatomy.record import Event, numbers
from entrenar_py.check.anatomy.steps import Step

_RATIO = 1e-3  # relative error of a ratio of two norms


def _close(number: float, expected: float) -> bool:
    return abs(number - expected) <= _RATIO * abs(expected)


@dataclass(frozen=True)
class _Update:
    """An optimizer's step, and what has happened to its gradients in this step of the script.

    - `passes` added to them; `reduced` are the script's own reductions.
    - `factor` is that of clipping, and `scale` the number by which a scaler has divided.
    """

    rank: int
    step: Step
    update: record.Stepped

    def seen(self, event: Event, detail: str = "") -> Seen:
        """Return that a pattern was seen at an event of this step."""
        return Seen(self.rank, self.step.number, event, detail)

    def between(self, event: Event) -> list[Event]:
        """Return the events after `event` and before the optimizer's step."""
        later = after(self.step, event)
        return [*later[: len(later) - len(after(self.step, self.update)) - 1]]

    @cached_property
    def _earlier(self) -> list[Event]:
        in_optimizer = numbers(self.update.held)
        known = [(e, numbers(getattr(e, "touched", ""))) for e in before(self.step, self.update)]
        return [e for e, touched in known if touched & in_optimizer or isinstance(e, record.Called)]

    @cached_property
    def passes(self) -> list[record.Backward]:
        """The passes since the gradients were last cleared."""
        return accumulated(self.step, self.update)

    @property
    def reduced(self) -> list[record.Collective]:
        in_optimizer = numbers(self.update.held)
        sums = (e for e in self._earlier if isinstance(e, record.Collective))
        return [e for e in sums if e.by == "script" and _reduces(e, in_optimizer)]

    @property
    def operations(self) -> set[str]:
        """The operations of the script's own reductions."""
        return {e.reduction for e in self.reduced}

    @property
    def are_means(self) -> bool:
        """True if all passes begin at plain means."""
        return bool(self.passes) and all(e.mean for e in self.passes)

    @property
    def is_one_batch(self) -> bool:
        """True if the passes begin at several losses of the same calls of modules."""
        calls = of(self.step, record.Forward)
        within = after(self.step, self.passes[0])
        return bool(calls) and not any(
            isinstance(event, record.Forward | record.Drawn)
            for event in within[: len(within) - len(after(self.step, self.passes[-1]))]
        )

    @property
    def factor(self) -> float:
        clips = [e for e in self._earlier if isinstance(e, record.Clipped)]
        return math.prod(e.after / e.before for e in clips if e.before > 0 and e.after > 0)

    @property
    def scale(self) -> float:
        calls = [e for e in self._earlier if isinstance(e, record.Called)]
        scales = [float(e.detail) for e in calls if e.what == "scale"]
        is_divided = self.update.scaler or any(e.what == "unscale" for e in calls)
        return scales[-1] if scales and is_divided else 1.0

    @property
    def ratio(self) -> float | None:
        """The part of reduced gradients that was applied, apart from clipping; None if unknown."""
        known = self.update.ratio is not None and self.reduced
        return self.update.ratio / self.factor if known and self.update.ratio is not None else None

    @property
    def is_sum(self) -> bool:
        """True if the script has added gradients up over ranks, and divided the sum by nothing."""
        return self.operations == {"SUM"} and self.ratio is not None and _close(self.ratio, 1.0)


def _updates(known: Evidence) -> Iterator[_Update]:
    for rank, step, update in known.every(record.Stepped):
        yield _Update(rank, step, update)


def flagged(kind: type[Event], field: str, known: Evidence) -> Iterator[Seen]:
    """Yield the events of one kind with a field that is true."""
    for rank, step, event in known.every(kind):
        if getattr(event, field):
            yield Seen(rank, step.number, event)


# --- clipping -------------------------------------------------------------------------------------


def _is_active(clip: record.Clipped) -> bool:
    """Return whether a gradient was shortened; the norm may be computed only to look at it."""
    return clip.after < clip.before


def clips_nothing(known: Evidence) -> Iterator[Seen]:
    """Yield clipping that got no gradients."""
    for rank, step, clip in known.every(record.Clipped):
        if not clip.touched:
            yield Seen(rank, step.number, clip, f"{clip.given} tensors, none with a gradient")


def clips_before_reduction(known: Evidence) -> Iterator[Seen]:
    """Yield clipping of gradients that ranks reduce later in the same step."""
    for rank, step, clip in known.every(record.Clipped):
        clipped = numbers(clip.touched) if _is_active(clip) else frozenset()
        for event in until_step(after(step, clip), clipped):
            if isinstance(event, record.Backward):
                break  # told by `clips_each_pass`
            if _reduces(event, clipped):
                yield Seen(rank, step.number, clip, f"they are reduced at line {event.line}")
                break


def clips_each_pass(known: Evidence) -> Iterator[Seen]:
    """Yield clipping that is followed by another pass that adds to the clipped gradients."""
    for rank, step, clip in known.every(record.Clipped):
        clipped = numbers(clip.touched) if _is_active(clip) else frozenset()
        passes = until_step(after(step, clip), clipped)
        if any(isinstance(e, record.Backward) and numbers(e.touched) & clipped for e in passes):
            yield Seen(rank, step.number, clip)


def clips_scaled(known: Evidence) -> Iterator[Seen]:
    """Yield clipping of gradients that are still multiplied by a scaler's scale."""
    for rank, step, clip in known.every(record.Clipped):
        if clip.scaled and _is_active(clip):
            yield Seen(rank, step.number, clip)


def clips_after_step(known: Evidence) -> Iterator[Seen]:
    """Yield clipping of gradients that were applied already."""
    for rank, step, clip in known.every(record.Clipped):
        clipped, is_applied = numbers(clip.touched), False
        for event in before(step, clip):
            if isinstance(event, record.Stepped):
                is_applied |= clipped <= numbers(event.graded)
            elif isinstance(event, record.Backward):
                is_applied &= not numbers(event.touched) & clipped
        if clipped and is_applied:
            yield Seen(rank, step.number, clip)


def clips_in_parts(known: Evidence) -> Iterator[Seen]:
    """Yield two clippings of parts of one optimizer's gradients, each by its own norm."""
    for rank, step in known.each():
        stepped = [numbers(part.held) for part in of(step, record.Stepped)]
        for first, second in pairwise(filter(_is_active, of(step, record.Clipped))):
            part, other = numbers(first.touched), numbers(second.touched)
            if (
                part
                and other
                and not part & other
                and any(part | other <= each for each in stepped)
            ):
                yield Seen(rank, step.number, second)
                break


# --- passes ---------------------------------------------------------------------------------------


def trains_unowned(known: Evidence) -> Iterator[Seen]:
    """Yield parameters that get gradients and that no optimizer has."""
    for rank, steps in known.steps.items():
        owned = frozenset[int]().union(
            *(numbers(update.held) for update in known.records[rank].of(record.Stepped)),
            *(
                numbers(update.detail.rpartition(" ")[2])
                for update in known.records[rank].of(record.Called)
                if update.what == "built" and not update.detail.endswith(" ")
            ),
        )
        for step in steps[-1:]:
            for update in of(step, record.Backward):
                if (unowned := numbers(update.touched) - owned) and numbers(update.touched) & owned:
                    yield Seen(rank, step.number, update, known.named(rank, unowned))


def never_graded(known: Evidence) -> Iterator[Seen]:
    """Yield parameters of an optimizer that never get a gradient, while others do."""
    for rank, own in known.records.items():
        touched = frozenset[int]().union(*(numbers(e.touched) for e in own.of(record.Backward)))
        by_optimizer: dict[int, list[record.Stepped]] = {}
        for update in own.of(record.Stepped):
            by_optimizer.setdefault(update.optimizer, []).append(update)
        for updates in by_optimizer.values():
            in_optimizer = frozenset.intersection(*(numbers(update.held) for update in updates))
            without = in_optimizer.difference(
                *(numbers(update.graded) for update in updates), touched
            )
            if without and len(updates) > 1:
                yield Seen(rank, len(updates) - 1, updates[-1], known.named(rank, without))


def keeps_gradients(known: Evidence) -> Iterator[Seen]:
    """Yield passes that add to gradients that an earlier step has applied."""
    for own in _updates(known):
        for event in own.passes:
            if kept := numbers(event.carried) & numbers(own.update.graded):
                names = known.named(own.rank, kept)
                yield own.seen(event, f"zero_grad is missing for {names}")


def applies_again(known: Evidence) -> Iterator[Seen]:
    """Yield steps that apply some gradients of an earlier step again, besides new ones."""
    for rank, step, update in known.every(record.Stepped):
        if update.stale and update.stale != update.graded:
            yield Seen(rank, step.number, update, known.named(rank, numbers(update.stale)))


def steps_without_pass(known: Evidence) -> Iterator[Seen]:
    """Yield steps in which all gradients are those of an earlier step."""
    for rank, step, update in known.every(record.Stepped):
        if update.stale and update.stale == update.graded:
            yield Seen(rank, step.number, update)


def begins_twice(known: Evidence) -> Iterator[Seen]:
    """Yield a second pass from one loss that adds to the gradients of the first one."""
    for rank, step in known.each():
        passes = of(step, record.Backward)
        for first, second in pairwise(passes):
            between = after(step, first)[: len(after(step, first)) - len(after(step, second))]
            is_cleared = any(isinstance(event, record.Cleared) for event in between)
            if second.again and not is_cleared and numbers(first.touched) & numbers(second.touched):
                yield Seen(rank, step.number, second)


def clears_before_step(known: Evidence) -> Iterator[Seen]:
    """Yield gradients that are cleared after the pass and before the step."""
    for own in _updates(known):
        earlier = before(own.step, own.update)
        is_first = not any(isinstance(event, record.Stepped) for event in earlier)
        # Otherwise there were gradients: a step may compute and clear them itself.
        if own.passes or own.update.norm or own.update.moved or not is_first:
            continue
        cleared = [e for e in earlier if isinstance(e, record.Cleared) and e.present]
        if cleared and any(isinstance(event, record.Backward) for event in earlier):
            yield own.seen(cleared[-1])


def adds_up_means(known: Evidence) -> Iterator[Seen]:
    """Yield micro-batches with mean losses that are added up, and that nothing divides."""
    for own in _updates(known):
        alike = {(e.file, e.line, e.touched) for e in own.passes}
        if len(own.passes) < 2 or len(alike) > 1 or any(e.again for e in own.passes):
            continue
        norm = own.passes[-1].norm * own.factor / own.scale
        if own.are_means and norm and _close(own.update.norm, norm) and not own.is_one_batch:
            yield own.seen(own.passes[-1], f"{len(own.passes)} passes")


# --- reductions -----------------------------------------------------------------------------------


def _reduces(event: record.Event, wanted: frozenset[int]) -> bool:
    is_sum = isinstance(event, record.Collective) and event.operation != "broadcast"
    return (
        is_sum
        and isinstance(event, record.Collective)
        and event.contents == "gradients"
        and event.size > 1
        and bool(numbers(event.touched) & wanted)
    )


def divides_wrongly(known: Evidence) -> Iterator[Seen]:
    """Yield steps that divide reduced gradients by the number of ranks once too often."""
    for own in _updates(known):
        if own.ratio is not None and len(own.passes) != own.reduced[-1].size:
            size = own.reduced[-1].size
            if own.operations == {"SUM"} and _close(own.ratio, size**-2):
                yield own.seen(own.reduced[-1], "a sum, divided twice")
            if own.operations == {"AVG"} and _close(own.ratio, 1 / size):
                yield own.seen(own.reduced[-1], "a mean, divided again")


def sums_means(known: Evidence) -> Iterator[Seen]:
    """Yield sums of gradients over ranks that nothing divides, of losses that are means."""
    for own in _updates(known):
        by_wrapper = any(e.reduced for e in own.passes)
        if own.is_sum and own.are_means and not by_wrapper and own.update.torchs:
            yield own.seen(own.reduced[-1], f"{own.reduced[-1].size} ranks")


def reduces_twice(known: Evidence) -> Iterator[Seen]:
    """Yield sums over ranks of gradients that a wrapper has reduced already."""
    for own in _updates(known):
        if own.is_sum and own.passes and own.passes[-1].reduced:
            yield own.seen(own.reduced[-1])


def leaves_last_pass_alone(known: Evidence) -> Iterator[Seen]:
    """Yield steps with a last pass that is not reduced, though an earlier one was."""
    for own in _updates(known):
        if len(own.passes) < 2 or own.passes[-1].reduced:
            continue
        first, last = numbers(own.passes[0].touched), numbers(own.passes[-1].touched)
        late = any(_reduces(event, last) for event in own.between(own.passes[-1]))
        if any(e.reduced for e in own.passes) and last <= first and not late:
            yield own.seen(own.passes[-1])


def calls_inside_wrapper(known: Evidence) -> Iterator[Seen]:
    """Yield calls of a module inside its wrapper, with gradients that nothing reduces."""
    if known.world_size < 2:
        return
    for rank, step, call in known.every(record.Forward):
        if not (call.was_inner and call.grad and call.outputs_grad):
            continue
        rest = after(step, call)
        has_pass = any(isinstance(e, record.Backward) for e in rest)
        is_reduced = any(isinstance(e, record.Collective) and e.size > 1 for e in rest)
        if has_pass and not is_reduced:
            yield Seen(rank, step.number, call)


def stays_apart(known: Evidence) -> Iterator[Seen]:
    """Yield the last step of ranks that train the same parameters and exchange nothing."""
    if len(known.steps) < 2 or min(map(len, known.steps.values())) < 2:
        return
    shapes = {tuple((n.name, n.shape) for n in r.of(record.Named)) for r in known.records.values()}
    exchanged = any(
        isinstance(event, record.Collective) and event.size > 1 and event.operation != "barrier"
        for _, step in known.each()
        for event in step.events
    )
    if len(shapes) > 1 or exchanged:
        return
    by_rank = {
        rank: own[min(map(len, known.steps.values())) - 1] for rank, own in known.steps.items()
    }
    weights = {tuple(one.weights for one in of(step, record.Stepped)) for step in by_rank.values()}
    if len(weights) == 1 and all(weights.pop()):
        return  # they are equal, so ranks exchange tensors by other means
    if any(call.was_inner for r in known.records.values() for call in r.of(record.Forward)):
        return  # told by `calls_inside_wrapper`
    for rank, steps in known.steps.items():
        yield Seen(rank, steps[-1].number, of(steps[-1], record.Stepped)[-1])


def lacks_gradients_somewhere(known: Evidence) -> Iterator[Seen]:
    """Yield steps in which some ranks have a gradient of a parameter, and others have none."""
    if not known.are_replicas:
        return
    for number, by_rank in known.together():
        updates = {rank: of(step, record.Stepped) for rank, step in by_rank.items()}
        for each in zip(*updates.values(), strict=False):
            graded = [numbers(update.graded) for update in each]
            if {update.held for update in each} == {each[0].held} and len({*graded}) > 1:
                rank = next(
                    r
                    for r, update in zip(updates, graded, strict=True)
                    if update != max(graded, key=len)
                )
                missing = frozenset[int]().union(*graded) - graded[list(updates).index(rank)]
                yield Seen(
                    rank, number, each[list(updates).index(rank)], known.named(rank, missing)
                )


# --- steps ----------------------------------------------------------------------------------------


def never_updates_scale(known: Evidence) -> Iterator[Seen]:
    """Yield scalers that step at least twice and are never updated."""
    for rank, own in known.records.items():
        updates = [one for one in own.of(record.Stepped) if one.scaler]
        updated = any(one.what == "update" for one in own.of(record.Called))
        scaled = any(one.what == "scale" for one in own.of(record.Called))
        if len(updates) > 1 and scaled and not updated:
            yield Seen(rank, len(updates) - 1, updates[-1])


def moves_nothing(known: Evidence) -> Iterator[Seen]:
    """Yield optimizers with gradients that move nothing in any step after the first."""
    for rank, own in known.records.items():
        updates: dict[int, list[record.Stepped]] = {}
        for update in own.of(record.Stepped):
            updates.setdefault(update.optimizer, []).append(update)
        for steps in updates.values():
            late = steps[1:]
            stands = not any(e.moved for e in late) and all(e.graded for e in late)
            if len(late) > 1 and stands:
                rates = ", ".join(f"{rate:g}" for rate in late[-1].rates)
                evidence = f"lr {rates}, norm of the gradient {late[-1].norm:g}"
                yield Seen(rank, len(steps) - 1, late[-1], evidence)


def steps_non_finite(known: Evidence) -> Iterator[Seen]:
    """Yield steps that apply a gradient that is not finite."""
    for rank, step, one in known.every(record.Stepped):
        if not math.isfinite(one.norm) and one.moved:
            yield Seen(rank, step.number, one)


def rebuilds_optimizer(known: Evidence) -> Iterator[Seen]:
    """Yield optimizers of the same parameters that each step once."""
    for rank, own in known.records.items():
        updates: dict[str, dict[int, int]] = {}
        for update in own.of(record.Stepped):
            counts = updates.setdefault(update.held, {})
            counts[update.optimizer] = counts.get(update.optimizer, 0) + 1
        for held, counts in updates.items():
            if len(counts) > 2 and {*counts.values()} == {1}:
                last = [update for update in own.of(record.Stepped) if update.held == held][-1]
                yield Seen(rank, len(counts) - 1, last, f"{len(counts)} optimizers")


def edits_weights(known: Evidence) -> Iterator[Seen]:
    """Yield parameters that something other than the optimizer and a loaded state has changed."""
    for rank, own in known.steps.items():
        for earlier, step in pairwise([None, *own]):
            assert step is not None
            events = [*(earlier.events if earlier else ()), *step.events]
            excused = any(
                (isinstance(e, record.Called) and e.what == "restore")
                or (isinstance(e, record.Collective) and e.contents in ("parameters", "other"))
                for e in events
            )
            for one in of(step, record.Stepped):
                if one.edited and not excused:
                    yield Seen(rank, step.number, one, known.named(rank, numbers(one.edited)))
