"""Pairing of the values of two runs: by step, samples, and the names of borders.

Micro-batches with the same samples belong together, on whatever rank and in whatever place of the
step they were computed. If both runs divide a step's samples differently, or order them differently
within a micro-batch, then only values that don't depend on that are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import Border, RankBorders

Unit = tuple[int, int, int]  # step, rank and micro-batch; -1 for what belongs to no micro-batch
_BY_ROWS = (
    *(border_file.INPUT, border_file.OUTPUT, border_file.SAMPLES),
    *(border_file.OUTPUT_GRADIENT, border_file.INPUT_GRADIENT),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The values of both runs at one border, and the ranks that have them."""

    rank: int
    second_rank: int
    first: Border
    second: Border


@dataclass(kw_only=True)
class Alignment:
    """The pairs of two runs, in the order of execution of the first.

    `only_first` and `only_second` are the borders of a paired micro-batch without a partner, each
    with the rank of the first run. `notes` say what can't be compared.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_first: list[tuple[int, Border]] = field(default_factory=list)
    only_second: list[tuple[int, Border]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)


Named = dict[tuple[Any, ...], Border]


def align(first: Sequence[RankBorders], second: Sequence[RankBorders]) -> Alignment:
    """Return the pairs of values of two runs; operations are left out."""
    units, others = _units(first), _units(second)
    result = Alignment()
    for unit, other, in_order in _matched(units, others, result.notes):
        _pair((unit[1], other[1]), units[unit], others[other], result, in_order=in_order)
    result.pairs.sort(key=lambda pair: (pair.first.step, pair.first.order, pair.rank))
    return result


def _units(ranks: Sequence[RankBorders]) -> dict[Unit, Named]:
    units: dict[Unit, Named] = defaultdict(dict)
    times: Counter[Any] = Counter()
    for rank in ranks:
        for border in rank.borders:
            if border.kind != border_file.OPERATION:
                unit = (border.step, rank.rank, border.micro_batch)
                key = (border.phase == "start", *border.key)
                times[unit, key] += 1
                units[unit][(*key, times[unit, key])] = border
    return units


def _matched(
    units: dict[Unit, Named], others: dict[Unit, Named], notes: dict[str, None]
) -> Iterator[tuple[Unit, Unit, bool]]:
    """Yield units that belong together, and whether their samples have the same order."""
    same_ranks = {rank for _, rank, _ in units} == {rank for _, rank, _ in others}
    for step in sorted({step for step, _, _ in units}):
        own = {unit: _rows(named) for unit, named in units.items() if unit[0] == step}
        far = {unit: _rows(named) for unit, named in others.items() if unit[0] == step}
        for unit in [unit for unit in own if unit[2] < 0]:
            del own[unit]
            other = unit if same_ranks else (step, 0, -1)
            if far.pop(other, None) is not None and (same_ranks or unit[1] == 0):
                yield unit, other, True
        far = {unit: rows for unit, rows in far.items() if unit[2] >= 0}
        are_same = Counter(row for rows in own.values() for row in rows) == Counter(
            row for rows in far.values() for row in rows
        )
        for unit, rows in [*own.items()]:
            other = next((each for each in (unit, *far) if far.get(each) == rows), unit)
            if far.get(other) == rows:
                yield unit, other, True
                del own[unit], far[other]
        for unit, rows in [*own.items()]:
            alike = (each for each in far if rows and sorted(far[each]) == sorted(rows))
            if (other := next(alike, unit)) in far and sorted(far[other]) == sorted(rows):
                notes[f"step {step}: the samples of a micro-batch have another order"] = None
                yield unit, other, False
                del own[unit], far[other]
        if own and far and are_same and any(own.values()):
            notes[f"step {step}: its samples are divided into other micro-batches"] = None
            continue
        for unit in own:
            if unit in far:
                yield unit, unit, True


def _rows(named: Named) -> tuple[str, ...]:
    """Return the digests of a micro-batch's samples, in order."""
    shown = (border.text.split() for border in named.values() if border.kind == border_file.SAMPLES)
    return tuple(row for rows in shown for row in rows)


def _pair(
    ranks: tuple[int, int], own: Named, far: Named, result: Alignment, *, in_order: bool
) -> None:
    rank, second_rank = ranks
    for key, border in own.items():
        if not in_order and border.kind in _BY_ROWS:
            continue
        if key in far:
            first, second = border, far[key]
            if border.kind == border_file.RATE and first.text != second.text:
                first, second = _of_common_parameters(first, second)
            pair = Pair(rank=rank, second_rank=second_rank, first=first, second=second)
            result.pairs.append(pair)
        else:
            result.only_first.append((rank, border))
    if in_order:
        result.only_second += [(rank, border) for key, border in far.items() if key not in own]


def _of_common_parameters(*settings: Border) -> Iterator[Border]:
    """Yield the values of a setting for the parameters that both runs give to an optimizer."""
    by_name = [
        dict(zip(each.text.split("\n"), () if each.numbers is None else each.numbers, strict=False))
        for each in settings
    ]
    common = [name for name in by_name[0] if name in by_name[1]]
    for border, values in zip(settings, by_name, strict=True):
        numbers = np.array([values[name] for name in common], np.float64)
        yield replace(
            border,
            numbers=numbers,
            digest=numbers.tobytes().hex(),
            scale=float(np.linalg.norm(numbers)),
            shape=numbers.shape,
            text="\n".join(common),
        )
