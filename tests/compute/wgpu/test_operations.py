"""Every operation agrees with torch on the CPU, on small odd shapes, views and broadcasts.

The operations of a family share a program, because drivers take longer to compile than to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu.device import Array, Device
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.shared.errors import UsageError

pytestmark = pytest.mark.wgpu

Function = Callable[..., tuple[Tensor, ...]]
F = torch.nn.functional
ATEN = torch.ops.aten

# Relative to the largest element. float32 has 24 bits, of which WGSL's functions may lose a few.
TOLERANCE = 4e-6


def numbers(*shape: int) -> Tensor:
    """Return normally distributed numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def agree(device: Device, fn: Function, *inputs: Tensor, packed: bool = False) -> None:
    """Require torch's results of `fn` on the device, and the same bits when run again.

    If `packed`, one kernel computes several results that would otherwise have a kernel each.
    """
    program = compile_step(device, (lambda *given: pack(fn(*given))) if packed else fn, inputs)
    arrays = [one.numpy() for one in inputs]
    found, again = program.run(arrays), program.run(arrays)
    for one, twice in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, twice)
    expected = fn(*inputs)
    found = unpack(found, expected) if packed else found
    wrong = []
    for number, (one, right) in enumerate(zip(found, expected, strict=True)):
        wanted = right.numpy()
        assert one.shape == wanted.shape, number
        assert one.dtype == wanted.dtype, number
        size = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
        if not np.allclose(one, wanted, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True):
            wrong.append(f"result {number}: {one}, not {wanted}")
    assert not wrong, "\n".join(wrong)


def groups(results: Sequence[Tensor]) -> list[list[int]]:
    """Return the results that are packed together: up to six of one type."""
    found = []
    for dtype in dict.fromkeys(one.dtype for one in results):
        same = [number for number, one in enumerate(results) if one.dtype == dtype]
        found += [same[start : start + 6] for start in range(0, len(same), 6)]
    return found


def pack(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return one flat tensor for each group."""
    return tuple(
        torch.cat([results[number].reshape(-1) for number in group]) for group in groups(results)
    )


def unpack(packed: Sequence[Array], like: Sequence[Tensor]) -> list[Array]:
    """Return the results in packed tensors, in the order and with the shapes of `like`."""
    found = {}
    for group, flat in zip(groups(like), packed, strict=True):
        ends = np.cumsum([like[number].numel() for number in group])[:-1]
        for number, part in zip(group, np.split(flat, ends), strict=True):
            found[number] = part.reshape(like[number].shape)
    return [found[number] for number in range(len(like))]


def test_pointwise_numbers(device: Device) -> None:
    """Functions of one and two numbers, also of huge, tiny, infinite and NaN ones."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        size = x.abs() + 0.1
        return (
            x + y, x - 2 * y, x * y.t().t(), x / size, -x, x.sign(), size.reciprocal(),
            x.exp(), size.log(), size.sqrt(), size.rsqrt(), x.sin(), x.cos(), x.tanh(),
            x.sigmoid(), x.erf(), x.floor(), x.round(), x.ceil(), x.trunc(), x.square(), x**2,
            x**3.0,
            size**-0.5, size**1.7, x**5, x.relu(), torch.maximum(x, y), torch.minimum(x, y),
            x.clamp(-0.5, 0.5), x.clamp(min=0.1), torch.add(x, y, alpha=3), x.add(2), 2 - x,
            1 / size,
            torch.tanh(z), torch.sigmoid(z), torch.relu(z), torch.erf(z),
            torch.maximum(z, z.flip(0)),
            torch.isnan(z), torch.isinf(z), z.clamp(0, 1), F.silu(x), F.gelu(x),
            torch.remainder(x, 0.7),
        )  # fmt: skip

    extreme = torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e30, 90.0, -90.0, torch.inf, torch.nan])
    agree(device, fn, numbers(17, 31), numbers(31), extreme, packed=True)


