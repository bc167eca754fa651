"""Random small functions of tensors and their gradients, to test the execution of graphs.

`python -m tests.compute.wgpu.random_graphs 500 [cpu | wgpu]` tries 500 of them on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu import capture
from entrenar_py.compute.wgpu.device import Device, open_device
from entrenar_py.compute.wgpu.program import compile_step
from tests.compute.wgpu import agreement

SIZES = (1, 2, 3, 5, 7, 16, 17, 33)
VALUES_MAX = 1e4  # what is larger soon overflows, and then there is nothing to compare
NUM_ELEMENTS_MAX = 4096

Operation = Callable[..., Tensor]
Compute = Callable[["RandomGraph", GraphModule, Sequence[Tensor]], list[Tensor]]


@dataclass
class RandomGraph:
    """A function as a list of steps, each a name, an operation and the names of its operands.

    `inputs` are float32 with `requires_grad`, or int64 indices. Step i computes `v<i>`.
    """

    inputs: dict[str, Tensor]
    steps: list[tuple[str, Operation, tuple[str, ...]]]
    differentiated: bool

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the last value. If `differentiated`, also the gradients of its weighted sum."""
        values = dict(zip(self.inputs, inputs, strict=True))
        last = inputs[0]
        for index, (_, operation, operands) in enumerate(self.steps):
            last = values[f"v{index}"] = operation(*(values[name] for name in operands))
        if not self.differentiated:
            return (last,)
        leaves = [one for one in inputs if one.is_floating_point()]
        weights = torch.linspace(-1, 2, last.numel()).reshape(last.shape)
        gradients = torch.autograd.grad((last * weights).sum(), leaves, materialize_grads=True)
        return last, *gradients

    def __repr__(self) -> str:
        lines = [
            f"{name} = {list(one.shape)} {one.dtype}, {_summary(one)}"
            for name, one in self.inputs.items()
        ]
        for index, (name, _, operands) in enumerate(self.steps):
            lines.append(f"v{index} = {name}({', '.join(operands)})")
        return "\n".join(["", *lines, f"differentiated={self.differentiated}"])


def _summary(one: Tensor) -> str:
    return str([round(float(x), 4) for x in one.detach().reshape(-1)[:6]])


POINTWISE: dict[str, Operation] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "exp": lambda x: torch.exp(x.clamp(max=4)),
    "log": lambda x: torch.log(x.abs() + 0.1),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.01),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.5),
    "reciprocal": lambda x: 1 / (x.square() + 1),
    "cube": lambda x: x**3,
    "square": lambda x: x * x,
    "neg": torch.neg,
    "abs": torch.abs,
    "scale": lambda x: x * 0.3 - 2,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "clone": torch.clone,
    "in_place": lambda x: (x * 2).add_(1).mul_(0.5),
    "masked": lambda x: x.masked_fill(x > 0.7, -1.0),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
}
BINARY: dict[str, Operation] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where2": lambda a, b: torch.where(a > b, a, 2 * b),
    "mse": lambda a, b: (a - b).square(),
}


def _zero_first(x: Tensor, dim: int) -> Tensor:
    y = x.clone()
    y.select(dim, 0).zero_()
    return y


ALONG: dict[str, Callable[[int, bool], Operation]] = {
    "sum": lambda d, k: lambda x: x.sum(d, keepdim=k),
    "mean": lambda d, k: lambda x: x.mean(d, keepdim=k),
    "amax": lambda d, k: lambda x: x.amax(d, keepdim=k),
    "var": lambda d, k: lambda x: x.var(d, correction=0, keepdim=k),
    "logsumexp": lambda d, k: lambda x: x.logsumexp(d, keepdim=k),
    "softmax": lambda d, k: lambda x: x.softmax(d),
    "log_softmax": lambda d, k: lambda x: x.log_softmax(d),
    "cumsum": lambda d, k: lambda x: x.cumsum(d),
    "rms_norm": lambda d, k: lambda x: x * (x.square().mean(d, keepdim=True) + 1e-3).rsqrt(),
    "unsqueeze": lambda d, k: lambda x: x.unsqueeze(d),
    "flip": lambda d, k: lambda x: x.flip(d),
    "cat_self": lambda d, k: lambda x: torch.cat([x, x * 2], d),
    "halves": lambda d, k: lambda x: torch.cat(x.chunk(2, d)[::-1], d),
    "repeat_interleave": lambda d, k: lambda x: x.repeat_interleave(2, d),
    "narrow": lambda d, k: lambda x: x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2),
    "every_other": lambda d, k: lambda x: x.transpose(d, 0)[::2].transpose(d, 0),
    "unfold": lambda d, k: lambda x: x.unfold(d, min(2, x.shape[d]), 1 + k),
    "select": lambda d, k: lambda x: x.select(d, x.shape[d] - 1),
    "zero_first": lambda d, k: lambda x: _zero_first(x, d),
}


