"""Products with every tiling, of many shapes, strides, batches and epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.compute import products
from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.product import Kernel, fold, product_kernel
from entrenar_py.compute.wgpu.tiles import (
    LARGE,
    MEDIUM,
    SMALL,
    SPLIT,
    Layout,
    Limits,
    Product,
    Tiling,
    choose,
)
from entrenar_py.shared.errors import BackendUnavailable, UsageError

TILINGS = (*LARGE, *MEDIUM, *SMALL, *SPLIT)
OTHERS = (Tiling(m=4, n=32, k=16, thread_m=4, thread_n=4, split=4, double=True),)  # not chosen
FORMS = ("rows", "columns", "padded", "aligned", "sparse")
LIMITS = Limits(
    binding_bytes_max=1 << 27,
    workgroup_bytes_max=16384,
    invocations_max=256,
    workgroups_max=65535,
)
BIASED = """@group(0) @binding(3) var<storage, read> bias: array<f32>;
fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32 {{
    return 0.5 * acc + bias[(b * {m}u + m) * {n}u + n];
}}"""


@dataclass(frozen=True)
class Operand:
    """A matrix's layout and its buffer. Elements of the buffer outside of the matrix are NaN."""

    layout: Layout
    values: Tensor
    shape: tuple[int, ...]

    @property
    def view(self) -> Tensor:
        """The matrix as a view of the buffer, [*batch, rows, columns]."""
        one = self.layout
        return self.values.as_strided(self.shape, (*one.batch, one.row, one.column), one.offset)


def operand(
    batch: tuple[int, ...],
    rows: int,
    columns: int,
    *,
    form: str = "rows",
    offset: int = 0,
    repeated: bool = False,
    seed: int = 0,
) -> Operand:
    """Return an operand, uniform in [-1, 1]. If `repeated`, the first batch dim has stride 0."""
    row, column, size = {
        "rows": (columns, 1, rows * columns),
        "columns": (1, rows, rows * columns),
        "padded": (columns + 3, 1, rows * (columns + 3)),
        "aligned": (-(-columns // 4) * 4 + 4, 1, rows * (-(-columns // 4) * 4 + 4)),
        "sparse": (2 * columns + 1, 2, rows * (2 * columns + 1)),
    }[form]
    strides = [size * prod(batch[i + 1 :]) for i in range(len(batch))]
    if repeated and strides:
        strides[0] = 0
    made = Operand(
        Layout(offset=offset, batch=tuple(strides), row=row, column=column),
        torch.full((offset + size * prod(batch) + 5,), torch.nan),
        (*batch, rows, columns),
    )
    draws = torch.Generator().manual_seed(seed)
    once = made.view[:1] if repeated and batch else made.view
    once.copy_(torch.rand(once.shape, generator=draws) * 2 - 1)
    return made


def dispatch(device: Device, kernel: Kernel, inputs: list[Tensor], output: Tensor) -> Tensor:
    """Return the contents of binding 2 after the kernel ran, which starts as a copy of `output`."""
    import wgpu

    gpu, usage = device.handle, wgpu.BufferUsage
    tensors = [*inputs[:2], output, *inputs[2:]]
    with device.failures():
        buffers = [
            gpu.create_buffer_with_data(data=one.numpy(), usage=usage.STORAGE | usage.COPY_SRC)
            for one in tensors
        ]
        pipeline = gpu.create_compute_pipeline(
            layout="auto", compute={"module": gpu.create_shader_module(code=kernel.source)}
        )
        group = gpu.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": i, "resource": {"buffer": one}} for i, one in enumerate(buffers)],
        )
        encoder = gpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*kernel.workgroups)
        compute.end()
        gpu.queue.submit([encoder.finish()])
        found = np.frombuffer(gpu.queue.read_buffer(buffers[2]), dtype=np.float32)
    return torch.from_numpy(found.copy())


def assert_right(
    device: Device,
    operands: Sequence[Operand],
    *,
    tiling: Tiling | None,
    biased: bool = False,
) -> None:
    """Require every element of c to be within its bound, and all others to be unchanged."""
    a, b, c = operands
    *batch, m, k = a.shape
    n = b.shape[-1]
    product = Product(batch=tuple(batch), m=m, k=k, n=n, a=a.layout, b=b.layout, c=c.layout)
    epilogue = BIASED.format(m=m, n=n) if biased else ""
    kernel = product_kernel(product, device.limits, epilogue=epilogue, tiling=tiling)
    bias = torch.linspace(-1, 1, prod(batch) * m * n)
    inputs = [a.values, b.values, *([bias] if biased else [])]
    found = replace(c, values=dispatch(device, kernel, inputs, c.values))
    flat = zip(
        found.view.reshape(-1, m, n),
        a.view.reshape(-1, m, k),
        b.view.reshape(-1, k, n),
        bias.reshape(-1, m, n).double(),
        strict=True,
    )
    for result, one, other, extra in flat:
        wanted = one.double() @ other.double()
        allowed = products.bound(one, other, unit_roundoff=2.0**-23)
        if biased:
            wanted = 0.5 * wanted + extra
            allowed = allowed + 2.0**-22 * (wanted.abs() + extra.abs() + allowed)
        assert torch.isfinite(result).all()
        assert ((result.double() - wanted).abs() <= allowed).all(), tiling
    found.view.fill_(torch.nan)
    assert torch.isnan(found.values).all(), "something beside c was written"


