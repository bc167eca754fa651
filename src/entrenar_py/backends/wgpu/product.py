"""One float32 matrix product, batched and of any strides: which kernel computes it, and its limits.

The WGSL itself is written in `product_text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from entrenar_py.backends.wgpu import product_text
from entrenar_py.errors import BackendUnavailable, UsageError

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an adapter takes: bytes, invocations of a workgroup, workgroups of a dimension.

    `component_writes`: invocations may write to different components of one vector. WGSL lets such
    a write be one of the whole vector, and with Metal and Direct3D it is.
    """

    binding_bytes_max: int
    workgroup_bytes_max: int
    invocations_max: int
    workgroups_max: int
    component_writes: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a matrix lies in its buffer, in elements.

    Element (i, j) of batch (b0, b1, ...) is at offset + b0 * batch[0] + ... + i * row + j * column.
    A stride of 0 repeats; none is negative.
    """

    offset: int = 0
    batch: tuple[int, ...] = ()
    row: int
    column: int

    def transposed(self) -> Layout:
        """The same elements with rows and columns swapped."""
        return Layout(offset=self.offset, batch=self.batch, row=self.column, column=self.row)


@dataclass(frozen=True, kw_only=True)
class Product:
    """c[b, m, n] = finish(sum over k of a[b, m, k] * b[b, k, n]).

    `batch` holds the sizes of the batch dimensions, if any; each layout has a stride for each.
    """

    batch: tuple[int, ...] = ()
    m: int
    k: int
    n: int
    a: Layout
    b: Layout
    c: Layout

    @property
    def num_batches(self) -> int:
        """Products in all."""
        return prod(self.batch)

    def num_elements(self, layout: Layout, rows: int, columns: int) -> int:
        """How many elements a buffer must have to hold this operand."""
        steps = [(size - 1) * step for size, step in zip(self.batch, layout.batch, strict=True)]
        last = (rows - 1) * layout.row + (columns - 1) * layout.column
        return layout.offset + sum(steps) + last + 1


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compute shader with the entry point `main` and how to dispatch it.

    Binding i of group 0 is storage buffer i: a, b (read), c (read_write), then the epilogue's.
    """

    source: str
    workgroups: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is cut: a workgroup makes m x n elements of c, a thread thread_m x thread_n.

    `k` is the depth of the tiles of a and b in workgroup memory; with `double` there are two
    copies of them, in turns. `split` groups of threads share each depth and are added up in a tree
    at the end. All sizes are powers of two of at least 4 (`split`: of at least 1).
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
        """Threads that make one sum of all elements of the tile."""
        return (self.m // self.thread_m) * (self.n // self.thread_n)

    @property
    def num_threads(self) -> int:
        """Invocations of a workgroup."""
        return self.group * self.split

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory: both tiles, their padding, and the partial sums."""
        tiles = self.k * (self.m + self.n + 2 * product_text.PADDING) * (2 if self.double else 1)
        return FLOAT_BYTES * (tiles + self.m * self.n * (self.split // 2))

    def num_tiles(self, product: Product) -> int:
        """Workgroups."""
        return product.num_batches * -(-product.m // self.m) * -(-product.n // self.n)

    def suits(self, product: Product) -> bool:
        """True if a large GPU is kept busy, and the tile is not mostly empty."""
        filled = 2 * product.m > self.m and 2 * product.n > self.n
        return filled and self.num_tiles(product) >= BUSY

    def fits(self, limits: Limits) -> bool:
        """True if the adapter takes it."""
        memory = self.workgroup_bytes <= limits.workgroup_bytes_max
        return memory and self.num_threads <= limits.invocations_max


# Each kind from the fastest on, with a smaller one for adapters of less workgroup memory. What they
# were chosen from, and by which figures, stands in docs/benchmarks.md.
LARGE = (
    Tiling(m=128, n=128, k=16, thread_m=8, thread_n=8, double=True),
    Tiling(m=128, n=128, k=16, thread_m=8, thread_n=8),
)
MEDIUM = (
    Tiling(m=64, n=64, k=16, thread_m=8, thread_n=4, double=True),
    Tiling(m=64, n=64, k=16, thread_m=8, thread_n=4),
)
SMALL = (Tiling(m=32, n=32, k=8, thread_m=4, thread_n=4),)  # compiles in the least time
# Small results of long sums: what c has too few elements for, k has.
SPLIT = (
    Tiling(m=16, n=16, k=64, thread_m=4, thread_n=4, split=16),
    Tiling(m=16, n=16, k=32, thread_m=4, thread_n=4, split=8),
)
BUSY = 128  # workgroups: one for each processor of a large GPU
LONG = 256  # a sum along k worth splitting, or worth large tiles


def choose(product: Product, limits: Limits) -> Tiling:
    """The tiling for a product: the largest that suits its shape, of those that the adapter takes.

    Raises BackendUnavailable if it takes none.
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
    """A product as messages name it."""
    batch = f"{list(product.batch)} of " if product.batch else ""
    return f"product {batch}[{product.m}, {product.k}] x [{product.k}, {product.n}]"


def product_kernel(
    product: Product,
    limits: Limits,
    *,
    epilogue: str = "",
    tiling: Tiling | None = None,
) -> Kernel:
    """The kernel that computes a product, with `tiling` or the one that suits its shape.

    `epilogue` is WGSL: `fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32` (b counts batches in
    C order) and whatever it needs, with bindings from number 3 on. c must overlap
    neither a nor b, nor itself.

    Raises UsageError for a size of zero or strides that do not fit the batch, BackendUnavailable
    for what is larger than the adapter takes.
    """
    _check(product, limits)
    chosen = tiling or choose(product, limits)
    if not chosen.fits(limits):
        raise BackendUnavailable(
            f"{describe(product)}: {chosen} takes {chosen.workgroup_bytes} bytes and "
            f"{chosen.num_threads} invocations of a workgroup, the adapter has "
            f"{limits.workgroup_bytes_max} and {limits.invocations_max}"
        )
    workgroups = fold(chosen.num_tiles(product), limits, describe(product))
    source = product_text.write(
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
        size = product.num_elements(layout, rows, columns) * FLOAT_BYTES
        if size > limits.binding_bytes_max:
            raise BackendUnavailable(
                f"{describe(product)}: {name} takes {size} bytes, a binding holds "
                f"{limits.binding_bytes_max}; use smaller matrices or another backend"
            )


def fold(total: int, limits: Limits, what: str) -> tuple[int, int, int]:
    """A dispatch of at least `total` workgroups, in as many dimensions as it needs.

    Raises BackendUnavailable if three are not enough.
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
