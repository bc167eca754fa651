"""The kernel of a float32 matrix product, and the checks of its sizes and strides.

`tiles` chooses the tiling, and `write` returns the WGSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from entrenar_py.compute.nf4 import BLOCK
from entrenar_py.compute.wgpu import codegen, emitter, tiles
from entrenar_py.compute.wgpu.emitter import LEVELS_BYTES, NF4
from entrenar_py.compute.wgpu.tiles import PADDING, Layout, Limits, Product, Tiling, describe
from entrenar_py.shared.errors import BackendUnavailable, UsageError

LANES = "xyzw"
WIDTH, WIDTH_CODED = 4, 8  # elements of a wide load


@dataclass(frozen=True, kw_only=True)
class Side:
    """One operand of a product, with k as one dimension and m or n as the outer dimension.

    The tile's size and the operand's stride are `tile_k` and `step_k` along k, `tile` and `step`
    along the outer dimension. A load moves `width` elements, along k if `along_k`, else along the
    outer dimension: all of them are within the matrix. `kind` is the kind of the layout's coding.
    `component_writes` is as in `Limits`.
    """

    name: str
    kind: str
    depth: int
    tile: int
    tile_k: int
    step: int
    step_k: int
    width: int
    along_k: bool
    num_threads: int
    split: int
    component_writes: bool

    @property
    def whole_vectors(self) -> bool:
        """True if the elements of a load are adjacent in the tile, too."""
        return self.width > 1 and not self.along_k

    @property
    def scalars(self) -> bool:
        """True if the tile's elements are f32, not vec4: threads may then write single elements."""
        return not (self.component_writes or self.whole_vectors)

    @property
    def num_loads(self) -> int:
        """The number of loads for one tile, by all threads."""
        return self.tile * self.tile_k // self.width

    @property
    def loads(self) -> range:
        """The indices of one thread's loads for one tile."""
        return range(-(-self.num_loads // self.num_threads))

    @property
    def type(self) -> str:
        """The WGSL type of a load, and of the buffer's elements."""
        if self.kind == "f32":
            return "vec4<f32>" if self.width == 4 else "f32"
        return "vec4<u32>" if self.width == WIDTH_CODED and self.kind != NF4 else "u32"

    @property
    def partial(self) -> bool:
        """True if some threads have nothing to load in the last round."""
        return self.num_loads % self.num_threads != 0

    def place(self, k: str) -> str:
        """Return the subscript of the tile's row for depth `k`."""
        if self.split == 1:
            return f"[{k}]"
        return f"[({k}) / {self.split}u][({k}) % {self.split}u]"


def sides(product: Product, tiling: Tiling, *, component_writes: bool) -> tuple[Side, Side]:
    """Return the operands a and b."""

    def side(name: str, layout: Layout, size: int, tile: int) -> Side:
        """Return the operand with this `layout`; its columns are along k."""
        step, step_k = layout.row, layout.column
        along_k = step_k < step
        edge = (step_k, step, product.k) if along_k else (step, step_k, size)
        width = WIDTH if layout.coding is None else WIDTH_CODED
        whole = (tiling.k if along_k else tile) % width == 0
        return Side(
            name=name,
            kind=layout.kind,
            depth=product.k,
            tile=tile,
            tile_k=tiling.k,
            step=step,
            step_k=step_k,
            width=width if whole and is_vector(layout, *edge, width=width) else 1,
            along_k=along_k,
            num_threads=tiling.num_threads,
            split=tiling.split,
            component_writes=component_writes,
        )

    a = side("a", product.a, product.m, tiling.m)
    return a, side("b", product.b.transposed(), product.n, tiling.n)


def is_vector(layout: Layout, along: int, across: int, size: int, *, width: int = WIDTH) -> bool:
    """Return whether loads of `width` elements are aligned and end within the matrix."""
    steps = (layout.offset, *layout.batch, across, size)
    return along == 1 and all(step % width == 0 for step in steps)


def starts(product: Product, side: Side, first: str, layout: Layout) -> Iterator[str]:
    """Write the code that computes the places of a thread's loads in the buffer and the tile."""
    name, width = side.name, side.width
    outer_width, k_width = (1, width) if side.along_k else (width, 1)
    across = (side.tile_k if side.along_k else side.tile) // width
    yield f"let {name}_0 = {batch_start(product, layout)};"
    for i in side.loads:
        yield f"let {name}_load_{i} = thread + {i * side.num_threads}u;"
        inner, outer = f"{name}_load_{i} % {across}u", f"{name}_load_{i} / {across}u"
        if not side.along_k:
            inner, outer = outer, inner
        yield f"let {name}_k_{i} = {inner}{f' * {k_width}u' if k_width > 1 else ''};"
        yield f"let {name}_t_{i} = {outer}{f' * {outer_width}u' if outer_width > 1 else ''};"
        # Rows beyond the edge of the matrix are loaded, too. WebGPU keeps the reads within the
        # binding, and the sums computed from these rows are not stored.
        at = f"{first} + {name}_t_{i}"
        start = f"{name}_0 + ({at}) * {side.step}u + {name}_k_{i} * {side.step_k}u"
        yield f"let {name}_at_{i} = ({start}) / {width}u;"
        yield f"var {name}_next_{i}: {side.type};"
        if side.kind == NF4:
            yield f"var {name}_scale_{i}: f32;"


def batch_start(product: Product, layout: Layout) -> str:
    terms, inner = [f"{layout.offset}u"], product.num_batches
    for i, (size, step) in enumerate(zip(product.batch, layout.batch, strict=True)):
        inner //= size
        wrapped = f" % {size}u" if i else ""
        if step:
            terms.append(f"batch / {inner}u{wrapped} * {step}u")
    return " + ".join(terms)


def load(side: Side, tile: str) -> Iterator[str]:
    """Write the code that loads a tile's elements to registers, with zeros beyond the end of k."""
    for i in side.loads:
        name = f"{side.name}_next_{i}"
        at = f"{side.name}_at_{i} + {tile} * {side.tile_k * side.step_k // side.width}u"
        assert side.tile_k * side.step_k % side.width == 0, side  # tiles begin at load boundaries
        loads = [f"{name} = {_element(side, at)};"]
        zeros = [f"{name} = {side.type}();"]
        if side.kind == NF4:  # no NF4 code is zero, so the scale is set to zero
            block = f"({at}) / {BLOCK // side.width}u"
            loads.append(f"{side.name}_scale_{i} = {side.name}_scale({block});")
            zeros.append(f"{side.name}_scale_{i} = 0.0;")
        inside = []
        if side.depth % side.tile_k:
            inside.append(f"{tile} * {side.tile_k}u + {side.name}_k_{i} < {side.depth}u")
        if side.partial and i == side.loads[-1]:
            inside.append(f"{side.name}_load_{i} < {side.num_loads}u")
        if inside:
            yield from zeros
            yield f"if ({' && '.join(inside)}) {{ {' '.join(loads)} }}"
        else:
            yield from loads


def _element(side: Side, at: str) -> str:
    if side.kind == "f32" or side.width > 1:
        return f"{side.name}[{at}]"
    return emitter.single(side.kind, side.name, at)


def _decoded(side: Side, load: int) -> list[str]:
    """Return the WGSL of a load's elements, each a f32."""
    value = f"{side.name}_next_{load}"
    if side.kind == "f32":
        return [f"{value}.{lane}" for lane in LANES] if side.width == WIDTH else [value]
    if side.kind == NF4:
        lanes = range(WIDTH_CODED) if side.width > 1 else (1,)
        scale = f"{side.name}_scale_{load}"
        return [f"{emitter.lane(NF4, value, one)} * {scale}" for one in lanes]
    if side.width == 1:
        return [emitter.lane(side.kind, value, 0)]
    return [emitter.lane(side.kind, f"{value}.{lane}", half) for lane in LANES for half in (0, 1)]


def _vectors(side: Side, load: int) -> list[str]:
    """Return the WGSL of a load's elements, four of them in each vec4<f32>."""
    if side.kind == "f32":
        return [f"{side.name}_next_{load}"]
    parts = _decoded(side, load)
    return [f"vec4<f32>({', '.join(parts[at : at + 4])})" for at in range(0, len(parts), 4)]


def store(side: Side, copy: int) -> Iterator[str]:
    """Write the code that copies the elements from registers to the tile, with k outermost."""
    tile = f"{side.name}_tile_{copy}"
    for i in side.loads:
        k, t = (f"{side.name}_{part}_{i}" for part in ("k", "t"))
        if side.whole_vectors:
            stores = [
                f"{tile}{side.place(k)}[{t} / 4u + {number}u] = {vector};"
                for number, vector in enumerate(_vectors(side, i))
            ]
        else:
            parts = _decoded(side, i)
            at = f"[{t}]" if side.scalars else f"[{t} / 4u][{t} % 4u]"
            stores = [
                f"{tile}{side.place(f'{k} + {j}u')}{at} = {part};" for j, part in enumerate(parts)
            ]
        if side.partial and i == side.loads[-1]:
            stores = [f"if ({side.name}_load_{i} < {side.num_loads}u) {{", *stores, "}"]
        yield from stores


def four(row: str, at: str, *, scalars: bool) -> str:
    """Return the WGSL of the vec4 at index `at` of a tile's row."""
    if not scalars:
        return f"{row}[{at}]"
    return f"vec4<f32>({', '.join(f'{row}[({at}) * 4u + {lane}u]' for lane in range(4))})"


# The WGSL of one matrix product, with all sizes and strides as literals and inner loops unrolled.
#
# A workgroup computes one tile of c. It goes along k in steps: it copies a tile of a and one of b
# to workgroup memory, both with k outermost, so a row-major a is transposed. While the next tiles
# are loaded to registers, each thread reads four elements at a time from the current tiles and
# adds their outer products to its sums. No variable indexes a register. The innermost reads of
# workgroup memory have one variable index, the same for all k, so that naga, wgpu's compiler,
# checks its bounds once.

RASTER = 8  # rows of tiles in a band
NUM_LEVELS = 16


def write(
    product: Product,
    tiling: Tiling,
    workgroups: tuple[int, int, int],
    epilogue: str,
    *,
    component_writes: bool,
) -> str:
    """Return the shader for a dispatch of `workgroups`."""
    a, b = sides(product, tiling, component_writes=component_writes)
    vector_c = is_vector(product.c, product.c.column, product.c.row, product.n)
    epilogue = epilogue or "fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32 { return acc; }"
    parts = [
        _header(product, tiling, a, b, vector_c),
        *_decoders(product, epilogue),
        epilogue,
        f"@compute @workgroup_size({tiling.num_threads})",
        "fn main(",
        "    @builtin(workgroup_id) group_id: vec3<u32>,",
        "    @builtin(local_invocation_index) thread: u32,",
        ") {",
        *_indented(_levels(product)),
        *_indented(_place(product, tiling, workgroups)),
        *_indented(starts(product, a, "row_0", product.a)),
        *_indented(starts(product, b, "column_0", product.b)),
        *_indented(_sums(tiling)),
        *_indented(_main_loop(tiling, a, b)),
        *_indented(_tree(tiling)),
        *_indented(_results(product, tiling, vector_c)),
        "}",
    ]
    return "\n".join(parts) + "\n"


def _header(product: Product, tiling: Tiling, a: Side, b: Side, vector_c: bool) -> str:
    c_type = "vec4<f32>" if vector_c else "f32"
    lines = [
        f"// c = a @ b, {product.a.kind} and {product.b.kind}: {list(product.batch)} of "
        f"[{product.m}, {product.k}] x [{product.k}, {product.n}]; {tiling}",
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


def _decoders(product: Product, epilogue: str) -> Iterator[str]:
    """Write the tables and functions that decode a and b."""
    kinds = {product.a.kind, product.b.kind}
    number = 3
    for name, layout in (("a", product.a), ("b", product.b)):
        if layout.kind == NF4:
            for table, of in (("scales", "u32"), ("second", "f32")):
                binding = f"@group(0) @binding({number}) var<storage, read>"
                yield f"{binding} {name}_{table}: array<{of}>;"
                number += 1
            yield emitter.scale_function(name)
    for kind, function in ((NF4, "nf4_level"), ("f16", "from_f16")):
        if kind in kinds and f"fn {function}(" not in epilogue:
            yield from codegen.functions_of(f"{function}(")
    if NF4 in kinds:
        yield f"var<workgroup> levels: array<f32, {NUM_LEVELS}>;"


def _levels(product: Product) -> Iterator[str]:
    if NF4 in (product.a.kind, product.b.kind):
        yield f"if (thread < {NUM_LEVELS}u) {{ levels[thread] = nf4_level(thread); }}"
        yield "workgroupBarrier();"


def _copies(tiling: Tiling, depth: int) -> range:
    """Return the indices of the tiles' copies: one, or two with `double` and several steps."""
    return range(2 if tiling.double and depth > tiling.k else 1)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return ("    " + line for line in lines)


def _place(product: Product, tiling: Tiling, workgroups: tuple[int, int, int]) -> Iterator[str]:
    """Write the code that selects the workgroup's tile and the thread's part of it.

    Workgroups go down columns of RASTER tiles, so that those that run at the same time read few
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
        # 32 neighbouring threads form a 4 x 8 block, which reads the fewest different elements.
        yield f"let x = part / 32u % {across // 8}u * 8u + part % 8u;"
        yield f"let y = part / {across * 4}u * 4u + part / 8u % 4u;"
    else:
        yield f"let x = part % {across}u;"
        yield f"let y = part / {across}u;"


def _sums(tiling: Tiling) -> Iterator[str]:
    for i in range(tiling.thread_m):
        for j in range(tiling.thread_n // 4):
            yield f"var sum_{i}_{j} = vec4<f32>();"


def _main_loop(tiling: Tiling, a: Side, b: Side) -> Iterator[str]:
    """Write the loop along k. With two copies of the tiles, a step needs one barrier, not two."""
    num_tiles, copies = -(-a.depth // a.tile_k), _copies(tiling, a.depth)
    for side in (a, b):
        yield from load(side, "0u")
        yield from store(side, 0)
    yield "workgroupBarrier();"
    yield f"for (var tile_k = 0u; tile_k < {num_tiles}u; tile_k += {len(copies)}u) {{"
    for copy in copies:
        if copy and num_tiles % 2:
            yield f"if (tile_k + 1u == {num_tiles}u) {{ break; }}"
        following = f"(tile_k + {copy + 1}u)"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from load(side, following)
        yield "}"
        for index in range(tiling.k // tiling.split):
            yield from _outer_product(tiling, (a, b), copy, index)
        if len(copies) == 1:
            yield "workgroupBarrier();"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from store(side, (copy + 1) % len(copies))
        yield "}"
        yield "workgroupBarrier();"
    yield "}"


def _outer_product(
    tiling: Tiling, sides: tuple[Side, Side], copy: int, index: int
) -> Iterator[str]:
    """Write the code that adds the outer product of one k to the sums."""
    down, across = tiling.m // tiling.thread_m, tiling.n // tiling.thread_n
    share = "[share]" if tiling.split > 1 else ""
    yield "{"
    counts = ((sides[0], tiling.thread_m, "y", down), (sides[1], tiling.thread_n, "x", across))
    for side, length, first, stride in counts:
        row = f"{side.name}_tile_{copy}[{index}]{share}"
        for i in range(length // 4):
            elements = four(row, f"{first} + {i * stride}u", scalars=side.scalars)
            yield f"let {side.name}_{i} = {elements};"
    for i in range(tiling.thread_m):
        for j in range(tiling.thread_n // 4):
            factor, total = f"vec4<f32>(a_{i // 4}.{LANES[i % 4]})", f"sum_{i}_{j}"
            yield f"{total} = fma({factor}, b_{j}, {total});"
    yield "}"


def _tree(tiling: Tiling) -> Iterator[str]:
    """Write the code that adds the sums of all shares along a fixed binary tree."""
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
    yield f"let c_0 = {batch_start(product, c)};"
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


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compute shader with the entry point `main`, and its dispatch.

    Bindings 0, 1 and 2 of group 0 are a, b (read) and c (read_write). The tables that decode a and
    b follow, then the bindings of the epilogue.
    """

    source: str
    workgroups: tuple[int, int, int]


def product_kernel(
    product: Product, limits: Limits, *, epilogue: str = "", tiling: Tiling | None = None
) -> Kernel:
    """Return the kernel of a product, with `tiling` or else the best one for its shape.

    `epilogue` is WGSL: `fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32` (b counts batches in
    C order), and its bindings, after those of `product.tables`. Elements of c must overlap neither
    each other nor a or b.

    Raises UsageError for sizes of zero and for strides that don't match the batch, and
    BackendUnavailable for sizes beyond the adapter's limits.
    """
    _check(product, limits)
    if NF4 in (product.a.kind, product.b.kind):
        room = limits.workgroup_bytes_max - LEVELS_BYTES
        limits = replace(limits, workgroup_bytes_max=room)
    chosen = tiling or tiles.choose(product, limits)
    if not chosen.fits(limits):
        raise BackendUnavailable(
            f"{describe(product)}: {chosen} takes {chosen.workgroup_bytes} bytes and "
            f"{chosen.num_threads} invocations of a workgroup, the adapter has "
            f"{limits.workgroup_bytes_max} and {limits.invocations_max}"
        )
    workgroups = fold(chosen.num_tiles(product), limits, describe(product))
    source = write(
        *(product, chosen, workgroups, epilogue), component_writes=limits.component_writes
    )
    return Kernel(source=source, workgroups=workgroups)


def _check(product: Product, limits: Limits) -> None:
    sizes = (*product.batch, product.m, product.k, product.n)
    if min(sizes) < 1:
        raise UsageError(f"{describe(product)}: nothing to multiply; use sizes of at least 1")
    operands = {
        "a": (product.a, product.m, product.k),
        "b": (product.b, product.k, product.n),
        "c": (product.c, product.m, product.n),
    }
    for name, (layout, rows, columns) in operands.items():
        strides = (layout.offset, *layout.batch, layout.row, layout.column)
        if len(layout.batch) != len(product.batch) or min(strides) < 0:
            raise UsageError(
                f"{describe(product)}: {name} has {layout}; give one stride, of at least 0, for "
                "each dimension"
            )
        size = layout.num_bytes(product.num_elements(layout, rows, columns))
        if size > limits.binding_bytes_max:
            raise BackendUnavailable(
                f"{describe(product)}: {name} takes {size} bytes, a binding holds at most "
                f"{limits.binding_bytes_max}; use smaller matrices or another backend"
            )


def fold(total: int, limits: Limits, what: str) -> tuple[int, int, int]:
    """Return the (x, y, z) of a dispatch of at least `total` workgroups.

    Raises BackendUnavailable if `total` is too large for three dimensions.
    """
    longest = limits.workgroups_max
    x = min(total, longest)
    y = min(-(-total // x), longest)
    z = -(-total // (x * y))
    if z > longest:
        raise BackendUnavailable(
            f"{what}: {total} workgroups, a dispatch holds {longest}^3; use smaller matrices"
        )
    return x, y, z
