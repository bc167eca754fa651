"""A description of a float32 matrix product, batched and with any strides, and its tiling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from entrenar_py.compute.wgpu.emitter import BITS, Buffer, Coding
from entrenar_py.shared.errors import BackendUnavailable

FLOAT_BYTES = 4
PADDING = 4  # floats after each row of a tile, so that transposed writes use different banks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an adapter: bytes, invocations per workgroup, workgroups per dimension.

    `component_writes`: invocations may write to different components of one vector. WGSL allows
    such a write to replace the whole vector, as it does on Metal and Direct3D.
    """

    binding_bytes_max: int
    workgroup_bytes_max: int
    invocations_max: int
    workgroups_max: int
    component_writes: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of a matrix in its buffer, in elements.

    Element (i, j) of batch (b0, b1, ...) is at offset + b0 * batch[0] + ... + i * row + j * column.
    Strides are not negative. A stride of 0 repeats elements. `coding` is None for float32.
    """

    offset: int = 0
    batch: tuple[int, ...] = ()
    row: int
    column: int
    coding: Coding | None = None

    def transposed(self) -> Layout:
        """Return the layout with rows and columns swapped."""
        return replace(self, row=self.column, column=self.row)

    @property
    def kind(self) -> str:
        """The kind of the coding, "f32" without one."""
        return "f32" if self.coding is None else self.coding.kind

    @property
    def tables(self) -> tuple[Buffer, ...]:
        """The buffers, besides the matrix's own, that decode an element."""
        return () if self.coding is None else self.coding.tables

    def num_bytes(self, num_elements: int) -> int:
        """Return the memory of this many elements, in whole words."""
        bits = FLOAT_BYTES * 8 if self.coding is None else BITS[self.coding.kind]
        return -(-num_elements * bits // 32) * 4


@dataclass(frozen=True, kw_only=True)
class Product:
    """c[i, m, n] = finish(sum over k of a[i, m, k] * b[i, k, n]), with `finish` the epilogue.

    `batch` has the sizes of the dimensions that i indexes. Each layout has a stride for each of
    them.
    """

    batch: tuple[int, ...] = ()
    m: int
    k: int
    n: int
    a: Layout
    b: Layout
    c: Layout

    @property
    def tables(self) -> tuple[Buffer, ...]:
        """The buffers that decode elements of a and b, in the order of their bindings."""
        return self.a.tables + self.b.tables

    @property
    def num_batches(self) -> int:
        """The number of matrix products in the batch."""
        return prod(self.batch)

    def num_elements(self, layout: Layout, rows: int, columns: int) -> int:
        """Return the number of elements that a buffer with this operand needs."""
        steps = [(size - 1) * step for size, step in zip(self.batch, layout.batch, strict=True)]
        last = (rows - 1) * layout.row + (columns - 1) * layout.column
        return layout.offset + sum(steps) + last + 1


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A tiling: a workgroup computes m x n elements of c, a thread thread_m x thread_n of them.

    `k` is the depth of the tiles of a and b in workgroup memory. With `double`, two copies of the
    tiles alternate. `split` groups of threads divide the depth of a tile, and their sums are added
    along a tree at the end. All sizes are powers of two, and at least 4 (`split`: at least 1).
    """

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    split: int = 1
    double: bool = False

    @property
    def group(self) -> int:
        """The number of threads that cover all elements of the tile of c once."""
        return (self.m // self.thread_m) * (self.n // self.thread_n)

    @property
    def num_threads(self) -> int:
        """The number of invocations of a workgroup."""
        return self.group * self.split

    @property
    def workgroup_bytes(self) -> int:
        """The workgroup memory of both tiles, their padding, and the partial sums, in bytes."""
        tiles = self.k * (self.m + self.n + 2 * PADDING) * (2 if self.double else 1)
        return FLOAT_BYTES * (tiles + self.m * self.n * (self.split // 2))

    def num_tiles(self, product: Product) -> int:
        """Return the number of tiles of c, which is the number of workgroups."""
        return product.num_batches * -(-product.m // self.m) * -(-product.n // self.n)

    def suits(self, product: Product) -> bool:
        """Return whether there are enough tiles for a large GPU, each more than half full."""
        filled = 2 * product.m > self.m and 2 * product.n > self.n
        return filled and self.num_tiles(product) >= BUSY

    def fits(self, limits: Limits) -> bool:
        """Return whether the tiling is within the adapter's limits."""
        memory = self.workgroup_bytes <= limits.workgroup_bytes_max
        return memory and self.num_threads <= limits.invocations_max


# The tilings of each kind in order of preference, with variants for adapters with less workgroup
# memory. docs/benchmarks.md has the measurements.
LARGE = (
    Tiling(m=128, n=128, k=16, thread_m=8, thread_n=8, double=True),
    Tiling(m=128, n=128, k=16, thread_m=8, thread_n=8),
)
MEDIUM = (
    Tiling(m=64, n=64, k=16, thread_m=8, thread_n=4, double=True),
    Tiling(m=64, n=64, k=16, thread_m=8, thread_n=4),
)
SMALL = (Tiling(m=32, n=32, k=8, thread_m=4, thread_n=4),)  # compiles fastest
# For small results of long sums: c has few elements, so threads share the sums along k.
SPLIT = (
    Tiling(m=16, n=16, k=64, thread_m=4, thread_n=4, split=16),
    Tiling(m=16, n=16, k=32, thread_m=4, thread_n=4, split=8),
)
BUSY = 128  # workgroups: one for each processor of a large GPU
LONG = 256  # the smallest k for which splitting or large tiles pay off


def choose(product: Product, limits: Limits) -> Tiling:
    """Return the best tiling for the product's shape that fits the adapter's limits.

    Raises BackendUnavailable if none fits.
    """
    fitting = [one for one in _by_preference(product) if one.fits(limits)]
    if not fitting:
        raise BackendUnavailable(
            f"{describe(product)}: no kernel fits {limits.workgroup_bytes_max} bytes and "
            f"{limits.invocations_max} invocations of a workgroup; use another adapter"
        )
    return fitting[0]


def _by_preference(product: Product) -> tuple[Tiling, ...]:
    long = product.k >= LONG
    large = LARGE if long and LARGE[0].suits(product) else ()
    medium = MEDIUM if MEDIUM[0].suits(product) else ()
    split = SPLIT if long and not SMALL[0].suits(product) else ()
    return (*large, *medium, *split, *SMALL)


def describe(product: Product) -> str:
    """Return a description of the product for messages."""
    batch = f"{list(product.batch)} of " if product.batch else ""
    return f"product {batch}[{product.m}, {product.k}] x [{product.k}, {product.n}]"
