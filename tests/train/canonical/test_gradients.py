"""Adding one rank's micro-batches gives a node of the tree over all micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entrenar_py.train.canonical import gradients
from entrenar_py.train.canonical.exchange import add_tree

FIRST, SECOND = torch.zeros(7), torch.zeros(5, dtype=torch.bfloat16)


def leaves(count: int) -> list[gradients.Gradients]:
    """Return the gradients of `count` micro-batches, for two parameters of two dtypes."""
    draws = torch.Generator().manual_seed(count)
    return [
        {one: torch.randn(one.shape, generator=draws).to(one.dtype) for one in (FIRST, SECOND)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_fold_has_the_bits_of_the_tree(count: int) -> None:
    """The counter's sum of 2^i micro-batches has the tree's bits, and no node is left over."""
    nodes = leaves(count)
    expected = []
    for one in (FIRST, SECOND):
        expected.append(torch.empty_like(one))
        add_tree(torch.stack([node[one] for node in nodes]), scale=1.0, out=expected[-1])
    counter = gradients.Counter()
    for node in nodes[:-1]:
        counter.push(node)
    got: list[Tensor] = [nodes[-1][SECOND], nodes[-1][FIRST]]
    counter.complete([SECOND, FIRST], got)
    assert torch.equal(got[1], expected[0])
    assert torch.equal(got[0], expected[1])
    assert not any(counter._levels)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
def test_as_many_nodes_wait_as_bits_are_set(count: int) -> None:
    """After k micro-batches, as many nodes are pending as bits are set in k."""
    counter = gradients.Counter()
    for node in leaves(count):
        counter.push(node)
    assert sum(map(bool, counter._levels)) == count.bit_count()


def test_taking_leaves_nothing_behind() -> None:
    """`take` resets `.grad`, and leaves out parameters without a gradient."""
    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    one.sum().backward()  # type: ignore[no-untyped-call]
    assert list(gradients.take([one, other])) == [one]
    assert one.grad is None
