"""The tensors of a graph, stored or as recipes, and the kernels that store them.

A value that is not stored is a recipe: code that computes an element where it is needed. A recipe
that contains a reduction or a matrix product is *pending*: either all its users join its kernel, or
it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from entrenar_py.compute.wgpu import codegen
from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.emitter import Buffer, Coding, Emitter, Loop, coded_element
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.product import product_kernel
from entrenar_py.compute.wgpu.tiles import Layout, Limits, Product

Read = Callable[[Emitter, Indices], str]

CHEAP = 4  # up to this cost, each user of a value computes it again
COST_MAX = 120  # the largest cost of an element in one kernel
SERIAL_MAX = 32  # the longest loop that a thread runs alone
# A row kernel computes a row in one workgroup. It isn't used for few long rows.
FEW_ROWS, LONG_ROW = 64, 4096


@dataclass(frozen=True)
class Stored:
    """The memory of a tensor. Strides and offset are in elements.

    With a `coding`, elements are decoded where they are loaded.
    """

    buffer: Buffer
    strides: tuple[int, ...]
    offset: int = 0
    coding: Coding | None = None

    @property
    def tables(self) -> tuple[Buffer, ...]:
        """The buffers, besides its own, that are needed to decode an element."""
        return () if self.coding is None else self.coding.tables


@dataclass(eq=False)
class Operands:
    """The operands of a matrix product, [*batch, m, k] x [*batch, k, n]."""

    batch: tuple[int, ...]
    a: Value
    b: Value

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the result with all batch dims as one: (num_batches, m, n)."""
        return math.prod(self.batch), self.a.shape[-2], self.b.shape[-1]

    @property
    def num_tables(self) -> int:
        """The number of buffers that are needed to decode the operands, which are stored."""
        return sum(len(one.stored.tables) for one in (self.a, self.b) if one.stored is not None)


@dataclass(eq=False)
class Value:
    """A tensor. `read` emits the code that computes one element.

    `reads` are the buffers that this code loads, and `cost` is roughly its number of operations.
    `rows` is the number of leading dims on which pending reductions depend; None if there are none.
    `product` is the pending product, with elements in the order of this value. `view` is (the
    value that this is a view of, the function that makes the view).
    """

    shape: tuple[int, ...]
    dtype: str
    read: Read
    reads: frozenset[Buffer] = frozenset()
    cost: int = 0
    rows: int | None = None
    product: Operands | None = None
    stored: Stored | None = None
    view: tuple[Value, Callable[[Value], Value]] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def pending(self) -> bool:
        """True if a reduction or a product is part of the recipe."""
        return self.rows is not None or self.product is not None

    @property
    def single(self) -> bool:
        """True if each pending reduction serves only one element."""
        return self.rows is not None and math.prod(self.shape[self.rows :]) == 1

    def store(self, stored: Stored) -> None:
        """Turn this into a stored value; its elements are loaded from memory."""

        def read(emitter: Emitter, indices: Indices) -> str:
            position = at.place(indices, stored.strides, stored.offset)
            if stored.coding is not None:
                return coded_element(emitter, stored.buffer, stored.coding, position)
            return emitter.load(stored.buffer, position)

        self.stored, self.read = stored, read
        self.reads = frozenset({stored.buffer, *stored.tables})
        self.cost, self.rows, self.product = 1, None, None


@dataclass(frozen=True)
class Step:
    """One dispatch. Binding i is `bindings[i]`, and only `writes` is written to."""

    source: str
    workgroups: tuple[int, int, int]
    bindings: tuple[Buffer, ...]
    writes: Buffer
    line: str