def test_operands_are_what_they_say() -> None:
    """An operand's element (b, i, j) is where the layout's formula puts it; all others are NaN."""
    one = operand((2, 3), 4, 5, form="sparse", offset=7)
    lay = one.layout
    at = lay.offset + 1 * lay.batch[0] + 2 * lay.batch[1] + 3 * lay.row + 4 * lay.column
    assert one.view[1, 2, 3, 4] == one.values[at]
    assert int(torch.isfinite(one.values).sum()) == 2 * 3 * 4 * 5


@pytest.mark.wgpu
@pytest.mark.parametrize("tiling", [*TILINGS, *OTHERS], ids=str)
def test_each_tiling(wgpu_backend: WgpuBackend, tiling: Tiling) -> None:
    """A product of several incomplete tiles, of one row-major and one column-major operand."""
    if not tiling.fits(wgpu_backend._device.limits):
        pytest.skip(f"{tiling.workgroup_bytes} bytes of workgroup memory: this adapter has less")
    m, n, k = tiling.m + 3, tiling.n + 5, 2 * tiling.k + 3
    forms = ("columns", "rows") if tiling.split > 1 else ("rows", "columns")
    a, b = operand((), m, k, form=forms[0]), operand((), k, n, form=forms[1], seed=1)
    assert_right(wgpu_backend._device, (a, b, operand((), m, n)), tiling=tiling)


SIZES = st.sampled_from([1, 2, 3, 4, 8, 15, 16, 17, 31, 36, 64, 67])


@pytest.mark.wgpu
@settings(max_examples=10)
@given(data=st.data())
def test_any_product(wgpu_backend: WgpuBackend, data: st.DataObject) -> None:
    """A product of any shape, strides, offsets, batch and epilogue is right with any tiling."""
    m, k, n = (data.draw(SIZES, label=name) for name in "mkn")
    batch = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2), label="batch"))
    limits = wgpu_backend._device.limits
    taken = [None, *(one for one in (*OTHERS, *TILINGS) if one.fits(limits))]
    tiling = data.draw(st.sampled_from(taken), label="tiling")
    made = []
    for seed, (rows, columns) in enumerate(((m, k), (k, n), (m, n))):
        choice: dict[str, Any] = data.draw(
            st.fixed_dictionaries(
                {
                    "form": st.sampled_from(FORMS),
                    "offset": st.sampled_from([0, 1, 4]),
                    "repeated": st.booleans() if seed < 2 else st.just(False),
                }
            )
        )
        made.append(operand(batch, rows, columns, seed=seed, **choice))
    biased = data.draw(st.booleans(), label="biased")
    assert_right(wgpu_backend._device, made, tiling=tiling, biased=biased)


@pytest.mark.wgpu
@pytest.mark.parametrize("tiling", [SMALL[0], SPLIT[-1]], ids=["small", "split"])
def test_where_a_vector_is_written_whole(wgpu_backend: WgpuBackend, tiling: Tiling) -> None:
    """Without `component_writes`, no two invocations write to one vector."""
    device = wgpu_backend._device
    careful = replace(device, limits=replace(device.limits, component_writes=False))
    # Operands that are loaded as vectors, or not.
    a = operand((), 20, 70, form="columns" if tiling.split > 1 else "rows")
    b = operand((), 70, 19, form="columns", seed=1)
    product = Product(m=20, k=70, n=19, a=a.layout, b=b.layout, c=operand_layout((), 20, 19))
    source = product_kernel(product, careful.limits, tiling=tiling).source
    assert "% 4u] =" not in source
    exact = replace(device.limits, component_writes=True)
    assert "% 4u] =" in product_kernel(product, exact, tiling=tiling).source
    assert_right(careful, (a, b, operand((), 20, 19)), tiling=tiling)


@pytest.mark.wgpu
def test_long_sums_are_split_and_give_the_same_bits(wgpu_backend: WgpuBackend) -> None:
    """A workgroup splits the long k of a small product. The result is right and repeatable."""
    device = wgpu_backend._device
    a, b, c = operand((), 3, 5003), operand((), 5003, 9, seed=1), operand((), 3, 9)
    assert_right(device, (a, b, c), tiling=None)
    product = Product(m=3, k=5003, n=9, a=a.layout, b=b.layout, c=c.layout)
    kernel = product_kernel(product, device.limits)
    assert choose(product, device.limits).split > 1
    first, second = (dispatch(device, kernel, [a.values, b.values], c.values) for _ in range(2))
    assert torch.equal(first[:27], second[:27])