def test_pointwise_whole_numbers_and_truth(device: Device) -> None:
    """Integers, comparisons, logic, casts and choices; negative operands of divisions."""

    def fn(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
        a, b = x > 0, i < 3
        return (
            i + j, i - j, i * j, -i, i.abs(), torch.div(i, j, rounding_mode="floor"),
            torch.div(i, j, rounding_mode="trunc"), torch.remainder(i, j), i / j,
            torch.maximum(i, j), i.clamp(-2, 2), i == j, i != j, i <= j, i >= 2, x == x, x < 0.5,
            a & b, a | b, ~a, torch.logical_and(x, i), torch.logical_xor(a, b), a == b,
            torch.where(a, x, -x), torch.where(b, i, 7), x.to(torch.int64), i.to(torch.float32),
            a.to(torch.float32), a.to(torch.int64), i.bool(), x.masked_fill(a, -torch.inf),
            i + 1.5, i & j, i ** 2, x * i, a * x,
        )  # fmt: skip

    i = torch.arange(-8, 9)[:, None].expand(17, 3).contiguous()
    j = torch.tensor([3, -2, 5]).expand(17, 3).contiguous()
    agree(device, fn, numbers(17, 3), i, j, packed=True)


def test_divisions_to_whole_numbers(device: Device) -> None:
    """Integer divisions of multiples, of their neighbours and of large numbers match float64.

    No number here is subnormal: a GPU may flush it to zero.
    """

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        quotients = (torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc"))
        return torch.remainder(x, y), torch.fmod(x, y), *quotients

    divisor = torch.tensor([0.1, -0.1, 3.0, 7e-3, -0.7, 1e-30, 1e30, torch.inf, torch.nan])
    times = torch.tensor([[0.5], [1], [3], [10], [99], [12345], [-1], [-3], [-1001]])
    exact = (times * divisor.double().nan_to_num(1, 1, 1)).float()
    beside = [torch.nextafter(exact, torch.tensor(one)) for one in (-torch.inf, torch.inf)]
    large = torch.tensor([[1e30], [-3e38], [torch.nan], [-0.0]]).expand(4, len(divisor))
    x = torch.cat([exact, *beside, large])
    y = divisor.expand_as(x).contiguous()
    found = compile_step(device, fn, [x, y]).run([x.numpy(), y.numpy()])
    remainder, modulo, floor, trunc = fn(x.double(), y.double())
    np.testing.assert_array_equal(found[0], remainder.float().numpy())
    np.testing.assert_array_equal(found[1], modulo.float().numpy())
    for one, right in ((found[2], floor), (found[3], trunc)):
        small = ~(right.abs() >= 2**21).numpy()
        np.testing.assert_array_equal(one[small], right.float().numpy()[small])
        np.testing.assert_allclose(one, right.float().numpy(), rtol=1e-6)


def test_constants(device: Device) -> None:
    """Tensors without inputs (full, arange), and masks made of them."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        ones = torch.ones(3, 3, dtype=torch.bool)
        return (
            torch.arange(17) + 0, torch.arange(3, 17, 2) * 1.0,
            torch.arange(0.0, 1.0, 0.25) + x[0, :4],
            torch.full((2, 3), torch.inf), torch.zeros(3), torch.ones_like(x),
            torch.full_like(x, -1.5),
            torch.where(ones.triu(1), -torch.inf, x[:3, :3]), x.tril(), torch.eye(3) + x[:3, :3],
            x + torch.tensor([[0.5], [0.25], [0.125]]),
        )  # fmt: skip

    agree(device, fn, numbers(3, 31), packed=True)


def test_views(device: Device) -> None:
    """Views of inputs, of results and of views. None of them takes a dispatch."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return (
            x.t(), x.reshape(31, 17), y.t().reshape(17, 31), x[3:9:2, 1:], x.select(1, 5), x[-1],
            x.unsqueeze(1).expand(17, 3, 31).reshape(51, 31), y.view(17, 31, 1).squeeze(-1),
            y.t().contiguous().view(-1), x[:, None] * x[:3][None], x.sum(0).expand(4, 31),
            x.flip(1), y.repeat(2, 1, 3), x.T[2:5],
            x[:, :30].reshape(17, 5, 6).permute(2, 0, 1) + 1,
        )  # fmt: skip

    agree(device, fn, numbers(17, 31))
    program = compile_step(
        device, lambda x: (x.t()[2:].t().reshape(3, 5, 1).sum(),), [numbers(3, 7)]
    )
    assert len(program.steps) == 1


def test_reductions(device: Device) -> None:
    """Reductions along any dims, of short and long rows, fused with operations around them."""

    def fn(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        row = x.mean(-1, keepdim=True)
        return (
            x.sum(), x.sum(0), x.sum((0, 2)), x.sum(1, keepdim=True), x.mean((1, 2)), x.amax(2),
            x.amin((0, 1)), y.sum(1), y.amax(0, keepdim=True), y.softmax(-1), y.log_softmax(0),
            x.softmax(-1), y.sum(1).exp() * 0.5, x - row, y.var(1), y.prod(1), y.argmax(1),
            x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5), i.cumsum(0), (y > 2).any(1),
            (y > -9).all(), y.max(1).values, y.min(0).indices, F.layer_norm(y, (127,)), y.max(),
            x.permute(2, 0, 1).sum(-1), x.sum().amax(0),
        )  # fmt: skip

    agree(device, fn, numbers(3, 17, 1, 5).squeeze(2), numbers(5, 127), torch.arange(17) - 4)


def test_long_reductions_to_few_results(device: Device) -> None:
    """A long reduction is folded in parts, unless its length is a prime number."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(), x.amax((0, 2), keepdim=True), (x * x).mean((0, 2)), y.sum(), y.argmax()

    agree(device, fn, numbers(130, 3, 256), numbers(20_011))


def test_products(device: Device) -> None:
    """Products of views and of batches, with pointwise operations on the results."""

    def fn(x: Tensor, y: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        product = x @ y
        return (
            y.t() @ x.t(), x[:, ::2] @ y[::2], F.linear(x, w, w[:, 0]), torch.tanh(x @ y + product),
            torch.bmm(z[:1].expand(3, 5, 17), z.transpose(1, 2)) * z[:, :, :5],
            torch.baddbmm(z[:, :, :5], z, z.transpose(1, 2), beta=0.5, alpha=2),
            (product * 2).reshape(3, 1, 17).sum(0), product[1:, 2:], (x * 2) @ (y + 1),
        )  # fmt: skip

    agree(device, fn, numbers(3, 31), numbers(31, 17), numbers(31, 31), numbers(3, 5, 17))


def test_lookups(device: Device) -> None:
    """Embeddings, forward and backward, and joins, pads, overlays and scatters."""
    ids = torch.tensor([[3, 0, 3], [16, 3, 0], [1, -1, 16]])

    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        known = i.abs()
        few = x[:, :3].softmax(-1)
        return (
            F.embedding(known, x), x[i], x[:, i[0]], x[i[0], i[1]], x.index_select(1, known[0]),
            x.gather(1, known), x.gather(0, known), torch.cat([x, -x], 1), torch.cat([few] * 9, 0),
            F.pad(x, (1, 2, 0, 3), value=0.5), F.pad(x, (-1, -2)), x.scatter(1, known[:, :1], -1.0),
            x.slice_scatter(x[:, :5] * 2, 1, 3, 13, 2), x.select_scatter(x[0] + 1, 0, 4),
            torch.zeros(17, 5).scatter(1, known[:, :1].remainder(5), x[:3, :1]),
            x.scatter(0, known, x[:3]),
            torch.zeros(17, 31).scatter(1, torch.arange(6).expand(17, 6) + known[0, 0], x[:, :6]),
            ATEN.embedding_dense_backward(x[:9].reshape(3, 3, 31), known, 19, 3, False),
            torch.zeros(17, 31).index_put((i.flatten(),), x[:9], accumulate=True),
            torch.zeros(17, 17).index_put((known[0], known[1]), x[0, :3], accumulate=True),
            x.scatter_add(1, known.repeat(6, 2)[:17, :6], x[:, :6]), i[known[0].remainder(3)],
        )  # fmt: skip

    agree(device, fn, numbers(17, 31), ids)


def test_out_of_range_is_not_a_number(device: Device) -> None:
    """An index out of range gives NaN, never another row."""
    program = compile_step(
        device,
        lambda x, i: (F.embedding(i, x),),
        [numbers(3, 2), torch.zeros(2, dtype=torch.int64)],
    )
    (found,) = program.run([numbers(3, 2).numpy(), np.array([1, 3])])
    np.testing.assert_array_equal(found[0], numbers(3, 2)[1].numpy())
    assert np.isnan(found[1]).all()


def test_only_an_index_counts_from_the_end(device: Device) -> None:
    """Only `x[i]` wraps a negative index. Embedding, index_select and gather give NaN."""

    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        looked = F.embedding(i, x), x.index_select(0, i), x.gather(0, i[:, None]), x[i]
        return (torch.cat(looked),)

    x, i = numbers(3, 1), torch.tensor([-1])
    (found,) = compile_step(device, fn, [x, i]).run([x.numpy(), i.numpy()])
    assert np.isnan(found[:3]).all()
    assert found[3] == x[2].numpy()


def test_what_is_added_out_of_range_is_added_to_no_row(device: Device) -> None:
    """An index out of range, also after wrapping once, adds to no element."""

    def fn(i: Tensor, j: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros(3, 4).index_put((i, j), v, accumulate=True),)

    given = [torch.tensor([0, -1, -4]), torch.tensor([4, 1, 0]), torch.ones(3)]
    (found,) = compile_step(device, fn, given).run([one.numpy() for one in given])
    assert np.argwhere(found).tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: (torch.linalg.inv(x),), r"inv.* at test_operations\.py:\d+ in .*no kernel"),
        (lambda x: (x.double(),), r"dtype=torch\.float64; backend wgpu computes in torch\.float32"),
        (lambda x: (x.view(torch.int32),), r"view\.dtype at .*no kernel"),
        (lambda x: (x.long() * 2**40,), r"1099511627776 does not fit into 32 bits; use smaller"),
    ],
)
def test_what_has_no_kernel_is_refused(device: Device, fn: Any, message: str) -> None:
    """The refusal has the operation, the model's line and what to do."""
    with pytest.raises(UsageError, match=message):
        compile_step(device, fn, [torch.eye(3)])
