"""Anti-patterns around the steps: batches, modes, schedules, averages and files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.evidence import Evidence, Seen, accumulated, after, of
from entrenar_py.check.anatomy.record import Record
from entrenar_py.check.anatomy.steps import Step

# Schedules that set a rate which doesn't follow from the one that another has set.
_ABSOLUTE = ("LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")


# --- batches --------------------------------------------------------------------------------------


def repeats_the_order(known: Evidence) -> Iterator[Seen]:
    """Yield second passes of a DistributedSampler with the first one's epoch and order."""
    for rank, own in known.records.items():
        first: dict[tuple[int, int], tuple[int, ...]] = {}
        for draw in own.of(record.Drawn):
            first.setdefault((draw.loader, draw.number), draw.samples)
        seen: dict[tuple[str, int], tuple[record.PassBegun, tuple[int, ...]]] = {}
        for event in _trained_passes(own):
            samples = first.get((event.loader, event.number), ())
            if event.sampler != "DistributedSampler" or not event.shuffles or len(samples) < 2:
                continue
            earlier = seen.setdefault((event.file, event.line), (event, samples))
            if (
                earlier[0] is not event
                and earlier[1] == samples
                and earlier[0].epoch == event.epoch
            ):
                yield Seen(rank, _step_of(known, rank, event), event, f"epoch {event.epoch} again")


def _trained_passes(own: Record) -> Iterator[record.PassBegun]:
    """Yield the passes that an optimizer's step follows before the next one."""
    begun: record.PassBegun | None = None
    for event in own.events:
        if isinstance(event, record.PassBegun):
            begun = event
        elif isinstance(event, record.Stepped) and begun is not None:
            yield begun
            begun = None


def draws_the_same(known: Evidence) -> Iterator[Seen]:
    """Yield ranks that are replicas and give their models the same inputs in every call."""
    for rank, other, calls in _calls_of_two(known):
        if all(a.digest and a.digest == b.digest for _, a, b in calls):
            evidence = f"rank {rank} has the same inputs in all calls"
            yield Seen(other, calls[0][0], calls[0][2], evidence)


def draws_the_same_masks(known: Evidence) -> Iterator[Seen]:
    """Yield replicas that draw another rank's random numbers for other samples, at least twice.

    An evaluation on one rank may part the generators later.
    """
    for rank, other, calls in _calls_of_two(known):
        drawing = [(number, a, b) for number, a, b in calls if a.draws and b.draws]
        alike = [
            (number, b)
            for number, a, b in drawing
            if a.generator == b.generator and a.digest != b.digest
        ]
        if len(alike) > 1:
            count = "all" if len(alike) == len(drawing) else f"{len(alike)} of {len(drawing)}"
            evidence = f"rank {rank} has the same generator in {count} calls"
            yield Seen(other, *alike[0], evidence)


def _calls_of_two(
    known: Evidence,
) -> Iterator[tuple[int, int, list[tuple[int, record.Forward, record.Forward]]]]:
    """Yield pairs of replicas, and their training calls with the numbers of the steps."""
    if not known.are_replicas:
        return
    calls: dict[int, list[tuple[int, record.Forward]]] = {rank: [] for rank in known.records}
    for rank, step in known.each():
        calls[rank] += [(step.number, call) for call in _trained_calls(step)]
    for rank, other in combinations(calls, 2):
        pairs = zip(calls[rank], calls[other], strict=False)
        if together := [(number, a, b) for (number, a), (_, b) in pairs]:
            yield rank, other, together


def passes_are_uneven(known: Evidence) -> Iterator[Seen]:
    """Yield passes in which ranks have different numbers of batches to train on."""
    if not known.are_replicas:
        return
    if any(
        event.what == "join" for own in known.records.values() for event in own.of(record.Called)
    ):
        return
    ended = {
        rank: {(event.loader, event.number): event for event in own.of(record.PassEnded)}
        for rank, own in known.records.items()
    }
    for key in sorted(set.intersection(*(set(own) for own in ended.values()))):
        counts = {rank: own[key].batches for rank, own in ended.items()}
        if len({*counts.values()}) > 1:
            rank = min(counts, key=lambda one: counts[one])
            event = ended[rank][key]
            evidence = ", ".join(f"{count} on rank {one}" for one, count in counts.items())
            yield Seen(rank, _step_of(known, rank, event), event, f"batches: {evidence}")


def _trained_calls(step: Step) -> list[record.Forward]:
    """Return the calls of a step that lead to a backward pass."""
    return [
        call
        for call in of(step, record.Forward)
        if call.grad
        and call.outputs_grad
        and any(isinstance(event, record.Backward) for event in after(step, call))
    ]


def _step_of(known: Evidence, rank: int, wanted: record.Event) -> int:
    for step in known.steps[rank]:
        if any(event is wanted for event in step.events):
            return step.number
    return len(known.steps[rank])


# --- modes ----------------------------------------------------------------------------------------


def trains_in_eval_mode(known: Evidence) -> Iterator[Seen]:
    """Yield training passes of a module in evaluation mode that has dropout or batch norm."""
    for rank, step in known.each():
        for call in _trained_calls(step):
            if not call.training and call.modal and call.trainable:
                yield Seen(rank, step.number, call)


