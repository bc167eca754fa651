"""Places of a rank's tensors in those of the whole model, derived from their initial values.

A script that itself cuts a model into plain tensors declares nothing. With the same seed, the run
on one worker begins with whole tensors and ranks begin with pieces of them, so the numbers are the
same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.trace import Start, TensorRecord

Shape = tuple[int, ...]
Values = NDArray[Any]
Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placed:
    """The place of a rank's tensor: the elements `indices` of tensor `name` of the whole model.

    `indices` is None if the rank has the whole tensor. If slices were cut along one dimension,
    `rows` are their numbers, and `dim` is the dimension. The last `padding` elements of the rank's
    tensor are padding.
    """

    name: str
    indices: Indices | None = None
    dim: int = 0
    rows: Indices | None = None
    padding: int = 0


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of the whole model: its name, values before the first step, and shape."""

    name: str
    record: TensorRecord
    values: Values | None
    shape: Shape

    @property
    def is_constant(self) -> bool:
        """True if all elements are known and equal, so that values don't show a piece's place."""
        return self.values is not None and is_constant(self.values)


def of(starts: Mapping[int, Start], whole: Start) -> dict[int, dict[str, Placed]]:
    """Return rank -> tensor name -> its place in `whole`, for tensors with a known place.

    A tensor has no place if its values differ from all those of the whole model. The exception is a
    tensor that has the same values on all ranks: a script that draws the initial values of pieces
    gets different numbers for later tensors than one worker does.
    """
    wholes = {
        name: Whole(name, record, record.values(), _shape(whole, name))
        for name, record in whole.weights.items()
    }
    by_rank = {rank: _of_rank(start, wholes) for rank, start in sorted(starts.items())}
    for name, shape in whole.shapes.items():
        if all(name not in places for places in by_rank.values()) and _are_copies(
            name, shape, starts.values()
        ):
            for places in by_rank.values():
                places[name] = Placed(name)
    return by_rank


def _shape(start: Start, name: str) -> Shape:
    # A tensor with two numbers per element (complex) counts as flat.
    size = start.weights[name].size or 0
    shape = tuple(start.shapes.get(name, ()))
    return shape if shape and math.prod(shape) == size else (size,)


def _are_copies(name: str, shape: Shape, starts: Collection[Start]) -> bool:
    held = [start for start in starts if start.shapes.get(name) == shape]
    return len(held) == len(starts) and len({start.weights[name].digest for start in held}) == 1


def _of_rank(start: Start, wholes: Mapping[str, Whole]) -> dict[str, Placed]:
    """Return tensor name -> place for a rank; tensors with distinct values are placed first.

    Tensors with equal elements are placed afterwards, by their neighbours.
    """
    places: dict[str, Placed] = {}
    alike = {}
    for name, record in start.weights.items():
        values = record.values()
        shape = _shape(start, name)
        if values is None:
            place = Placed(name) if _is_same(record, wholes.get(name)) else None
        elif is_constant(values):
            alike[name] = (record, shape)
            continue
        else:
            place = _by_values(name, record, values, shape, wholes)
        if place is not None:
            places[name] = place
    modules = _modules(places)
    for name, (record, shape) in alike.items():
        if (place := _by_neighbours(name, record, shape, wholes, places, modules)) is not None:
            places[name] = place
    return places


def of_buffers(start: Start, places: Mapping[str, Placed]) -> dict[str, str]:
    """Return buffer name on the rank -> its name in the whole model, derived from its module's."""
    modules = _modules(places)
    named = {}
    for name in start.buffers:
        module, dot, last = name.rpartition(".")
        named[name] = f"{_module(module, modules)}{dot}{last}"
    return named


def is_constant(values: Values) -> bool:
    """Return whether all elements are equal."""
    return values.size == 0 or bool((values == values[0]).all())


def _is_same(record: TensorRecord, whole: Whole | None) -> bool:
    return whole is not None and record.digest == whole.record.digest


# --- by values ------------------------------------------------------------------------------------


def _by_values(
    name: str, record: TensorRecord, values: Values, shape: Shape, wholes: Mapping[str, Whole]
) -> Placed | None:
    own = wholes.get(name)
    if own is not None and (place := _within(own, record, values, shape)) is not None:
        return place
    others = [whole for whole in wholes.values() if whole is not own and not whole.is_constant]
    places = [p for w in others if (p := _within(w, record, values, shape)) is not None]
    return places[0] if len(places) == 1 else None


def _within(whole: Whole, record: TensorRecord, values: Values, shape: Shape) -> Placed | None:
    """Return where `values` lie in `whole`; None if they don't, or if several places match."""
    if whole.values is None or whole.values.dtype != values.dtype:
        return None
    if _is_same(record, whole):
        return Placed(whole.name) if math.prod(whole.shape) == values.size else None
    for dim, cut in _dimensions(shape, whole.shape):
        rows = _rows(values.reshape(cut), whole.values.reshape(whole.shape), dim)
        if rows is not None:
            return cut_along(whole, dim, rows)
    padding = 0 if len(shape) > 1 else int(values.size - 1 - np.flatnonzero(values)[-1])
    for size in {values.size, values.size - padding}:
        indices = _positions(values[:size], whole.values)
        if indices is not None:
            return Placed(whole.name, indices, padding=values.size - size)
    return None