@pytest.mark.wgpu
def test_folded_dispatch(wgpu_backend: WgpuBackend) -> None:
    """A dispatch beyond one dimension uses more. Workgroups in excess do nothing."""
    device = wgpu_backend._device
    few = replace(device, limits=replace(device.limits, workgroups_max=3))
    a, b, c = operand((7,), 33, 4), operand((7,), 4, 5, seed=1), operand((7,), 33, 5)
    c = replace(c, values=torch.full((18 * 33 * 5,), torch.nan))  # room for what must stay idle
    product = Product(batch=(7,), m=33, k=4, n=5, a=a.layout, b=b.layout, c=c.layout)
    assert product_kernel(product, few.limits, tiling=SMALL[0]).workgroups == (3, 3, 2)
    assert_right(few, (a, b, c), tiling=SMALL[0])


def shaped(m: int, k: int, n: int, *batch: int) -> Product:
    """Return the product of contiguous matrices."""
    a, b, c = (operand_layout(batch, *size) for size in ((m, k), (k, n), (m, n)))
    return Product(batch=batch, m=m, k=k, n=n, a=a, b=b, c=c)


def operand_layout(batch: tuple[int, ...], rows: int, columns: int) -> Layout:
    strides = tuple(rows * columns * prod(batch[i + 1 :]) for i in range(len(batch)))
    return Layout(batch=strides, row=columns, column=1)


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        (shaped(4096, 4096, 4096), LARGE),
        (shaped(2048, 1024, 3072), LARGE),
        (shaped(2048, 1024, 1024), LARGE),
        (shaped(1024, 1024, 1024), MEDIUM),
        (shaped(512, 512, 64, 64), MEDIUM),
        (shaped(512, 64, 512, 64), MEDIUM),
        (shaped(2048, 16, 1024), MEDIUM),
        (shaped(40, 100, 40), SMALL),
        (shaped(24, 512, 24, 300), SMALL),
        (shaped(256, 1024, 256), SPLIT),
        (shaped(1, 4096, 4096), SPLIT),
        (shaped(2048, 1024, 16), SPLIT),
    ],
)
def test_choice(product: Product, kind: tuple[Tiling, ...]) -> None:
    """A shape selects the kind of tiling, and the adapter's limits one of this kind."""
    ample = replace(LIMITS, workgroup_bytes_max=49152)
    assert choose(product, ample) is kind[0]
    least = MEDIUM if kind is LARGE else kind  # the smallest adapters take nothing large
    assert choose(product, LIMITS) is least[-1]


def test_tilings_fit_together() -> None:
    """Every tiling's sizes divide, and WebGPU's default limits fit one of each kind but LARGE."""
    for one in (*TILINGS, *OTHERS):
        assert one.m % one.thread_m == one.n % one.thread_n == one.k % one.split == 0
        assert one.thread_m % 4 == one.thread_n % 4 == one.k % 4 == 0
    assert all(kind[-1].fits(LIMITS) for kind in (MEDIUM, SMALL, SPLIT))


def test_no_adapter_that_small() -> None:
    """The error of an adapter too small for all tilings, or for a requested one, has its limits."""
    small = replace(LIMITS, workgroup_bytes_max=1000)
    with pytest.raises(BackendUnavailable, match=r"\[8, 8\] x \[8, 8\]: no kernel fits 1000 bytes"):
        product_kernel(shaped(8, 8, 8), small)
    with pytest.raises(
        BackendUnavailable, match=r"256 invocations .* the adapter has 1000 and 256"
    ):
        product_kernel(shaped(8, 8, 8), small, tiling=LARGE[1])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)])
def test_zero_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    """A size of zero, also of a batch, is refused with the product's shape."""
    with pytest.raises(UsageError, match="nothing to multiply; use sizes of at least 1"):
        product_kernel(shaped(*sizes), LIMITS)


def test_bad_layouts_are_refused() -> None:
    """A batch without a stride, a negative stride, and a matrix past the binding are refused."""
    good = shaped(2, 3, 4, 5)
    with pytest.raises(UsageError, match=r"a has Layout.*one stride, of at least 0, for each"):
        product_kernel(replace(good, a=Layout(row=3, column=1)), LIMITS)
    with pytest.raises(UsageError, match="b has Layout"):
        product_kernel(replace(good, b=replace(good.b, row=-1)), LIMITS)
    far = replace(good.c, offset=1 << 25)
    with pytest.raises(
        BackendUnavailable, match="c takes 134217888 bytes, a binding holds at most 1342"
    ):
        product_kernel(replace(good, c=far), LIMITS)


def test_fold() -> None:
    """A dispatch uses as few dimensions as it can, and is refused beyond three."""
    few = replace(LIMITS, workgroups_max=4)
    found = [fold(total, few, "it") for total in (1, 4, 5, 16, 17, 64)]
    assert found == [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 4, 2), (4, 4, 4)]
    with pytest.raises(BackendUnavailable, match=r"it: 65 workgroups, a dispatch holds 4\^3"):
        fold(65, few, "it")
