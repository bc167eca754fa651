"""The kernel of a float32 matrix product, and the checks of its sizes and strides.

`tiles` chooses the tiling, and `product_text` writes the WGSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from entrenar_py.compute.wgpu import product_text, tiles
from entrenar_py.compute.wgpu.codings import LEVELS_BYTES, NF4
from entrenar_py.compute.wgpu.tiles import Limits, Product, Tiling, describe
from entrenar_py.shared.errors import BackendUnavailable, UsageError


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compute shader with the entry point `main`, and its dispatch.

    Bindings 0, 1 and 2 of group 0 are a, b (read) and c (read_write), then come the tables that a
    and b are decoded with, then the epilogue's.
    """

    source: str
    workgroups: tuple[int, int, int]


def product_kernel(
    product: Product,
    limits: Limits,
    *,
    epilogue: str = "",
    tiling: Tiling | None = None,
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
        size = layout.num_bytes(product.num_elements(layout, rows, columns))
        if size > limits.binding_bytes_max:
            raise BackendUnavailable(
                f"{describe(product)}: {name} takes {size} bytes, a binding holds "
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
