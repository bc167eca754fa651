"""A step is captured as one graph of core operations, or refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu import capture
from entrenar_py.compute.wgpu.bounds import rules
from entrenar_py.shared.errors import UsageError
from tests.compute.wgpu.steps import captured, plain, step

X = torch.linspace(-1, 2, 20).reshape(4, 5).requires_grad_()
HELD = torch.ones(5)


def operations(graph: GraphModule) -> set[str]:
    """Return the kinds of operations in a graph: `aten.mm.default`, ..."""
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("name", "num_kinds_max"), [("linear", 9), ("mlp", 20), ("decoder", 30)])
def test_a_step_is_captured_with_its_gradients(name: str, num_kinds_max: int) -> None:
    """The graph gives the step's results by core operations, each with its line."""
    run, inputs = step(name)
    graph = captured(name)
    for got, expected in zip(graph(*plain(inputs)), run(*inputs), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-5)
    assert len(operations(graph)) <= num_kinds_max
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert all(".py:" in node.meta["line"] and "val" in node.meta for node in calls)
    assert {node.target for node in calls} <= set(rules.RULES)


def test_backward_nodes_have_the_line_of_what_they_differentiate() -> None:
    """A backward node has the line of its forward operation, not of the call of autograd."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x)
        return torch.autograd.grad(y.sum(), x)

    graph = capture.capture(run, [X])
    here = run.__code__.co_firstlineno
    lines = [n.meta["line"] for n in graph.graph.nodes if "mul" in n.name or "sub" in n.name]
    assert lines
    assert set(lines) == {f"{Path(__file__).name}:{here + 1} in run"}


def branch(x: Tensor) -> tuple[Tensor, ...]:
    return (x if x.sum() > 0 else -x,)


def item(x: Tensor) -> tuple[Tensor, ...]:
    return (x * x.max().item(),)


def leaves_torch(x: Tensor) -> tuple[Tensor, ...]:
    return (x * float(x.detach().numpy().sum()),)


def selects(x: Tensor) -> tuple[Tensor, ...]:
    return (x[x > 0],)


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(x, 0.5),)


def writes_to_its_input(x: Tensor) -> tuple[Tensor, ...]:
    x.detach()[1:].add_(1)
    return (x * 2,)


def writes_to_what_it_holds(x: Tensor) -> tuple[Tensor, ...]:
    HELD.view(5, 1).mul_(2)
    return (x * HELD,)


@pytest.mark.parametrize(
    ("function", "offset", "reason"),
    [
        (branch, 1, "values of tensors"),
        (item, 1, "values of tensors"),
        (leaves_torch, 1, "values of tensors"),
        (selects, 1, "values of tensors"),
        (draws, 1, "random"),
        (writes_to_its_input, 1, "writes to"),
        (writes_to_what_it_holds, 1, "writes to"),
    ],
)
def test_what_has_no_place_in_a_graph_is_refused_by_its_line(
    function: Callable[..., tuple[Tensor, ...]], offset: int, reason: str
) -> None:
    """Unsupported operations are refused with their line, and no tensor is changed."""
    line = f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset} in "
    with pytest.raises(UsageError, match=reason) as refused:
        capture.capture(function, [X])
    assert line + function.__name__ in str(refused.value)
    assert torch.equal(HELD, torch.ones(5))


def test_writes_within_a_step_become_values() -> None:
    """In-place writes, also through views, become new values, and gradients flow through them."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        y[1:3] = 0
        y.view(-1)[::7].mul_(3)
        y.relu_()
        return y, *torch.autograd.grad(y.sum(), x)

    graph = capture.capture(run, [X])
    for got, expected in zip(graph(X.detach()), run(X), strict=True):
        assert torch.equal(got, expected)
    assert not any(name.split(".")[1].endswith("_") for name in operations(graph))


def branches(x: Tensor) -> tuple[Tensor, ...]:
    """Branch on masks that follow from the shape of `x` alone, one of them written to."""
    mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).tril()
    if mask.all():
        return (x,)
    mask[:, 0] = False
    rows = mask.any(1).nonzero().flatten()
    if not torch.equal(rows, torch.arange(1, x.shape[-1])):
        return (x,)
    return (x.masked_fill(mask[int(rows[0].item())], 0.0)[..., rows],)


def test_a_branch_on_what_follows_from_no_input_is_decided() -> None:
    """Masks made while capturing have values: branches, sizes and numbers may depend on them."""
    graph = capture.capture(branches, [X])
    assert torch.equal(graph(X.detach())[0], branches(X.detach())[0])
    assert graph(X.detach())[0].shape == (4, 4)


def test_a_mask_that_an_input_was_written_to_has_no_values() -> None:
    """What was known of a tensor and its views is forgotten once an input is written to it."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        mask = torch.zeros(2, 5)
        view = mask[0]
        mask[0] = x.detach()[0]
        return (x if view.any() else -x,)

    with pytest.raises(UsageError, match="reads the values of tensors"):
        capture.capture(run, [X])


def test_what_follows_from_no_input_is_computed_once() -> None:
    """Positions and masks become constants, but not tensors of one repeated number."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        angle = torch.arange(5, dtype=torch.float32).sin()
        return (x * angle + torch.ones(4, 5).tril() + torch.zeros(5),)

    graph = capture.capture(run, [X])
    assert operations(graph) == {
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.full.default",
    }
    assert torch.equal(graph(X.detach())[0], run(X)[0])
