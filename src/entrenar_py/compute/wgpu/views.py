"""Views: new strides and an offset for a stored value if possible, else index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.emitter import Emitter
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.values import Schedule, Stored, Value, join_rows

Change = Callable[[Indices], Indices]  # indices into the view -> into the value that it views
Restride = Callable[[Stored], Stored | None]


def reshape(schedule: Schedule, value: Value, shape: Sequence[int]) -> Value:
    """Reshape, in C order. One size may be -1."""
    to = tuple(shape)
    if -1 in to:
        known = -math.prod(to)
        to = tuple(value.size // known if one == -1 else one for one in to)
    if to == value.shape:
        return value
    own = value.shape

    def restride(stored: Stored) -> Stored | None:
        strides = reshaped_strides(own, stored.strides, to)
        return None if strides is None else replace(stored, strides=strides)

    return _view(
        *(schedule, value, to, lambda indices: at.reshape(indices, to, own), restride),
        ordered=True,
    )


def permute(schedule: Schedule, value: Value, dims: Sequence[int]) -> Value:
    """Permute the dims: dim i of the view is dim `dims[i]` of the value."""
    order = [dim % len(value.shape) for dim in dims]
    if order == list(range(len(order))):
        return value

    def change(indices: Indices) -> Indices:
        return tuple(indices[order.index(dim)] for dim in range(len(order)))

    def restride(stored: Stored) -> Stored:
        return replace(stored, strides=tuple(stored.strides[dim] for dim in order))

    return _view(schedule, value, [value.shape[dim] for dim in order], change, restride)


def expand(schedule: Schedule, value: Value, shape: Sequence[int]) -> Value:
    """Repeat along dims of size 1 and along new leading dims. A size of -1 keeps the dim."""
    new = len(shape) - len(value.shape)
    own = (1,) * new + value.shape
    to = tuple(size if one == -1 else one for one, size in zip(shape, own, strict=True))
    if to == value.shape:
        return value
    if value.rows is not None:
        rows = join_rows(to, [value])
        if rows is not None:
            expanded = _recipe(value, to, lambda one: broadcast(one, value.shape))
            expanded.rows = rows
            return expanded

    def restride(stored: Stored) -> Stored:
        strides = (0,) * new + stored.strides
        kept = zip(strides, own, to, strict=True)
        return replace(stored, strides=tuple(s if a == b else 0 for s, a, b in kept))

    return _view(schedule, value, to, lambda one: broadcast(one, value.shape), restride)


def take(schedule: Schedule, value: Value, dim: int, start: int, size: int, step: int) -> Value:
    """Take `size` indices along `dim`: `start`, `start + step`, and so on."""
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    if shape == value.shape:
        return value

    def change(indices: Indices) -> Indices:
        return (*indices[:dim], indices[dim] * step + Index(start), *indices[dim + 1 :])

    def restride(stored: Stored) -> Stored:
        strides = list(stored.strides)
        offset = stored.offset + start * strides[dim]
        strides[dim] *= step
        return replace(stored, strides=tuple(strides), offset=offset)

    return _view(schedule, value, shape, change, restride)


def unfold(schedule: Schedule, value: Value, dim: int, size: int, step: int) -> Value:
    """Take `size` neighbours at every `step`-th index along `dim`, as a new last dim."""
    places = (value.shape[dim] - size) // step + 1
    shape = (*value.shape[:dim], places, *value.shape[dim + 1 :], size)

    def change(indices: Indices) -> Indices:
        *outer, inner = indices
        outer[dim] = outer[dim] * step + inner
        return tuple(outer)

    def restride(stored: Stored) -> Stored:
        strides = [*stored.strides, stored.strides[dim]]
        strides[dim] *= step
        return Stored(stored.buffer, tuple(strides), stored.offset)

    return _view(schedule, value, shape, change, restride)


def repeat(schedule: Schedule, value: Value, times: Sequence[int]) -> Value:
    """Tile the tensor `times[i]` times along dim i, with new dims in front."""
    own = (1,) * (len(times) - len(value.shape)) + value.shape
    apart = [one for size in own for one in (1, size)]
    spread = [one for pair in zip(times, own, strict=True) for one in pair]
    found = expand(schedule, reshape(schedule, value, apart), spread)
    return reshape(schedule, found, [n * size for n, size in zip(times, own, strict=True)])


def broadcast(indices: Indices, shape: Sequence[int]) -> Indices:
    """Convert indices into a broadcast tensor to indices into the tensor itself, of `shape`."""
    own = indices[len(indices) - len(shape) :]
    return tuple(Index(0) if size == 1 else one for one, size in zip(own, shape, strict=True))


def reshaped_strides(
    shape: Sequence[int], strides: Sequence[int], to: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the strides that reshape a strided tensor to `to` without a copy, or None.

    Neighbouring dims that one stride can step through are joined, then split again.
    """
    blocks: list[tuple[int, int]] = []  # (size, stride of its elements)
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == stride * size:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
    result: list[int] = []
    rest = 1  # the size that is cut off so far from the end of the last block
    for size in reversed(to):
        if size == 1:
            result.append(1)
            continue
        if not blocks or blocks[-1][0] % (rest * size):
            return None
        result.append(blocks[-1][1] * rest)
        rest *= size
        if rest == blocks[-1][0]:
            blocks.pop()
            rest = 1
    return tuple(reversed(result))


def _view(
    schedule: Schedule,
    value: Value,
    shape: Sequence[int],
    change: Change,
    restride: Restride,
    *,
    ordered: bool = False,
) -> Value:
    """Return a view of `value`. `ordered` says that the view has all elements, in order."""
    to = tuple(shape)
    keeps_product = value.product is not None and ordered
    keeps_rows = value.single and math.prod(to) == value.size
    if value.pending and not (keeps_product or keeps_rows):
        schedule.realise(value)
    if value.stored is not None:
        stored = restride(value.stored)
        if stored is not None:
            return stored_value(to, value.dtype, stored)
    view = _recipe(value, to, change)
    view.product = value.product
    view.rows = None if value.rows is None else len(to)
    view.view = (value, lambda base: _view(schedule, base, to, change, restride, ordered=ordered))
    return view


def stored_value(shape: tuple[int, ...], dtype: str, stored: Stored) -> Value:
    """Return a value for a tensor that is in memory already."""
    value = Value(shape, dtype, _never)
    value.store(stored)
    return value


def _never(emitter: Emitter, indices: Indices) -> str:
    raise AssertionError("a stored value is read from memory")


def _recipe(value: Value, shape: tuple[int, ...], change: Change) -> Value:
    recipe = value.read
    return Value(
        shape,
        value.dtype,
        lambda emitter, indices: recipe(emitter, change(indices)),
        value.reads,
        value.cost,
    )