def evaluates_in_train_mode(known: Evidence) -> Iterator[Seen]:
    """Yield evaluation of a trained module in training mode that draws or moves statistics.

    A call that comes before a backward pass in each step, from the first one on, is no evaluation:
    it computes what the pass needs, such as the samples of a generator.
    """
    for rank, own in known.records.items():
        complete = known.steps[rank][:-1] or known.steps[rank]
        lines = [_lines_before_passes(step) for step in complete]
        needed = set.intersection(*lines) if lines else set()
        trained = {
            event.module for event in own.of(record.Forward) if event.grad and event.outputs_grad
        }
        trained |= {
            event.inner for event in own.of(record.Forward) if event.grad and event.outputs_grad
        }
        for event in own.of(record.Forward):
            evaluates = (
                not event.grad and event.training and event.modal and event.module in trained
            )
            is_needed = (event.file, event.line) in needed
            if evaluates and not is_needed and (event.draws or event.changed):
                yield Seen(rank, _step_of(known, rank, event), event)


def _lines_before_passes(step: Step) -> set[tuple[str, int]]:
    """Return the lines with a call without gradients that a backward pass follows."""
    return {
        (call.file, call.line)
        for call in of(step, record.Forward)
        if not call.grad and any(isinstance(event, record.Backward) for event in after(step, call))
    }


def moves_frozen_statistics(known: Evidence) -> Iterator[Seen]:
    """Yield frozen parts in training mode with buffers that a training pass moves."""
    for rank, step in known.each():
        for call in _trained_calls(step):
            if call.stirred:
                yield Seen(rank, step.number, call, ", ".join(call.stirred[:2]))


# --- schedules ------------------------------------------------------------------------------------


def schedules_twice(known: Evidence) -> Iterator[Seen]:
    """Yield two schedules of one optimizer, if one of them overwrites the other's rate."""
    for rank, step in known.each():
        scheduled = of(step, record.Scheduled)
        for event, other in combinations(scheduled, 2):
            both = event.optimizer == other.optimizer and event.schedule != other.schedule
            if both and {event.kind, other.kind} & {*_ABSOLUTE}:
                yield Seen(rank, step.number, other, f"{event.kind} and {other.kind}")
                break


def schedules_each_pass(known: Evidence) -> Iterator[Seen]:
    """Yield schedules that step as often as there are micro-batches in a step."""
    for rank, step in known.each():
        calls = of(step, record.Scheduled)
        for schedule in {call.schedule for call in calls}:
            own = [call for call in calls if call.schedule == schedule]
            same_line = len({(call.file, call.line) for call in own}) == 1
            if same_line and _counts_passes(step, len(own)):
                yield Seen(rank, step.number, own[-1], f"{len(own)} times in one optimizer step")


def _counts_passes(step: Step, count: int) -> bool:
    """Return whether something happens as often as an optimizer's step has micro-batches."""
    passes = [len(accumulated(step, update)) for update in of(step, record.Stepped)]
    return count > 1 and count in passes


def schedules_first(known: Evidence) -> Iterator[Seen]:
    """Yield schedules that step before the first step of their optimizer."""
    counting_passes = {(one.event.file, one.event.line) for one in schedules_each_pass(known)}
    for rank, own in known.records.items():
        stepped: set[int] = set()
        seen: set[int] = set()
        for event in own.events:
            if isinstance(event, record.Stepped):
                stepped.add(event.optimizer)
            elif isinstance(event, record.Called) and event.what == "skip":
                stepped.add(event.number)
            elif isinstance(event, record.Scheduled) and event.schedule not in seen:
                seen.add(event.schedule)
                is_first = event.optimizer not in stepped and _has_steps(own, event.optimizer)
                if is_first and (event.file, event.line) not in counting_passes:
                    yield Seen(rank, 0, event)


def _has_steps(own: Record, optimizer: int) -> bool:
    return any(one.optimizer == optimizer for one in own.of(record.Stepped))


def averages_each_pass(known: Evidence) -> Iterator[Seen]:
    """Yield averages of weights that are updated with each micro-batch."""
    for rank, step in known.each():
        calls = [call for call in of(step, record.Called) if call.what == "average"]
        if _counts_passes(step, len(calls)):
            yield Seen(rank, step.number, calls[-1], f"{len(calls)} times in one optimizer step")


# --- files ----------------------------------------------------------------------------------------


def reads_unfinished(known: Evidence) -> Iterator[Seen]:
    """Yield files that one rank saves and another one loads between the same two collectives."""
    calls = {rank: own.of(record.Called) for rank, own in known.records.items()}
    saves = [
        (rank, one)
        for rank, own in calls.items()
        for one in own
        if one.what == "save" and one.detail
    ]
    for rank, own in calls.items():
        for load in own:
            if load.what != "load" or not load.detail:
                continue
            writers = [(r, s) for r, s in saves if s.detail == load.detail and r != rank]
            own_saves = any(r == rank and s.detail == load.detail for r, s in saves)
            if any(save.exchanges == load.exchanges for _, save in writers) and not own_saves:
                yield Seen(rank, 0, load, f"rank {writers[0][0]} saves it")


def writes_one_file(known: Evidence) -> Iterator[Seen]:
    """Yield files that several ranks save in the same step."""
    for number, by_rank in known.together():
        saved: dict[str, tuple[int, record.Called]] = {}
        for rank, step in by_rank.items():
            for event in of(step, record.Called):
                if event.what != "save" or not event.detail:
                    continue
                other = saved.setdefault(event.detail, (rank, event))
                if other[0] != rank:
                    yield Seen(rank, number, event, f"rank {other[0]} as well")
