"""The WGSL that copies an operand of a product from its buffer to the tiles of a workgroup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from entrenar_py.compute.nf4 import BLOCK
from entrenar_py.compute.wgpu import codings
from entrenar_py.compute.wgpu.codings import NF4
from entrenar_py.compute.wgpu.tiles import Layout, Product, Tiling

LANES = "xyzw"
WIDTH, WIDTH_CODED = 4, 8  # elements of a wide load


@dataclass(frozen=True, kw_only=True)
class Side:
    """One operand of a product, with k as one dimension and m or n as the outer dimension.

    The tile's size and the operand's stride are `tile_k` and `step_k` along k, `tile` and `step`
    along the outer dimension. A load moves `width` elements, along k if `along_k`, else along the
    outer dimension: all of them are within the matrix. `kind` is that of the layout's coding.
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
        """True if the elements of a load are neighbours in the tile, too."""
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
        """Return the operand with this `layout`, whose columns are along k."""
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
        assert side.tile_k * side.step_k % side.width == 0, side  # a tile begins at a load
        loads = [f"{name} = {_element(side, at)};"]
        zeros = [f"{name} = {side.type}();"]
        if side.kind == NF4:  # no code is zero, so that a scale has to be
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
    """Return the WGSL of load number `at` of a buffer."""
    if side.kind == "f32" or side.width > 1:
        return f"{side.name}[{at}]"
    return codings.single(side.kind, side.name, at)


def _decoded(side: Side, load: int) -> list[str]:
    """Return the WGSL of a load's elements, each a f32."""
    value = f"{side.name}_next_{load}"
    if side.kind == "f32":
        return [f"{value}.{lane}" for lane in LANES] if side.width == WIDTH else [value]
    if side.kind == NF4:
        lanes = range(WIDTH_CODED) if side.width > 1 else (1,)
        scale = f"{side.name}_scale_{load}"
        return [f"{codings.lane(NF4, value, one)} * {scale}" for one in lanes]
    if side.width == 1:
        return [codings.lane(side.kind, value, 0)]
    return [codings.lane(side.kind, f"{value}.{lane}", half) for lane in LANES for half in (0, 1)]


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
