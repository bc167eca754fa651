"""Single operations on a wgpu adapter, compared with float64 and tested with NaNs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute import draws, nf4
from entrenar_py.compute.wgpu import bounds, capture, program
from entrenar_py.compute.wgpu.bounds.intervals import Bounded
from entrenar_py.compute.wgpu.capture import TABLE_ELEMENTS_MAX as NUM_ELEMENTS_MAX
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import device_meter
from entrenar_py.train.coordinator.recorder import Recorder

ROWS, COLUMNS = 17, 31
LARGE = 1e5
LONG = 331  # prime, and more than the lanes of a workgroup

Operation = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """`operation` on one matrix, or on two of the same shape.

    `largest` is the largest absolute value of the large operands: larger values would overflow or
    have no bound. `least` is the smallest absolute value of any element. `sign` is 1 if elements
    must be positive, else 0. With `rows_only`, all operands have the shape [ROWS, COLUMNS].
    """

    operation: Operation
    num_operands: int = 1
    largest: float = LARGE
    least: float = 0.0
    sign: int = 0
    rows_only: bool = False


IDS = torch.tensor([3, 0, 3, 16, 5])
WEIGHT = [COLUMNS, 19]
CODES = (torch.arange(-(-COLUMNS * 19 // 2)) * 37 % 256).to(torch.uint8)
SCALES = (torch.arange(-(-COLUMNS * 19 // nf4.BLOCK)) * 101 % 256).to(torch.uint8)
PLACES = torch.arange(ROWS * 6).reshape(ROWS, 6) % 7


def _nf4(x: Tensor) -> Tensor:
    """Return a product with a matrix in NF4 that has elements of `x` as its second-level scales."""
    second = x.reshape(-1)[: nf4.MEAN + 2]
    weight: Tensor = nf4.decode(CODES, SCALES, second, WEIGHT, x.dtype)
    return x @ weight


def _unary(operation: Operation, largest: float = LARGE) -> Case:
    return Case(operation, largest=largest)


def _binary(operation: Operation) -> Case:
    return Case(operation, num_operands=2)


def _rounded_quotient(mode: str) -> Case:
    return Case(lambda x, y: torch.div(x, y, rounding_mode=mode), num_operands=2, least=0.1)


CASES: dict[str, Case] = {
    "abs": _unary(torch.abs),
    "add": _binary(torch.add),
    "add_alpha": _binary(lambda x, y: torch.add(x, y, alpha=3)),
    "add_row": _unary(lambda x: x + x[0]),
    "amax": _unary(lambda x: x.amax(-1)),
    "amax_all": _unary(lambda x: x.amax()),
    "amin": _unary(lambda x: x.amin(0)),
    "arange": Case(lambda x: x[3, 5] + torch.arange(NUM_ELEMENTS_MAX + 1.0), rows_only=True),
    "arg_extremes": _unary(lambda x: torch.stack([x.argmax(-1), x.argmin(-1)])),
    "bmm": _unary(lambda x: torch.stack([x, -x, 2 * x]) @ torch.stack([x.t(), x.t(), -x.t()])),
    "cat": _binary(lambda x, y: torch.cat([x, -y, x], 1)),
    "ceil": _unary(torch.ceil),
    "clamp": _unary(lambda x: x.clamp(-0.5, 0.7)),
    "clone": _unary(lambda x: x.t().clone()),
    "compare": _binary(
        lambda x, y: torch.stack(
            [x < y, x <= y, x >= y, x != y, x.isnan(), (x * torch.inf).isinf(), x < 0.5, x >= 0.5]
        )
    ),
    "constant_pad_nd": _unary(lambda x: F.pad(x, (1, 2, 0, 3), value=0.5)),
    "convolution": Case(
        lambda x: F.conv1d(
            x[None], x[:3].expand(4, 3, COLUMNS).mT[:, :ROWS], stride=2, padding=1, dilation=2
        ),
        rows_only=True,
    ),
    "cos": _unary(torch.cos, largest=3.0),
    "cumsum": _unary(lambda x: x.cumsum(-1)),
    "div": Case(torch.div, num_operands=2, least=0.1),
    "div_floor": _rounded_quotient("floor"),
    "div_trunc": _rounded_quotient("trunc"),
    "embedding": Case(lambda x: F.embedding(IDS, x), rows_only=True),
    "embedding_backward": Case(
        lambda x: torch.ops.aten.embedding_dense_backward(x[:5], IDS, 19, -1, False), rows_only=True
    ),
    "erf": _unary(torch.erf),
    "exp": _unary(torch.exp, largest=80.0),
    "expand": _unary(lambda x: x[:, None].expand(x.shape[0], 5, x.shape[1]) + 0),
    "eq": _binary(lambda x, y: x.floor() == y.floor()),
    "flip": _unary(lambda x: x.flip(0)),
    "floor": _unary(torch.floor),
    "fmod": Case(torch.fmod, num_operands=2, least=0.1),
    "gather": Case(lambda x: x.gather(1, PLACES), rows_only=True),
    "gelu": _unary(F.gelu),
    "gt": _binary(torch.gt),
    "index": Case(lambda x: x[IDS], rows_only=True),
    "index_put": Case(
        lambda x: x.new_zeros(19, COLUMNS).index_put((IDS,), x[:5], accumulate=True), rows_only=True
    ),
    "index_select": Case(lambda x: x.index_select(1, IDS), rows_only=True),
    "kept": Case(
        lambda x: torch.where(draws.kept(x[0, :2].sign().int(), 3, x.shape, 0.3), x, -x),
        rows_only=True,
    ),
    "log": Case(torch.log, least=0.01, sign=1),
    "logic": _binary(
        lambda x, y: torch.stack(
            [
                *((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0)),
                torch.logical_and(x.floor(), y > 0),
                torch.logical_or(x.floor(), y > 0),
                torch.logical_xor(x.floor(), y > 0),
                torch.logical_not(x.floor()),
                (x > 0.9).any(-1, keepdim=True).expand(x.shape),
            ]
        )
    ),
    "log_softmax": _unary(lambda x: x.log_softmax(-1)),
    "masked": _unary(lambda x: torch.where(torch.arange(x.shape[1]) % 3 == 0, x, -x)),
    "maximum": _binary(torch.maximum),
    "mean": _unary(lambda x: x.mean(-1)),
    "minimum": _binary(torch.minimum),
    "mm": _unary(lambda x: x @ x.t()),
    # The same shape for every view of the operands: only strides and offsets differ.
    "mm_square": _binary(lambda x, y: x[:3, :3] @ y[:3, :3]),
    "mm_tall": _binary(lambda x, y: x.t() @ y),
    "mul": _binary(torch.mul),
    "neg": _unary(torch.neg),
    "permute": _unary(lambda x: x.t() * 3),
    "nf4": Case(_nf4, rows_only=True),
    "pow": _unary(lambda x: x**3),
    "reciprocal": Case(torch.reciprocal, least=0.1),
    "relu": _unary(torch.relu),
    "remainder": Case(torch.remainder, num_operands=2, least=0.1),
    "repeat": _unary(lambda x: x.repeat(2, 3)),
    "round": _unary(torch.round),
    "rsqrt": Case(torch.rsqrt, least=0.01, sign=1),
    "scatter": Case(lambda x: x.scatter(1, PLACES[:, :1], -1.0), rows_only=True),
    "scatter_add": Case(lambda x: x.scatter_add(1, PLACES, x[:, :6]), rows_only=True),
    "select": _unary(lambda x: x.select(1, 2) + 1),
    "sign": _unary(torch.sign),
    "sigmoid": _unary(torch.sigmoid),
    "silu": _unary(F.silu, largest=80.0),
    "sin": _unary(torch.sin, largest=3.0),
    "slice": _unary(lambda x: x[1:, 2::3] * 2),
    "slice_scatter": Case(lambda x: x.slice_scatter(x[:, :3] * 2, 1, 2, 5), rows_only=True),
    "softmax": _unary(lambda x: x.softmax(-1)),
    "sqrt": Case(torch.sqrt, sign=1),
    "squeeze": _unary(lambda x: x[:, 1:2].squeeze(1) * 3),
    "sub": _binary(torch.sub),
    "sum": _unary(lambda x: x.sum(-1)),
    "sum_all": _unary(lambda x: x.sum()),
    "sum_rows": _unary(lambda x: x.sum(0)),
    "tanh": _unary(torch.tanh),
    "topk": _unary(lambda x: x.topk(3, -1).values),
    "to_whole": _unary(lambda x: (x * 8).to(torch.int64) * 3),
    "trunc": _unary(torch.trunc),
    "unfold": _unary(lambda x: x.unfold(1, 3, 2) * 3),
    "var": _unary(lambda x: x.var(-1, correction=0)),
    "view": _unary(lambda x: x.t().reshape(-1) + 1),
    "where_scalar": _unary(lambda x: torch.where(x > 0, 1.0, x)),
    "where": _binary(lambda x, y: torch.where(x > 0, x, y)),
}


def operands(case: Case, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
    """Return the float32 operands of `case`: usual numbers, then large ones in long rows."""
    long = (ROWS, COLUMNS) if case.rows_only else (3, LONG)
    return [
        tuple(_numbers(case, shape, size, generator) for _ in range(case.num_operands))
        for shape, size in (((ROWS, COLUMNS), 1.0), (long, case.largest))
    ]


def results(case: Case, usual: tuple[Tensor, ...], large: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results of `case` on its operands, and on views of the usual ones.

    The views are transposed, or have an offset and gaps. A `rows_only` case has none.
    """
    outputs = [case.operation(*usual), case.operation(*large)]
    if not case.rows_only:
        outputs.append(case.operation(*(one.t() for one in usual)))
        outputs.append(case.operation(*(one[1:, 1::2] for one in usual)))
    return outputs


