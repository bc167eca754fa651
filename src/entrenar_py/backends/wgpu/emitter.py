"""One kernel's WGSL while it is written: each value once, and as far outside of loops as it can be.

Decides nothing about what is computed: whoever reads a tensor element asks here for loads,
operations and sums, and gets the name of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from entrenar_py.backends.wgpu import index as at
from entrenar_py.backends.wgpu.index import ROW, Atom, Index

STORAGE = {"f32": "f32", "i32": "i32", "bool": "u32"}  # WGSL has no bool in buffers
ELEMENT_BYTES = 4


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of a tensor that lies there whole, in C order; `size` in elements, at least 1."""

    name: str
    dtype: str
    size: int

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return self.size * ELEMENT_BYTES


@dataclass(frozen=True)
class Statement:
    """`let name = template`, `{0}` and so on standing for names, `{i0}` for indices."""

    name: str
    template: str
    names: tuple[str, ...]
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class Fold:
    """A reduction that a kernel makes: `combine` is WGSL with `{0}` and `{1}`, from `start` on."""

    combine: str
    start: str
    dtype: str


@dataclass
class Loop:
    """A loop over `size` elements: its variable, what it holds, and what it adds up or writes."""

    number: int
    size: int
    shape: tuple[int, ...]
    body: list[Statement] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)
    fold: Fold | None = None
    value: str = ""
    total: str = ""

    def variables(self) -> at.Indices:
        """One index for each dim of `shape`."""
        return tuple(
            at.variable(f"v{self.number}_{dim}", size, self.number)
            for dim, size in enumerate(self.shape)
        )


class Emitter:
    """A kernel over rows: `rows` is the shape of what each thread or workgroup makes one of.

    `product` is the value that a product kernel's epilogue calls `acc`, if this is one.
    """

    def __init__(self, rows: Sequence[int], *, product: object = None) -> None:
        self.rows = tuple(rows)
        self.variables = tuple(at.variable(f"r{dim}", size) for dim, size in enumerate(self.rows))
        self.product = product
        self.buffers: dict[Buffer, str] = {}
        self.body: list[Statement | Loop] = []
        self._memo: dict[object, str] = {}
        self._levels: dict[str, int] = {}
        self._loops: list[Loop] = []
        self._count = 0
        self._num_loops = 0

    # ---- what expressions ask for

    def load(self, buffer: Buffer, index: Index) -> str:
        """The element of `buffer` at `index`."""
        slot = self.buffers.setdefault(buffer, f"in{len(self.buffers)}")
        text = f"{slot}[{{i0}}]"
        return self._let(f"{text} != 0u" if buffer.dtype == "bool" else text, (), (index,))

    def op(self, template: str, *names: str) -> str:
        """A value computed from others; literals are names, too."""
        return self._let(template, names, ())

    def number(self, index: Index, dtype: str) -> str:
        """An index as a value of `dtype`."""
        return self._let(f"{dtype}({{i0}})", (), (index,))

    def position(self, name: str, size: int) -> Index:
        """The i32 value `name`, which is in `range(size)`, as an index."""
        if size == 1:
            return Index(0)
        return Index(0, ((Atom(name, size, self._levels.get(name, ROW)), 1),))

    def reduce(
        self, key: object, fold: Fold, shape: Sequence[int], body: Callable[[at.Indices], str]
    ) -> str:
        """`fold` of `body` over all indices of `shape`, in C order on one thread."""
        if key in self._memo:
            return self._memo[key]
        loop = self._open(shape)
        loop.fold, loop.value = fold, body(loop.variables())
        loop.total = self._memo[key] = f"s{loop.number}"
        self._close(loop)
        return loop.total

    def columns(self, shape: Sequence[int], body: Callable[[at.Indices], str]) -> None:
        """Writes `body` for each index of `shape`, which lie one after the other."""
        loop = self._open(shape)
        loop.value = body(loop.variables())
        self._close(loop)

    # ---- bookkeeping

    def _open(self, shape: Sequence[int]) -> Loop:
        self._num_loops += 1
        loop = Loop(self._num_loops, math.prod(shape), tuple(shape))
        self._loops.append(loop)
        return loop

    def _close(self, loop: Loop) -> None:
        closed = self._loops.pop()
        assert closed is loop, "loops close in the reverse of the order they open in"
        self.body.append(loop)

    def _let(self, template: str, names: tuple[str, ...], indices: tuple[Index, ...]) -> str:
        levels = [self._levels.get(name, ROW) for name in names]
        levels += [index.level for index in indices]
        level = at.join(levels)
        loop = self._loop(level)
        memo, body = (self._memo, self.body) if loop is None else (loop.memo, loop.body)
        key = (template, names, indices)
        if key not in memo:
            self._count += 1
            name = memo[key] = f"t{self._count}"
            self._levels[name] = level
            body.append(Statement(name, template, names, indices))
        return memo[key]

    def _loop(self, level: int) -> Loop | None:
        if level == ROW:
            return None
        assert self._loops, "a value of a loop is used outside of it"
        loop = self._loops[-1]
        assert loop.number == level, "a value of one loop is used in another"
        return loop