def _along(rank: int) -> st.SearchStrategy[tuple[str, Operation]]:
    """Return the operations along an axis."""
    chosen = st.tuples(st.sampled_from(sorted(ALONG)), st.integers(-rank, rank - 1), st.booleans())
    return chosen.map(lambda one: (f"{one[0]}[{one[1]}, {one[2]}]", ALONG[one[0]](*one[1:])))


WHOLE: dict[str, Operation] = {
    "flatten": lambda x: x.reshape(-1),
    "transposed": lambda x: x.transpose(0, -1),
    "transposed_flat": lambda x: x.transpose(0, -1).reshape(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "tril": lambda x: x.reshape(-1, x.shape[-1]).tril(),
    "causal": lambda x: (
        (x.reshape(-1, x.shape[-1]))
        .masked_fill(
            torch.ones(x.numel() // x.shape[-1], x.shape[-1], dtype=torch.bool).triu(1), -torch.inf
        )
        .softmax(-1)
    ),
    "total": torch.sum,
    "pad": lambda x: F.pad(x, (1, 2)),
    "gram": lambda x: x.reshape(-1, x.shape[-1]) @ x.reshape(-1, x.shape[-1]).T,
    "batched_gram": lambda x: x.reshape(1, -1, x.shape[-1]) @ x.reshape(1, -1, x.shape[-1]).mT,
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "one_hot": lambda x: x * torch.eye(x.shape[-1])[0],
}


def shapes() -> st.SearchStrategy[list[int]]:
    """Draw shapes of one to three dims."""
    return st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).filter(
        lambda shape: torch.Size(shape).numel() <= 1024
    )


WITH_INPUT: dict[str, Callable[[Tensor], tuple[Sequence[int], Operation]]] = {
    "linear": lambda x: ((17, x.shape[-1]), lambda x, w: F.linear(x, w)),
    "thin_linear": lambda x: ((2, x.shape[-1]), lambda x, w: F.linear(x, w)),
    "matmul": lambda x: ((x.shape[-1], 5), torch.matmul),
    "from_left": lambda x: ((3, x.reshape(-1, x.shape[-1]).shape[0]), _from_left),
    "bias": lambda x: ((x.shape[-1],), torch.add),
    "gain": lambda x: ((x.shape[-1],), torch.mul),
    "conv1d": lambda x: (
        (3, _as_matrix(x).shape[0], min(2, x.shape[-1])),
        lambda x, w: F.conv1d(_as_matrix(x)[None], w, stride=2, padding=1),
    ),
    "depthwise": lambda x: (
        (_as_matrix(x).shape[0], 1, min(3, x.shape[-1])),
        lambda x, w: F.conv1d(_as_matrix(x)[None], w, padding=2, groups=w.shape[0]),
    ),
    "conv2d": lambda x: (
        (4, 1, 1, min(3, x.shape[-1])),
        lambda x, w: F.conv2d(_as_matrix(x).expand(2, 2, -1, -1), w, stride=(1, 2), groups=2),
    ),
    "group": lambda x: ((2, x.shape[-1], 3), lambda x, w: x.reshape(1, -1, x.shape[-1]) @ w),
}
WITH_INDEX: dict[str, Operation] = {
    "gather": lambda x, i: x.gather(0, i.reshape(-1, *[1] * (x.ndim - 1)).expand(-1, *x.shape[1:])),
    "rows": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x.reshape(x.shape[0], -1)),
    "indexed": lambda x, i: x[i],
    "cross_entropy": lambda x, i: F.cross_entropy(
        x.reshape(x.shape[0], -1).T[:1].expand(len(i), -1), i, reduction="sum"
    ),
    "added_at": lambda x, i: (
        torch.zeros_like(x).index_add(0, i, x[: len(i)][: i.numel()]) if len(i) <= x.shape[0] else x
    ),
}


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _from_left(x: Tensor, w: Tensor) -> Tensor:
    return w @ x.reshape(-1, x.shape[-1])