@dataclass
class Schedule:
    """The dispatches so far, in order. `line` is the model's source line being lowered."""

    limits: Limits
    bindings_max: int
    steps: list[Step] = field(default_factory=list)
    line: str = ""
    _count: int = 0

    def buffer(self, dtype: str, size: int) -> Buffer:
        """Return a new buffer of `size` elements."""
        self._count += 1
        return Buffer(f"buffer{self._count}", dtype, size)

    def realise(self, value: Value) -> Value:
        """Return `value`, stored in C order unless it is already stored in any order."""
        if value.stored is None:
            self._write(value)
        return value

    def strided(self, value: Value) -> Stored:
        """Return the memory of `value`, with any strides; stores it, or the value that it views."""
        if value.stored is None and value.view is not None:
            base, again = value.view
            if base.size <= value.size:
                self.strided(base)
                viewed = again(base)
                if viewed.stored is not None:
                    value.store(viewed.stored)
        self.realise(value)
        assert value.stored is not None
        return value.stored

    def contiguous(self, value: Value) -> Stored:
        """Return the memory of `value`, stored in C order at any offset."""
        stored = self.strided(value)
        if is_contiguous(value.shape, stored.strides) and stored.coding is None:
            return stored
        return self.strided(self.copy(value))

    def copy(self, value: Value) -> Value:
        """Return a copy of `value`, stored in C order in a buffer of its own."""
        return self.realise(replace(value, stored=None, view=None))

    def make_room(self, values: Sequence[Value], cost: int) -> None:
        """Store values, those that read most buffers first, until the rest fits into one kernel."""
        products = [value.product for value in values if value.product is not None]
        taken = [3 + value.num_tables for value in products]
        room = self.bindings_max - max(taken, default=1)
        while True:
            reads = frozenset[Buffer]().union(*(value.reads for value in values))
            total = cost + sum(value.cost for value in values)
            recipes = [value for value in values if value.stored is None and value.reads]
            if (len(reads) <= room and total <= COST_MAX) or not recipes:
                return
            self.realise(max(recipes, key=lambda value: (len(value.reads), value.cost)))

    def _write(self, value: Value) -> None:
        out = self.buffer(value.dtype, value.size)
        if value.product is not None:
            self._multiply(value, value.product, out)
        else:
            self._loop(value, out)
        value.store(Stored(out, at.strides_of(value.shape)))

    def _loop(self, value: Value, out: Buffer) -> None:
        split = len(value.shape) if value.rows is None else value.rows
        rows, columns = value.shape[:split], value.shape[split:]
        emitter = Emitter(rows)
        element = ""
        if math.prod(columns) == 1:
            element = value.read(emitter, emitter.variables + (Index(0),) * len(columns))
        else:
            emitter.columns(columns, lambda inner: value.read(emitter, emitter.variables + inner))
        loops = [item.size for item in emitter.body if isinstance(item, Loop)]
        write = codegen.row_kernel if max(loops, default=0) > SERIAL_MAX else codegen.thread_kernel
        self.add(write(emitter, element, out, workgroups_max=self.limits.workgroups_max))

    def add(self, shader: codegen.Shader) -> None:
        """Add a dispatch that writes to the last of the shader's buffers."""
        self.steps.append(
            Step(shader.source, shader.workgroups, shader.buffers, shader.buffers[-1], self.line)
        )

    def _multiply(self, value: Value, operands: Operands, out: Buffer) -> None:
        a, b = self.strided(operands.a), self.strided(operands.b)
        _, m, n = operands.shape
        product = Product(
            batch=operands.batch,
            m=m,
            k=operands.a.shape[-1],
            n=n,
            a=_layout(a, operands.a.shape, operands.batch),
            b=_layout(b, operands.b.shape, operands.batch),
            c=Layout(
                batch=tuple(one * m * n for one in at.strides_of(operands.batch)), row=n, column=1
            ),
        )
        emitter = Emitter(operands.shape, product=operands)
        position = at.place(emitter.variables, at.strides_of(operands.shape))
        element = value.read(emitter, at.unravel(position, value.shape))
        tables = product.tables
        finish = codegen.epilogue(emitter, element, 3 + len(tables)) if element != "acc" else ""
        kernel = product_kernel(product, self.limits, epilogue=finish)
        bindings = (a.buffer, b.buffer, out, *tables, *emitter.buffers)
        self.steps.append(Step(kernel.source, kernel.workgroups, bindings, out, self.line))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements are in C order without gaps. Ignores strides of dims of size 1."""
    expected = at.strides_of(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, expected, strict=True))


def join_rows(shape: tuple[int, ...], values: Iterable[Value]) -> int | None:
    """Return the `rows` of a value of `shape` that is computed from `values`, or None.

    The result is None if their rows differ, if a row would be computed twice, or if no reduction is
    pending.
    """
    common: int | None = None
    for value in values:
        if value.rows is None:
            continue
        rows = _rows_within(shape, value)
        if rows is None:
            return None
        if common is None:
            common = rows
        elif math.prod(shape[:rows]) != math.prod(shape[:common]):
            return None
        common = max(common, rows)
    return common


def _rows_within(shape: tuple[int, ...], value: Value) -> int | None:
    assert value.rows is not None
    own = (1,) * (len(shape) - len(value.shape)) + value.shape
    rows = value.rows + len(shape) - len(value.shape)
    if own == shape:
        return rows
    if not value.single:
        return None
    last = max((dim for dim, size in enumerate(own) if size > 1), default=-1) + 1
    if own[:last] != shape[:last]:
        return None
    num_rows, columns = math.prod(shape[:last]), math.prod(shape[last:])
    return None if num_rows < FEW_ROWS and columns > LONG_ROW else last


def _layout(stored: Stored, shape: Sequence[int], batch: tuple[int, ...]) -> Layout:
    strides = stored.strides
    own = strides[:-2] if len(shape) > 2 else (0,) * len(batch)
    return Layout(
        offset=stored.offset, batch=own, row=strides[-2], column=strides[-1], coding=stored.coding
    )


Change = Callable[[Indices], Indices]  # indices into the view -> into the value that it views
Restride = Callable[[Stored], Stored | None]


def reshape(schedule: Schedule, value: Value, shape: Sequence[int]) -> Value:
    """Return `value` reshaped in C order. One size may be -1."""
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
        *(schedule, value, to, lambda indices: at.reshape(indices, to, own), restride), ordered=True
    )


def permute(schedule: Schedule, value: Value, dims: Sequence[int]) -> Value:
    """Return a view with permuted dims: dim i of the view is dim `dims[i]` of the value."""
    order = [dim % len(value.shape) for dim in dims]
    if order == list(range(len(order))):
        return value

    def change(indices: Indices) -> Indices:
        return tuple(indices[order.index(dim)] for dim in range(len(order)))

    def restride(stored: Stored) -> Stored:
        return replace(stored, strides=tuple(stored.strides[dim] for dim in order))

    return _view(schedule, value, [value.shape[dim] for dim in order], change, restride)


def expand(schedule: Schedule, value: Value, shape: Sequence[int]) -> Value:
    """Return `value` repeated along dims of size 1 and new leading dims; size -1 keeps the dim."""
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
    """Return a view of `size` indices along `dim`: `start`, `start + step`, and so on."""
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
    """Return `size` neighbours at every `step`-th index along `dim`, as a new last dim."""
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
    """Return the tensor tiled `times[i]` times along dim i, with new dims in front."""
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
    rest = 1  # size consumed so far from the end of the last block
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
    """Return a value for a tensor that is already in memory."""
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
