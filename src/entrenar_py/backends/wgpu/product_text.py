"""The WGSL of one matrix product: every size, stride and loop of the innermost part written out.

Each kernel has this shape. A workgroup makes one tile of c. Along k, it copies a tile of a and one
of b to workgroup memory, both with k outermost (so a is transposed on its way if it lies row by
row); while the next ones are on their way to registers, each thread reads four elements at a time
and adds outer products to its own sums. Nothing that lies in registers is indexed by a variable,
and the innermost reads of workgroup memory have one variable index, the same for all k: naga's
clamp of it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from entrenar_py.backends.wgpu.product import Layout, Product, Tiling

RASTER = 8  # rows of tiles in a band
PADDING = 4  # floats after each row of a tile, so that transposed writes meet different banks
LANES = "xyzw"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One operand as the tiles see it: `outer` is m or n, with its size, tile and strides.

    A load moves `width` elements, along k if `along_k`, else along the outer dimension. With
    `scalars` its tile is one of numbers, not of vectors: see `Limits.component_writes`.
    """

    name: str
    size: int
    depth: int
    tile: int
    tile_k: int
    step: int
    step_k: int
    width: int
    along_k: bool
    num_threads: int
    split: int
    scalars: bool

    @property
    def whole_vectors(self) -> bool:
        """True if a load is four neighbours in the tile."""
        return self.width == 4 and not self.along_k

    @property
    def num_loads(self) -> int:
        """Loads of one tile, by all threads."""
        return self.tile * self.tile_k // self.width

    @property
    def loads(self) -> range:
        """Loads of one tile, by one thread."""
        return range(-(-self.num_loads // self.num_threads))

    @property
    def type(self) -> str:
        """WGSL type of what a load moves."""
        return "vec4<f32>" if self.width == 4 else "f32"

    @property
    def partial(self) -> bool:
        """True if not every thread has something to load in the last round."""
        return self.num_loads % self.num_threads != 0

    def place(self, k: str) -> str:
        """The row of the tile that holds depth k."""
        if self.split == 1:
            return f"[{k}]"
        return f"[({k}) / {self.split}u][({k}) % {self.split}u]"


def write(
    product: Product,
    tiling: Tiling,
    workgroups: tuple[int, int, int],
    epilogue: str,
    *,
    component_writes: bool,
) -> str:
    """The shader. `workgroups` is the dispatch it is written for."""
    a, b = (_safe(side, component_writes) for side in _sides(product, tiling))
    vector_c = _is_vector(product.c, product.c.column, product.c.row, product.n)
    parts = [
        _header(product, tiling, a, b, vector_c),
        epilogue or "fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32 { return acc; }",
        f"@compute @workgroup_size({tiling.num_threads})",
        "fn main(",
        "    @builtin(workgroup_id) group_id: vec3<u32>,",
        "    @builtin(local_invocation_index) thread: u32,",
        ") {",
        *_indented(_place(product, tiling, workgroups)),
        *_indented(_starts(product, a, "row_0", product.a)),
        *_indented(_starts(product, b, "column_0", product.b)),
        *_indented(_sums(tiling)),
        *_indented(_main_loop(tiling, a, b)),
        *_indented(_tree(tiling)),
        *_indented(_results(product, tiling, vector_c)),
        "}",
    ]
    return "\n".join(parts) + "\n"


def _sides(product: Product, tiling: Tiling) -> tuple[Side, Side]:
    a = _side(product, tiling, "a", product.a, product.m, tiling.m)
    b = _side(product, tiling, "b", product.b.transposed(), product.n, tiling.n)
    return a, b


def _safe(side: Side, component_writes: bool) -> Side:
    """`side` with a tile that its threads may write to at once."""
    return replace(side, scalars=not (component_writes or side.whole_vectors))


def _side(
    product: Product, tiling: Tiling, name: str, layout: Layout, size: int, tile: int
) -> Side:
    """`layout` has k as its columns."""
    step, step_k = layout.row, layout.column
    along_k = step_k < step
    edge = (step_k, step, product.k) if along_k else (step, step_k, size)
    return Side(
        name=name,
        size=size,
        depth=product.k,
        tile=tile,
        tile_k=tiling.k,
        step=step,
        step_k=step_k,
        width=4 if _is_vector(layout, *edge) else 1,
        along_k=along_k,
        num_threads=tiling.num_threads,
        split=tiling.split,
        scalars=False,
    )


def _is_vector(layout: Layout, along: int, across: int, size: int) -> bool:
    """True if every four neighbours are 16 aligned bytes, and none reaches past the end."""
    steps = (layout.offset, *layout.batch, across, size)
    return along == 1 and all(step % 4 == 0 for step in steps)


def _header(product: Product, tiling: Tiling, a: Side, b: Side, vector_c: bool) -> str:
    c_type = "vec4<f32>" if vector_c else "f32"
    lines = [
        f"// c = a @ b, float32: {list(product.batch)} of [{product.m}, {product.k}] x "
        f"[{product.k}, {product.n}]; {tiling}",
        "//   group 0, binding 0   a   storage, read",
        "//   group 0, binding 1   b   storage, read",
        "//   group 0, binding 2   c   storage, read_write",
        f"// Workgroup size {tiling.num_threads}; one workgroup for each tile of c.",
        f"@group(0) @binding(0) var<storage, read> a: array<{a.type}>;",
        f"@group(0) @binding(1) var<storage, read> b: array<{b.type}>;",
        f"@group(0) @binding(2) var<storage, read_write> c: array<{c_type}>;",
    ]
    for side in (a, b):
        length = side.tile + PADDING
        row = f"array<f32, {length}>" if side.scalars else f"array<vec4<f32>, {length // 4}>"
        if tiling.split > 1:
            row = f"array<{row}, {tiling.split}>"
        lines += [
            f"var<workgroup> {side.name}_tile_{copy}: array<{row}, {side.tile_k // tiling.split}>;"
            for copy in _copies(tiling, product.k)
        ]
    if tiling.split > 1:
        size = tiling.split // 2 * tiling.group
        num_sums = tiling.thread_m * tiling.thread_n // 4
        lines.append(f"var<workgroup> partial: array<array<vec4<f32>, {size}>, {num_sums}>;")
    return "\n".join(lines)


def _copies(tiling: Tiling, depth: int) -> range:
    """Copies of the tiles in workgroup memory: one is enough where k is a single tile."""
    return range(2 if tiling.double and depth > tiling.k else 1)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return ("    " + line for line in lines)


def _place(product: Product, tiling: Tiling, workgroups: tuple[int, int, int]) -> Iterator[str]:
    """Which tile this workgroup makes, and which part of it this thread.

    Tiles are walked in columns of RASTER rows, so that workgroups that run together read few
    different rows and columns.
    """
    rows, columns = -(-product.m // tiling.m), -(-product.n // tiling.n)
    total, (x, y, _) = tiling.num_tiles(product), workgroups
    yield f"let flat = group_id.x + {x}u * (group_id.y + {y}u * group_id.z);"
    if prod(workgroups) != total:
        yield f"if (flat >= {total}u) {{ return; }}"
    yield f"let batch = flat / {rows * columns}u;"
    yield f"let tile = flat % {rows * columns}u;"
    band = RASTER * columns
    yield f"let band_row = tile / {band}u * {RASTER}u;"
    yield f"let band_rows = min({rows}u - band_row, {RASTER}u);"
    yield f"let row_0 = (band_row + tile % {band}u % band_rows) * {tiling.m}u;"
    yield f"let column_0 = (tile % {band}u / band_rows) * {tiling.n}u;"
    across, down = tiling.n // tiling.thread_n, tiling.m // tiling.thread_m
    yield f"let part = thread % {tiling.group}u;"
    yield f"let share = thread / {tiling.group}u;"
    if across % 8 == 0 and down % 4 == 0:
        # 32 neighbouring threads as 4 x 8: they read the fewest different elements.
        yield f"let x = part / 32u % {across // 8}u * 8u + part % 8u;"
        yield f"let y = part / {across * 4}u * 4u + part / 8u % 4u;"
    else:
        yield f"let x = part % {across}u;"
        yield f"let y = part / {across}u;"


def _starts(product: Product, side: Side, first: str, layout: Layout) -> Iterator[str]:
    """Where each of a thread's loads begins in its buffer (in loads), and where it goes."""
    name, width = side.name, side.width
    outer_width, k_width = (1, width) if side.along_k else (width, 1)
    across = (side.tile_k if side.along_k else side.tile) // width
    yield f"let {name}_0 = {_batch_start(product, layout)};"
    for i in side.loads:
        yield f"let {name}_load_{i} = thread + {i * side.num_threads}u;"
        inner, outer = f"{name}_load_{i} % {across}u", f"{name}_load_{i} / {across}u"
        if not side.along_k:
            inner, outer = outer, inner
        yield f"let {name}_k_{i} = {inner}{f' * {k_width}u' if k_width > 1 else ''};"
        yield f"let {name}_t_{i} = {outer}{f' * {outer_width}u' if outer_width > 1 else ''};"
        # Rows past a ragged edge are read like others, from wherever that is: WebGPU keeps a read
        # within its binding, and sums of theirs are not stored.
        at = f"{first} + {name}_t_{i}"
        start = f"{name}_0 + ({at}) * {side.step}u + {name}_k_{i} * {side.step_k}u"
        yield f"let {name}_at_{i} = ({start}) / {width}u;"
        yield f"var {name}_next_{i}: {side.type};"


def _batch_start(product: Product, layout: Layout) -> str:
    terms, inner = [f"{layout.offset}u"], product.num_batches
    for i, (size, step) in enumerate(zip(product.batch, layout.batch, strict=True)):
        inner //= size
        wrapped = f" % {size}u" if i else ""
        if step:
            terms.append(f"batch / {inner}u{wrapped} * {step}u")
    return " + ".join(terms)


def _load(side: Side, tile: str) -> Iterator[str]:
    """Reads a tile's elements to registers; past the end of k, zeros."""
    for i in side.loads:
        name = f"{side.name}_next_{i}"
        at = f"{side.name}_at_{i} + {tile} * {side.tile_k * side.step_k // side.width}u"
        assert side.tile_k * side.step_k % side.width == 0, side  # a tile begins at a load
        inside = []
        if side.depth % side.tile_k:
            inside.append(f"{tile} * {side.tile_k}u + {side.name}_k_{i} < {side.depth}u")
        if side.partial and i == side.loads[-1]:
            inside.append(f"{side.name}_load_{i} < {side.num_loads}u")
        if inside:
            yield f"{name} = {side.type}();"
            yield f"if ({' && '.join(inside)}) {{ {name} = {side.name}[{at}]; }}"
        else:
            yield f"{name} = {side.name}[{at}];"


def _store(side: Side, copy: int) -> Iterator[str]:
    """Writes what `_load` read to the tile, with k outermost."""
    tile = f"{side.name}_tile_{copy}"
    for i in side.loads:
        value, k, t = (f"{side.name}_{part}_{i}" for part in ("next", "k", "t"))
        if side.whole_vectors:
            stores = [f"{tile}{side.place(k)}[{t} / 4u] = {value};"]
        else:
            parts = [f"{value}.{lane}" for lane in LANES] if side.width == 4 else [value]
            at = f"[{t}]" if side.scalars else f"[{t} / 4u][{t} % 4u]"
            stores = [
                f"{tile}{side.place(f'{k} + {j}u')}{at} = {part};" for j, part in enumerate(parts)
            ]
        guard = side.partial and i == side.loads[-1]
        if guard:
            yield f"if ({side.name}_load_{i} < {side.num_loads}u) {{"
        yield from stores
        if guard:
            yield "}"


def _sums(tiling: Tiling) -> Iterator[str]:
    for i in range(tiling.thread_m):
        for j in range(tiling.thread_n // 4):
            yield f"var sum_{i}_{j} = vec4<f32>();"


def _main_loop(tiling: Tiling, a: Side, b: Side) -> Iterator[str]:
    """With two copies of the tiles, one is read while the other is written: one barrier less."""
    num_tiles, copies = -(-a.depth // a.tile_k), _copies(tiling, a.depth)
    for side in (a, b):
        yield from _load(side, "0u")
        yield from _store(side, 0)
    yield "workgroupBarrier();"
    yield f"for (var tile_k = 0u; tile_k < {num_tiles}u; tile_k += {len(copies)}u) {{"
    for copy in copies:
        if copy and num_tiles % 2:
            yield f"if (tile_k + 1u == {num_tiles}u) {{ break; }}"
        following = f"(tile_k + {copy + 1}u)"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from _load(side, following)
        yield "}"
        for index in range(tiling.k // tiling.split):
            yield from _outer_product(tiling, (a, b), copy, index)
        if len(copies) == 1:
            yield "workgroupBarrier();"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from _store(side, (copy + 1) % len(copies))
        yield "}"
        yield "workgroupBarrier();"
    yield "}"


def _outer_product(
    tiling: Tiling, sides: tuple[Side, Side], copy: int, index: int
) -> Iterator[str]:
    """Adds a column of a's tile times a row of b's to the sums."""
    down, across = tiling.m // tiling.thread_m, tiling.n // tiling.thread_n
    share = "[share]" if tiling.split > 1 else ""
    yield "{"
    counts = ((sides[0], tiling.thread_m, "y", down), (sides[1], tiling.thread_n, "x", across))
    for side, length, first, stride in counts:
        row = f"{side.name}_tile_{copy}[{index}]{share}"
        for i in range(length // 4):
            four = _four(row, f"{first} + {i * stride}u", scalars=side.scalars)
            yield f"let {side.name}_{i} = {four};"
    for i in range(tiling.thread_m):
        for j in range(tiling.thread_n // 4):
            factor, total = f"vec4<f32>(a_{i // 4}.{LANES[i % 4]})", f"sum_{i}_{j}"
            yield f"{total} = fma({factor}, b_{j}, {total});"
    yield "}"


def _four(row: str, at: str, *, scalars: bool) -> str:
    """The vector at `at` of a row of a tile."""
    if not scalars:
        return f"{row}[{at}]"
    return f"vec4<f32>({', '.join(f'{row}[({at}) * 4u + {lane}u]' for lane in range(4))})"


def _tree(tiling: Tiling) -> Iterator[str]:
    """Adds up the sums of all shares, halving their number each time: always in the same order."""
    names = [f"sum_{i}_{j}" for i in range(tiling.thread_m) for j in range(tiling.thread_n // 4)]
    half = tiling.split // 2
    while half:
        yield f"if (share >= {half}u && share < {2 * half}u) {{"
        for i, name in enumerate(names):
            yield f"partial[{i}][thread - {half * tiling.group}u] = {name};"
        yield "}"
        yield "workgroupBarrier();"
        yield f"if (share < {half}u) {{"
        for i, name in enumerate(names):
            yield f"{name} += partial[{i}][thread];"
        yield "}"
        half //= 2
        if half:
            yield "workgroupBarrier();"


def _results(product: Product, tiling: Tiling, vector: bool) -> Iterator[str]:
    down, across = tiling.m // tiling.thread_m, tiling.n // tiling.thread_n
    c = product.c
    if tiling.split > 1:
        yield "if (share != 0u) { return; }"
    yield f"let c_0 = {_batch_start(product, c)};"
    for i in range(tiling.thread_m):
        yield "{"
        yield f"let m = row_0 + (y + {i // 4 * down}u) * 4u + {i % 4}u;"
        if product.m % tiling.m:
            yield f"if (m < {product.m}u) {{"
        for j in range(tiling.thread_n // 4):
            yield "{"
            yield f"let n = column_0 + (x + {j * across}u) * 4u;"
            yield f"let at = c_0 + m * {c.row}u + n * {c.column}u;"
            done = [
                f"finish(sum_{i}_{j}.{LANES[lane]}, batch, m, n + {lane}u)" for lane in range(4)
            ]
            if vector:
                inside = f"if (n < {product.n}u) " if product.n % tiling.n else ""
                yield f"{inside}{{ c[at / 4u] = vec4<f32>({', '.join(done)}); }}"
            else:
                for lane, value in enumerate(done):
                    inside = f"if (n + {lane}u < {product.n}u) " if product.n % tiling.n else ""
                    yield f"{inside}{{ c[at + {lane * c.column}u] = {value}; }}"
            yield "}"
        if product.m % tiling.m:
            yield "}"
        yield "}"