def poisoned(case: Case, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return `operands` with NaNs in the first operand; every case reads at least one of them."""
    first = operands[0].clone()
    for place in [(3, 5)] if case.rows_only else [(1, 1), (2, 2)]:
        first[place] = torch.nan
    return first, *operands[1:]


def _numbers(case: Case, shape: tuple[int, int], size: float, generator: torch.Generator) -> Tensor:
    numbers = torch.rand(shape, generator=generator) * 2 - 1
    numbers = numbers.sign() * (numbers.abs() * (size - case.least) + case.least)
    return numbers.abs() if case.sign > 0 else numbers


# The allowed relative difference of two float64 evaluations that add in different orders.
FLOAT64_SLACK = 1e-12


def run(scenario: Scenario) -> trace.Trace:
    """Record Explained and Poisoned events for each result of option `operations`, by default all.

    Without an adapter the run ends `failed`, with the reason. Raises UsageError for an operation
    that is not in CASES.
    """
    recorder = Recorder(scenario)
    names = scenario.options.get("operations", list(CASES))
    for name in names:
        if name not in CASES:
            raise UsageError(f"operations={name!r}: allowed are {', '.join(CASES)}")
    try:
        device = device_meter.open_adapter(scenario).programs.device
        for name in names:
            generator = torch.Generator().manual_seed(scenario.seed)
            for event in _tried(name, CASES[name], device, generator):
                recorder.emit(event)
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    return recorder.finish(status="completed")


def _tried(
    name: str, case: Case, device: Device, generator: torch.Generator
) -> Iterator[trace.Event]:
    """Yield the events of one operation on its operands, and on operands with NaNs."""
    groups = operands(case, generator)
    flat = [tensor for group in groups for tensor in group]

    def compute(*given: Tensor) -> tuple[Tensor, ...]:
        usual, large = given[: case.num_operands], given[case.num_operands :]
        return tuple(results(case, usual, large))

    graph = capture.capture(compute, flat)
    compiled = program.compile_graph(device, graph, flat)
    outputs = [
        torch.from_numpy(tensor) for tensor in compiled.run([tensor.numpy() for tensor in flat])
    ]
    exact = compute(*(tensor.double() for tensor in flat))
    allowed = bounds.bound(graph, flat)
    for number, (got, right, bounded) in enumerate(zip(outputs, exact, allowed, strict=True)):
        yield _explained(name, f"result {number}", got, right, bounded, device)
    nans = [tensor for group in groups for tensor in poisoned(case, group)]
    outputs = [
        torch.from_numpy(tensor) for tensor in compiled.run([tensor.numpy() for tensor in nans])
    ]
    yield from _poisoned(name, outputs, compute(*nans), device)


def _explained(
    of: str, tensor: str, got: Tensor, right: Tensor, allowed: Bounded, device: Device
) -> trace.Explained:
    """Return the event for the element with the largest error relative to its bound."""
    assert got.shape == right.shape, f"{of}: {got.shape}"
    computed, exact = got.double().reshape(-1), right.double().reshape(-1)
    low, high, value = (
        one.double().reshape(-1) for one in (allowed.low, allowed.high, allowed.value)
    )
    known = low.isfinite() & high.isfinite()
    # An interval without the float64 value gets a bound of 0.
    room = torch.where(computed >= exact, high - value, value - low).clamp(min=0.0)
    room = room + FLOAT64_SLACK * exact.abs() * (room > 0)
    error = (computed - exact).abs().nan_to_num(torch.inf)
    used = torch.where(error == 0, 0.0, error / room)
    worst = int(torch.where(known, used, -1.0).argmax())
    return trace.Explained(
        of=of,
        tensor=tensor,
        device=device.name,
        software=device.software,
        finite=bool(computed[exact.isfinite()].isfinite().all()),
        num_elements=computed.numel(),
        num_bounded=int(known.sum()),
        element=worst,
        error=float(error[worst]) if known.any() else 0.0,
        bound=float(room[worst]) if known.any() else 0.0,
    )


def _poisoned(
    of: str, found: Sequence[Tensor], right: Sequence[Tensor], device: Device
) -> Iterator[trace.Poisoned]:
    for number, (got, expected) in enumerate(zip(found, right, strict=True)):
        wanted = expected.isnan().numpy()
        lost = wanted & ~np.isnan(got.numpy())
        yield trace.Poisoned(
            of=of,
            tensor=f"result {number}",
            device=device.name,
            software=device.software,
            reached=int(wanted.sum()),
            lost=int(lost.sum()),
            element=int(lost.argmax()) if lost.any() else None,
        )
