"""Weights in NF4 and in 16 bits are decoded where a kernel loads them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.compute import nf4, products
from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu.capture import capture
from entrenar_py.compute.wgpu.device import Device, upload
from entrenar_py.compute.wgpu.emitter import LEVELS_BYTES, NF4, Buffer, Coding
from entrenar_py.compute.wgpu.product import product_kernel
from entrenar_py.compute.wgpu.program import compile_graph, compile_step
from entrenar_py.compute.wgpu.tiles import MEDIUM, SMALL, Layout, Product, Tiling
from entrenar_py.shared.errors import UsageError
from tests.compute.wgpu.agreement import agrees
from tests.compute.wgpu.test_product import OTHERS, TILINGS, dispatch, operand

pytestmark = pytest.mark.wgpu
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
KINDS = (NF4, *DTYPES)
UNIT = 2.0**-23


@pytest.fixture
def device(wgpu_backend: WgpuBackend) -> Device:
    return wgpu_backend._device


def stored(kind: str, rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    """Return a random matrix as the tensors that are uploaded."""
    draws, size = np.random.default_rng(seed), rows * columns
    if kind != NF4:
        matrix = draws.standard_normal((rows, columns)).astype(np.float32)
        return [torch.from_numpy(matrix).to(DTYPES[kind])]
    blocks = -(-size // nf4.BLOCK)
    table = [
        np.sort(draws.uniform(-1, 1, nf4.NUM_SECOND_LEVELS)),
        np.ones(1),
        draws.uniform(0, 0.5, -(-blocks // nf4.SECOND_BLOCK)),
    ]
    return [
        *(torch.from_numpy(draws.integers(0, 256, n, np.uint8)) for n in (-(-size // 2), blocks)),
        torch.from_numpy(np.concatenate(table).astype(np.float32)),
    ]


def decoded(kind: str, held: list[Tensor], rows: int, columns: int) -> Tensor:
    """Return the matrix in float32."""
    if kind != NF4:
        return held[0].float()
    matrix: Tensor = nf4.decode(*held, [rows, columns], torch.float32)
    return matrix


def words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as int32, filled up with zeros."""
    held = tensor.reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(held, (0, -len(held) % 16))
    return padded.view(torch.int32)


def multiplied(
    device: Device, kind: str, x: Tensor, held: list[Tensor], tiling: Tiling | None, **sizes: Any
) -> Tensor:
    """Return x @ w.T, or x @ w if `backward`, for a stored w of [rows, columns]."""
    rows, columns, backward = sizes["rows"], sizes["columns"], sizes["backward"]
    tables = [Buffer(f"table{i}", "f32", 1) for i, _ in enumerate(held[1:])]
    layout = Layout(row=columns, column=1, coding=Coding(kind, tuple(tables)))
    n = columns if backward else rows
    product = Product(
        m=len(x),
        k=x.shape[1],
        n=n,
        a=Layout(row=x.shape[1], column=1),
        b=layout if backward else layout.transposed(),
        c=Layout(row=n, column=1),
    )
    kernel = product_kernel(product, device.limits, tiling=tiling)
    inputs = [x, *(one if one.dtype == torch.float32 else words(one) for one in held)]
    return dispatch(device, kernel, inputs, torch.zeros(len(x) * n)).reshape(len(x), n)


def check(device: Device, kind: str, m: int, tiling: Tiling | None, **sizes: Any) -> None:
    """Require each element of a product with a stored matrix to be within its bound."""
    rows, columns, backward = sizes["rows"], sizes["columns"], sizes["backward"]
    held = stored(kind, rows, columns)
    x = operand((), m, rows if backward else columns, seed=1).view.contiguous()
    found = multiplied(device, kind, x, held, tiling, **sizes)
    weight = decoded(kind, held, rows, columns)
    right = weight if backward else weight.t()
    wanted = x.double() @ right.double()
    allowed = products.bound(x, right, unit_roundoff=UNIT)
    if kind == NF4:  # a scale of up to 1.5 is rounded twice, and a level's product with it once
        allowed = allowed + 3 * UNIT * 1.5 * x.abs().double().sum(1, keepdim=True)
    assert torch.isfinite(found).all()
    assert ((found.double() - wanted).abs() <= allowed).all(), tiling