@st.composite
def graphs(draw: st.DrawFn, *, num_steps_max: int = 8) -> RandomGraph:
    """Draw graphs of up to eight steps, each on the previous result. Half are differentiated."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    scale = draw(st.sampled_from([0.1, 1.0, 4.0]))
    graph = RandomGraph({}, [], draw(st.booleans()))

    def fresh(shape: Sequence[int]) -> str:
        name = f"x{len(graph.inputs)}"
        graph.inputs[name] = (torch.randn(shape, generator=generator) * scale).requires_grad_()
        return name

    values = {(last := fresh(draw(shapes()))): graph.inputs["x0"].detach()}
    for _ in range(draw(st.integers(1, num_steps_max))):
        x = values[last]
        kind = draw(st.sampled_from(["pointwise", "binary", "along", "whole", "input", "index"]))
        operands = [last]
        if kind == "pointwise":
            name = draw(st.sampled_from(sorted(POINTWISE)))
            operation = POINTWISE[name]
        elif kind == "binary":
            name = draw(st.sampled_from(sorted(BINARY)))
            operation = BINARY[name]
            others = [one for one, value in values.items() if value.shape == x.shape]
            operands.append(draw(st.sampled_from([*others, ""])) or fresh(x.shape))
        elif x.ndim == 0:
            continue
        elif kind == "along":
            name, operation = draw(_along(x.ndim))
        elif kind == "whole":
            name = draw(st.sampled_from(sorted(WHOLE)))
            operation = WHOLE[name]
        elif kind == "input":
            name = draw(st.sampled_from(sorted(WITH_INPUT)))
            shape, operation = WITH_INPUT[name](x)
            operands.append(fresh(shape))
        else:
            name = draw(st.sampled_from(sorted(WITH_INDEX)))
            operation = WITH_INDEX[name]
            operands.append(f"x{len(graph.inputs)}")
            count = draw(st.integers(1, 9))
            graph.inputs[operands[1]] = torch.randint(0, x.shape[0], (count,), generator=generator)
        values |= {one: graph.inputs[one].detach() for one in operands if one in graph.inputs}
        result = operation(*(values[one] for one in operands))
        if _usable(result):
            last = f"v{len(graph.steps)}"
            graph.steps.append((name, operation, tuple(operands)))
            values[last] = result
    return graph


def _usable(result: Tensor) -> bool:
    return 0 < result.numel() <= NUM_ELEMENTS_MAX and float(result.abs().max()) <= VALUES_MAX


def tried(graph: RandomGraph, compute: Compute) -> tuple[str, int, int]:
    """Return the errors of `compute(captured graph, inputs)`, and how many elements and bounds."""
    inputs = list(graph.inputs.values())
    captured = capture.capture(graph, inputs)
    found = agreement.agrees(compute(graph, captured, inputs), captured, inputs)
    wrong = "\n".join(str(one) for one in found if not one.explained)
    return (
        wrong,
        sum(one.num_elements for one in found),
        sum(one.num_bounded for one in found),
    )


def on_cpu(graph: RandomGraph, captured: GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the captured graph in float32."""
    del graph
    return list(captured(*(one.detach() for one in inputs)))


def on_device(device: Device) -> Compute:
    """Run the captured graph twice on `device`, and require the same bits."""

    def compute(
        graph: RandomGraph, captured: GraphModule, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        del captured
        given = [one.detach().numpy() for one in inputs]
        program = compile_step(device, graph, inputs)
        results = program.run(given)
        for first, second in zip(results, program.run(given), strict=True):
            assert first.tobytes() == second.tobytes(), "another run gave other bits"
        return [torch.from_numpy(one) for one in results]

    return compute


def try_many(num_graphs: int, compute: Compute) -> tuple[int, int]:
    """Try random graphs; AssertionError with the smallest one that disagrees.

    Return the number of elements compared, and the number of those with a bound.
    """
    counts = [0, 0]

    @settings(
        max_examples=num_graphs,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(graph=graphs())
    def agrees(graph: RandomGraph) -> None:
        wrong, num_elements, num_bounded = tried(graph, compute)
        counts[0] += num_elements
        counts[1] += num_bounded
        assert not wrong, wrong

    agrees()
    return counts[0], counts[1]


def main() -> None:
    """Run the command that the module's docstring describes."""
    num_graphs, where = int(sys.argv[1]), (*sys.argv, "cpu")[2]
    compute = on_device(open_device(0)) if where == "wgpu" else on_cpu
    num_elements, num_bounded = try_many(num_graphs, compute)
    print(f"{num_graphs} graphs on {where}: {num_elements} elements, {num_bounded} with a bound")


if __name__ == "__main__":
    main()
