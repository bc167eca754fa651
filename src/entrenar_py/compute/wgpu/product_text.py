"""The WGSL of one matrix product, with all sizes and strides as literals and inner loops unrolled.

A workgroup computes one tile of c. It goes along k in steps: it copies a tile of a and one of b to
workgroup memory, both with k outermost, so a row-major a is transposed. While the next tiles are
loaded to registers, each thread reads four elements at a time from the current tiles and adds their
outer products to its sums. No variable indexes a register. The innermost reads of workgroup memory
have one variable index, the same for all k, so that naga, wgpu's compiler, checks its bounds once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from entrenar_py.compute.wgpu import codings, intrinsics, tile_loads
from entrenar_py.compute.wgpu.codings import NF4
from entrenar_py.compute.wgpu.tile_loads import LANES, Side
from entrenar_py.compute.wgpu.tiles import PADDING, Product, Tiling

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
    a, b = tile_loads.sides(product, tiling, component_writes=component_writes)
    vector_c = tile_loads.is_vector(product.c, product.c.column, product.c.row, product.n)
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
        *_indented(tile_loads.starts(product, a, "row_0", product.a)),
        *_indented(tile_loads.starts(product, b, "column_0", product.b)),
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
    """Write the tables and functions that a and b are decoded with."""
    kinds = {product.a.kind, product.b.kind}
    number = 3
    for name, layout in (("a", product.a), ("b", product.b)):
        if layout.kind == NF4:
            for table, of in (("scales", "u32"), ("second", "f32")):
                binding = f"@group(0) @binding({number}) var<storage, read>"
                yield f"{binding} {name}_{table}: array<{of}>;"
                number += 1
            yield codings.scale_function(name)
    for kind, function in ((NF4, "nf4_level"), ("f16", "from_f16")):
        if kind in kinds and f"fn {function}(" not in epilogue:
            yield from intrinsics.functions_of(f"{function}(")
    if NF4 in kinds:
        yield f"var<workgroup> levels: array<f32, {NUM_LEVELS}>;"


def _levels(product: Product) -> Iterator[str]:
    """Write the code that copies the levels of NF4 to workgroup memory."""
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
        yield from tile_loads.load(side, "0u")
        yield from tile_loads.store(side, 0)
    yield "workgroupBarrier();"
    yield f"for (var tile_k = 0u; tile_k < {num_tiles}u; tile_k += {len(copies)}u) {{"
    for copy in copies:
        if copy and num_tiles % 2:
            yield f"if (tile_k + 1u == {num_tiles}u) {{ break; }}"
        following = f"(tile_k + {copy + 1}u)"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from tile_loads.load(side, following)
        yield "}"
        for index in range(tiling.k // tiling.split):
            yield from _outer_product(tiling, (a, b), copy, index)
        if len(copies) == 1:
            yield "workgroupBarrier();"
        yield f"if ({following} < {num_tiles}u) {{"
        for side in (a, b):
            yield from tile_loads.store(side, (copy + 1) % len(copies))
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
            four = tile_loads.four(row, f"{first} + {i * stride}u", scalars=side.scalars)
            yield f"let {side.name}_{i} = {four};"
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
    yield f"let c_0 = {tile_loads.batch_start(product, c)};"
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
