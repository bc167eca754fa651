"""Operations that look up, join or scatter: from their own arguments to what `lookups` makes.

As in `operations`: (schedule, node, the operation's arguments) -> value, None if no kernel serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.fx import Node

from entrenar_py.backends.wgpu import lookups, pointwise, row_sums, views
from entrenar_py.backends.wgpu.nodes import dtype_of, name_of, shape_of
from entrenar_py.backends.wgpu.values import Schedule, Value


def embedding(schedule: Schedule, node: Node, table: Value, ids: Value, *_: Any) -> Value:
    return lookups.look_up(schedule, table, {0: ids}, shape_of(node), 0)


def index_select(schedule: Schedule, node: Node, x: Value, dim: int, ids: Value) -> Value:
    dim %= len(x.shape)
    return lookups.look_up(schedule, x, {dim: ids}, shape_of(node), dim)


def index(schedule: Schedule, node: Node, x: Value, indices: list[Value | None]) -> Value | None:
    given = {dim: one for dim, one in enumerate(indices) if one is not None}
    if any(one.dtype == "bool" for one in given.values()):
        return None  # how many elements there are is known only when it runs
    dims = sorted(given)
    together = dims == list(range(dims[0], dims[-1] + 1))
    common = np.broadcast_shapes(*(one.shape for one in given.values()))
    spread = {dim: views.expand(schedule, one, common) for dim, one in given.items()}
    first = dims[0] if together else 0
    return lookups.look_up(schedule, x, spread, shape_of(node), first, wraps=True)


def gather(schedule: Schedule, node: Node, x: Value, dim: int, ids: Value, **_: Any) -> Value:
    return lookups.gather(schedule, x, dim, ids)


def index_put(
    schedule: Schedule,
    node: Node,
    x: Value,
    indices: list[Value | None],
    rows: Value,
    accumulate: bool = False,
    *_: Any,
) -> Value | None:
    given = [one for one in indices if one is not None]
    known = len(given) == len(indices) and all(one.dtype == "i32" for one in given)
    if not (accumulate and known and x.dtype == "f32"):
        return None
    ids = lookups.flatten_index(schedule, x.shape[: len(given)], given)
    width = math.prod(x.shape[len(given) :])
    whole = views.reshape(schedule, x, [x.size // width, width])
    looked = np.broadcast_shapes(*(one.shape for one in given))
    added = views.expand(schedule, rows, (*looked, *x.shape[len(given) :]))
    added = views.reshape(schedule, added, [ids.size, width])
    return views.reshape(schedule, row_sums.add_rows(schedule, whole, ids, added), x.shape)


def scatter(
    schedule: Schedule, node: Node, x: Value, dim: int, ids: Value, source: Any, **kwargs: Any
) -> Value | None:
    if kwargs:
        return None  # a reduction that is not a sum
    if isinstance(source, Value):
        for d, size in enumerate(ids.shape):
            source = views.take(schedule, source, d, 0, size, 1)
    else:
        source = pointwise.constant(source, x.dtype, ids.shape)
    dim %= max(1, len(x.shape))
    # Where the index is shorter than what it points into, it points nowhere.
    short = [0 if d == dim else size - ids.shape[d] for d, size in enumerate(x.shape)]
    widths = [width for one in reversed(short) for width in (0, one)]
    ids, source = (lookups.pad(schedule, one, widths, -1) for one in (ids, source))
    return lookups.scatter(schedule, x, dim, ids, source, add=name_of(node) == "scatter_add")


def cat(schedule: Schedule, node: Node, values: list[Value], dim: int = 0) -> Value:
    dtype = dtype_of(node)
    return lookups.join(schedule, [pointwise.cast(schedule, one, dtype) for one in values], dim)


def pad(schedule: Schedule, node: Node, x: Value, widths: Sequence[int], value: Any = 0) -> Value:
    return lookups.pad(schedule, x, widths, value)


def slice_scatter(
    schedule: Schedule,
    node: Node,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim %= len(x.shape)
    first, _, _ = slice(start, end, step).indices(x.shape[dim])
    return lookups.overlay(schedule, x, source, dim, first, step)