@pytest.mark.parametrize(
    ("kind", "tiling"),
    [*((NF4, one) for one in (*TILINGS, *OTHERS)), ("bf16", MEDIUM[1]), ("f16", SMALL[0])],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_each_tiling(device: Device, kind: str, tiling: Tiling, backward: bool) -> None:
    """Incomplete tiles, with loads of eight elements and of one."""
    room = device.limits.workgroup_bytes_max - LEVELS_BYTES
    if not tiling.fits(replace(device.limits, workgroup_bytes_max=room)):
        pytest.skip(f"{tiling.workgroup_bytes} bytes of workgroup memory: this adapter has less")
    ragged = [2 * tiling.k + 3] if tiling in SMALL else []  # others take seconds to compile
    for columns in (tiling.n + 8, *ragged):
        rows = tiling.k + 5 if backward else tiling.n + 5
        sizes = {"rows": rows, "columns": columns, "backward": backward}
        check(device, kind, tiling.m + 3, tiling, **sizes)


SIZES = st.sampled_from([1, 2, 7, 8, 16, 31, 40, 64, 72, 130])


@settings(max_examples=12)
@given(data=st.data())
def test_any_product(wgpu_backend: WgpuBackend, data: st.DataObject) -> None:
    """Rows end within blocks, within words, and at both."""
    m, rows, columns = (data.draw(SIZES, label=name) for name in ("m", "rows", "columns"))
    kind, backward = data.draw(st.sampled_from(KINDS)), data.draw(st.booleans())
    sizes = {"rows": rows, "columns": columns, "backward": backward}
    check(wgpu_backend._device, kind, m, None, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (5, 7), (130, 260)])
def test_a_step_agrees_with_its_bounds(device: Device, kind: str, rows: int, columns: int) -> None:
    """Products, a lookup, a view and a fused operation read one stored matrix, kept once."""
    held = stored(kind, rows, columns)

    def step(x: Tensor, y: Tensor, ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weight = decoded(kind, list(given), rows, columns)
        sums = (weight[1:, ::2] * 2).sum(-1)
        return x @ weight.t() + 1, y @ weight, weight[ids] * x[0], sums

    x, y = torch.randn(3, columns), torch.randn(4, rows)
    inputs = [x, y, torch.tensor([rows - 1, 0, 2])]
    graph = capture(step, [*inputs, *held])
    program = compile_graph(device, graph, inputs, [upload(device, one) for one in held])
    outputs = [torch.from_numpy(one) for one in program.run([one.numpy() for one in inputs])]
    for one in agrees(outputs, graph, [*inputs, *held]):
        assert one.explained, one
        assert one.num_bounded == one.num_elements
    assert all(one.writes.size < rows * columns for one in program.steps), "it was decoded whole"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(device: Device, dtype: torch.dtype) -> None:
    """Subnormal numbers, infinities and zeros of both signs have torch's bits."""
    numbers = torch.arange(2**16).to(torch.uint16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    if dtype == torch.bfloat16:  # subnormal as float32, too: a device may flush them
        numbers = numbers[(numbers == 0) | (numbers.abs() >= torch.finfo(dtype).tiny)]
    program = compile_step(device, lambda x, w: (w.float() + x,), [torch.zeros(())], [numbers])
    (found,) = program.run([np.zeros((), np.float32)])
    assert np.array_equal(found, numbers.float().numpy())


def test_16_bits_are_not_computed_with(device: Device) -> None:
    with pytest.raises(UsageError, match=r"dtype=torch.bfloat16; backend wgpu computes in"):
        compile_step(device, lambda w: (w * 2,), [], [torch.ones(3, dtype=torch.bfloat16)])


def test_memory_of_a_stored_matrix(device: Device) -> None:
    """NF4 takes 4.13 bits a weight, and 16 bits take 16."""
    rows, columns = 256, 512
    for kind, bits in ((NF4, 4.2), ("bf16", 16.0), ("f16", 16.0)):
        held = [upload(device, one) for one in stored(kind, rows, columns)]
        table = 4 * (nf4.MEAN + 1) if kind == NF4 else 0  # of levels, for any size
        num_bytes = sum(one.memory.size for one in held) - table
        assert num_bytes * 8 / prod((rows, columns)) <= bits
