"""The calls that the linear layer makes to the device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from entrenar_py.compute import Pair, linear
from entrenar_py.compute.wgpu import WgpuBackend


class Counted:
    """Products on the CPU. Records the number of products of each call."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[Tensor]:
        self.batches.append(len(pairs))
        return [a @ b for a, b in pairs]


@pytest.mark.parametrize(
    ("trained", "batches"), [("xw", [1, 2]), ("x", [1, 1]), ("w", [1, 1]), ("b", [1])]
)
def test_only_the_products_needed(trained: str, batches: list[int]) -> None:
    """Backward computes only the gradients that autograd needs, in one call."""
    leaves = {"x": torch.ones(4, 3), "w": torch.ones(2, 3), "b": torch.ones(2)}
    for name in trained:
        leaves[name].requires_grad_()
    products = Counted()
    linear.apply(products, *leaves.values()).sum().backward()  # type: ignore[no-untyped-call]
    assert products.batches == batches
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(trained)


@pytest.mark.wgpu
def test_one_submission_each_way(wgpu_backend: WgpuBackend) -> None:
    """Forward takes one submission, and the two products of backward take one, too."""
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    before = wgpu_backend.submissions
    loss = wgpu_backend.linear(x, weight, None).sum()
    assert wgpu_backend.submissions == before + 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert wgpu_backend.submissions == before + 2