def _dimensions(shape: Shape, whole: Shape) -> Iterator[tuple[int, Shape]]:
    """Yield (dimension, shape of the piece) for each dimension along which a piece may be cut.

    `shape` is that of the piece. It may lack the first dimension, as the shape of one of a stack of
    layers does. If the shapes are equal, the slices may still be in a different order.
    """
    if len(shape) == len(whole) - 1:
        shape = (1, *shape)
    if len(shape) != len(whole):
        return
    unlike = [dim for dim, size in enumerate(shape) if size != whole[dim]]
    if len(unlike) < 2:
        yield from ((dim, shape) for dim in unlike or range(len(shape)))


def cut_along(whole: Whole, dim: int, rows: Indices) -> Placed:
    """Return the place of the slices `rows` along one dimension of a tensor."""
    every = np.arange(math.prod(whole.shape), dtype=np.int64).reshape(whole.shape)
    return Placed(whole.name, every.take(rows, axis=dim).reshape(-1), dim, rows)


def _rows(piece: Values, whole: Values, dim: int) -> Indices | None:
    """Return the numbers of the slices of `whole` that `piece` has; None if they are ambiguous.

    Also None if a slice is missing.
    """
    known: dict[bytes, int] = {}
    slices = np.moveaxis(whole, dim, 0)
    for number, row in enumerate(slices):
        known.setdefault(row.tobytes(), number)
    rows = [known.get(row.tobytes()) for row in np.moveaxis(piece, dim, 0)]
    seen = [row for row in rows if row is not None]
    if len(known) < len(slices) or len(seen) < len(rows) or len({*seen}) < len(seen):
        return None
    return np.array(seen, np.int64)


def _positions(piece: Values, whole: Values) -> Indices | None:
    """Return the index in `whole` of each element; None if a value is missing or occurs twice."""
    order = np.argsort(whole, kind="stable")
    ordered = whole[order]
    at = np.searchsorted(ordered, piece)
    if (at == ordered.size).any() or (ordered[at] != piece).any():
        return None
    after = np.searchsorted(ordered, piece, side="right")
    if (after - at > 1).any() or np.unique(at).size < piece.size:
        return None
    return order[at].astype(np.int64)


# --- by neighbours --------------------------------------------------------------------------------


def _modules(found: Mapping[str, Placed]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, place in found.items():
        own, other = (one.rpartition(".") for one in (name, place.name))
        if own[2] == other[2]:
            named.setdefault(own[0], other[0])
    return named


def _by_neighbours(
    name: str,
    record: TensorRecord,
    shape: Shape,
    wholes: Mapping[str, Whole],
    places: Mapping[str, Placed],
    modules: Mapping[str, str],
) -> Placed | None:
    """Return where a tensor of equal elements lies, derived from its neighbours; None if unknown.

    The neighbours are tensors of the same module or rank. A piece of a bias lies where the rows of
    its module's weight lie.
    """
    module, _, last = name.rpartition(".")
    whole = wholes.get(".".join(filter(None, (_module(module, modules), last))))
    if whole is None or not whole.is_constant or whole.values is None:
        return None
    values = record.values()
    assert values is not None, "it is constant"
    if values.size and whole.values.size and values[0] != whole.values[0]:
        return None
    if shape == whole.shape:
        return Placed(whole.name)
    beside = (place for other, place in places.items() if other.rpartition(".")[0] == module)
    for place in beside:
        rows, cut = place.rows, wholes[place.name].shape
        if rows is None or len(shape) != 1 or len(rows) != shape[0]:
            continue
        if len(whole.shape) == 1 and whole.shape[0] == cut[place.dim]:
            return cut_along(whole, 0, rows)
    return None


def _module(name: str, modules: Mapping[str, str]) -> str:
    """Return the name in the whole model of module `name`, moved as its neighbours are."""
    if name in modules:
        return modules[name]
    for own, other in modules.items():
        moved = _moved(name, own.split("."), other.split("."))
        if moved is not None:
            return moved
    return name


def _moved(name: str, own: list[str], other: list[str]) -> str | None:
    """Return `name` with its number changed by the difference of the numbers in `own` and `other`.

    Return None if the names don't differ in exactly one number.
    """
    parts = name.split(".")
    unlike = [i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]]
    if len(own) != len(other) or len(unlike) != 1 or len(parts) <= unlike[0]:
        return None
    at = unlike[0]
    if parts[:at] != own[:at] or not all(p[at].isdecimal() for p in (parts, own, other)):
        return None
    number = int(parts[at]) + int(other[at]) - int(own[at])
    return ".".join([*parts[:at], str(number), *parts[at + 1 :]])
