"""A record cut into steps, a usual step with its repeated lines folded, and what differs from it.

A step is over when all optimizers that step regularly have stepped, and the script draws a batch,
calls a module or begins a backward pass; or when one of them steps again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from entrenar_py.check.anatomy import record, wording
from entrenar_py.check.anatomy.record import Event, Record, numbers
from entrenar_py.check.anatomy.wording import Words

_REGULAR = 0.5  # of the steps of the optimizer that steps most often
_PERIOD_MAX = 32  # lines that are repeated together
_SIZES = re.compile(r"\[(\d+)(?:, \d+)+\]")
_BUCKETS = re.compile(r"^\d+ x (?=all-reduce mean .* by DistributedDataParallel$)")
_BEGINS = (record.PassBegun, record.Drawn, record.Forward, record.Backward)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The events of one step of a rank."""

    number: int
    events: tuple[Event, ...]


def cut(known: Record) -> list[Step]:
    """Return the steps of a record; events before the first and after the last are left out.

    Without any step of an optimizer there are none.
    """
    built = {call.number: call.detail for call in known.of(record.Called) if call.what == "built"}
    # An optimizer that is built again for the same parameters counts as the same.
    counts = Counter(built.get(one.optimizer, one.held) for one in known.of(record.Stepped))
    if not counts:
        return []
    most = max(counts.values())
    regular = {name for name, count in counts.items() if count >= _REGULAR * most}
    steps: list[list[Event]] = []
    current: list[Event] = []
    stepped: set[str] = set()
    has_begun = not any(isinstance(event, _BEGINS) for event in known.events)
    for event in known.events:
        has_begun |= isinstance(event, _BEGINS)
        name = ""
        if isinstance(event, record.Stepped):
            name = built.get(event.optimizer, event.held)
        if name in stepped or (stepped >= regular and isinstance(event, _BEGINS)):
            end = _end_of_step(current)
            steps.append(current[:end])
            current, stepped = current[end:], set()
        if name:
            stepped.add(name)
        if has_begun:
            current.append(event)
    if stepped:
        steps.append(current)
    return [Step(number=n, events=tuple(events)) for n, events in enumerate(steps)]


def _end_of_step(events: Sequence[Event]) -> int:
    """Return the index of the first event of a next step after the last optimizer's step."""
    stepped = [n for n, event in enumerate(events) if isinstance(event, record.Stepped)]
    later = range(stepped[-1] + 1, len(events)) if stepped else ()
    return next((n for n in later if isinstance(events[n], _BEGINS)), len(events))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One event of a step in words; `last` are the values of its last repetition."""

    what: str
    values: str
    last: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """The file without its folder, and the line."""
        return wording.place(Event(file=self.file, line=self.line))

    @property
    def key(self) -> tuple[str, str, int]:
        """What is compared between steps and ranks.

        Lengths of sequences in a batch aren't, nor in how many calls a wrapper reduces gradients.
        """
        what = _SIZES.sub(r"[\1, *]", self.what)
        return _BUCKETS.sub("", what), self.file, self.line


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines that follow each other, and are repeated together `times` times."""

    times: int
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Lines of some steps, or of a rank, that a usual step of rank 0 has less or more often."""

    where: str
    also: tuple[tuple[Line, int], ...]
    lacks: tuple[tuple[Line, int], ...]


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A usual step of each rank, and what differs between steps and between ranks.

    - `usual`: the number of the step that is shown, from 0, and `alike` those with the same lines.
    - `lanes`: the blocks of that step by rank.
    - `by_step`, `by_rank`: differences from the usual step of the first rank.
    """

    world_size: int
    num_steps: int
    usual: int
    alike: tuple[int, ...]
    lanes: Mapping[int, tuple[Block, ...]]
    by_step: tuple[Difference, ...] = ()
    by_rank: tuple[Difference, ...] = ()
    problems: Mapping[int, str] = field(default_factory=dict)


def of(records: Mapping[int, Record]) -> Anatomy | None:
    """Return the anatomy of a run; None if no rank has taken a step."""
    lines = {rank: [*_lines_of(known)] for rank, known in records.items()}
    lines = {rank: steps for rank, steps in lines.items() if steps}
    if not lines:
        return None
    first = min(lines)
    counted = [_counted(step) for step in lines[first]]
    usual, alike = _usual(counted)
    by_rank = [
        _difference(f"rank {rank}", _counted(steps[usual]), counted[usual])
        for rank, steps in lines.items()
        if rank != first and usual < len(steps)
    ]
    return Anatomy(
        world_size=records[first].world_size,
        num_steps=len(lines[first]),
        usual=usual,
        alike=alike,
        lanes={rank: _folded(s[min(usual, len(s) - 1)]) for rank, s in lines.items()},
        by_step=tuple(_by_step(counted, usual)),
        by_rank=tuple(one for one in by_rank if one.also or one.lacks),
        problems={rank: known.problem for rank, known in records.items() if known.problem},
    )


def names_of(known: Record) -> dict[int, str]:
    """Return the names of parameters by number."""
    return {event.number: event.name for event in known.of(record.Named)}


def trained_of(known: Record) -> frozenset[int]:
    """Return the parameters that optimizers have stepped and that require a gradient."""
    return frozenset[int]().union(*(numbers(one.held) for one in known.of(record.Stepped)))


def _lines_of(known: Record) -> Iterator[list[Line]]:
    words = Words(names_of(known), trained_of(known))
    for step in cut(known):
        described = ((words.what(event), event) for event in _merged(step.events))
        yield [
            Line(what=what, values=v, last=v, file=event.file, line=event.line)
            for what, event in described
            if what
            for v in [wording.values(event)]
        ]


def _merged(events: Sequence[Event]) -> list[Event]:
    """Return events; collectives that follow each other at one line, as in a loop, are one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if not (
            isinstance(event, record.Collective) and isinstance(last, record.Collective)
        ) or _bare(event) != _bare(last):
            merged.append(event)
        else:
            merged[-1] = replace(
                event,
                tensor_bytes=event.tensor_bytes + last.tensor_bytes,
                calls=event.calls + last.calls,
                touched=record.ranges(numbers(event.touched) | numbers(last.touched)),
            )
    return merged


def _bare(event: record.Collective) -> record.Collective:
    return replace(event, tensor_bytes=0, calls=1, touched="")


_Counts = Counter[tuple[str, str, int]]


def _counted(lines: Sequence[Line]) -> tuple[_Counts, dict[tuple[str, str, int], Line]]:
    return Counter(line.key for line in lines), {line.key: line for line in reversed(lines)}


def _usual(counted: Sequence[tuple[_Counts, object]]) -> tuple[int, tuple[int, ...]]:
    """Return a step of the most frequent kind, and those with the same lines.

    Of two kinds as frequent, it is the one that differs least from all steps. The first and the
    last step count only if there are no others.
    """
    inner = [*range(1, len(counted) - 1)] or [*range(len(counted))][-1:]

    def rank(number: int) -> tuple[int, int]:
        own = counted[number][0]
        alike = sum(counted[n][0] == own for n in inner)
        return -alike, sum(_distance(own, one) for one, _ in counted)

    usual = min(inner, key=rank)
    return usual, tuple(n for n, (one, _) in enumerate(counted) if one == counted[usual][0])


def _distance(one: _Counts, other: _Counts) -> int:
    return (one - other).total() + (other - one).total()


def _by_step(
    counted: Sequence[tuple[_Counts, dict[tuple[str, str, int], Line]]], usual: int
) -> Iterator[Difference]:
    """Yield the differences of steps, those with equal differences together."""
    alike: dict[tuple[object, object], list[int]] = {}
    merged: dict[tuple[object, object], Difference] = {}
    for number, one in enumerate(counted):
        difference = _difference("", one, counted[usual])
        key = tuple(
            tuple((line.key, n) for line, n in lines)
            for lines in (difference.also, difference.lacks)
        )
        if key != ((), ()):
            alike.setdefault((key[0], key[1]), []).append(number)
            merged.setdefault((key[0], key[1]), difference)
    for both, steps in alike.items():
        word = "step" if len(steps) == 1 else "steps"
        where = f"{word} {', '.join(map(str, steps))}"
        where += " (the last)" if steps == [len(counted) - 1] else ""
        yield Difference(where=where, also=merged[both].also, lacks=merged[both].lacks)


def _difference(
    where: str,
    lines: tuple[_Counts, dict[tuple[str, str, int], Line]],
    usual: tuple[_Counts, dict[tuple[str, str, int], Line]],
) -> Difference:
    also, lacks = lines[0] - usual[0], usual[0] - lines[0]
    return Difference(
        where=where,
        also=tuple((lines[1][key], count) for key, count in also.items()),
        lacks=tuple((usual[1][key], count) for key, count in lacks.items()),
    )


def _folded(lines: Sequence[Line]) -> tuple[Block, ...]:
    """Return blocks of lines; those that repeat each other become one block."""
    blocks: list[Block] = []
    loose: list[Line] = []
    at = 0
    while at < len(lines):
        period, times = _repetition(lines, at)
        if times == 1:
            loose.append(lines[at])
            at += 1
            continue
        if loose:
            blocks.append(Block(times=1, lines=tuple(loose)))
            loose = []
        end = at + period * times
        pairs = zip(lines[at : at + period], lines[end - period : end], strict=True)
        shown = (
            Line(what=a.what, values=a.values, last=b.values, file=a.file, line=a.line)
            for a, b in pairs
        )
        blocks.append(Block(times=times, lines=tuple(shown)))
        at = end
    if loose:
        blocks.append(Block(times=1, lines=tuple(loose)))
    return tuple(blocks)


def _repetition(lines: Sequence[Line], at: int) -> tuple[int, int]:
    """Return how many lines from `at` on are repeated, and how often: the most lines in all."""
    best = (1, 1)
    for period in range(1, min(_PERIOD_MAX, (len(lines) - at) // 2) + 1):
        block = [line.key for line in lines[at : at + period]]
        times = 1
        while [
            line.key for line in lines[at + times * period : at + (times + 1) * period]
        ] == block:
            times += 1
        if times > 1 and times * period > best[0] * best[1]:
            best = (period, times)
    return best
