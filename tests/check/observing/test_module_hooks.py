"""Hooks tell when all gradients of a backward pass are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from entrenar_py.check.observing import module_hooks
from entrenar_py.check.observing.module_hooks import GradientHooks


def told(*, alone: bool) -> list[tuple[bool, ...]]:
    """Return which of two tensors had a gradient in each of two passes.

    The first pass is of a loss of both tensors, the second of one of the first tensor only. With
    `alone` they are computed by torch.autograd.grad.
    """
    heard: list[tuple[bool, ...]] = []
    begun: list[int] = []

    def tell(gradients: Sequence[Tensor | None]) -> None:
        heard.append(tuple(one is not None for one in gradients))

    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    passes = GradientHooks([first, second], lambda: begun.append(len(heard)), dict, tell, tell)
    for loss, inputs in (((first * second).sum(), [first, second]), (first.sum(), [first])):
        if alone:
            torch.autograd.grad(loss, inputs)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
    passes.remove()
    (first * second).sum().backward()  # type: ignore[no-untyped-call]
    assert begun == [0, 1], "each was told to begin, before it was told what it gave"
    return heard


def test_a_sparse_gradient_is_not_held() -> None:
    """It stays the one that shares its memory with the gradient of the output, as unobserved."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    places: list[int] = []
    heard: list[Tensor | None] = []
    for hooked in (False, True):
        table.zero_grad()
        hooks = GradientHooks([table.weight], lambda: None, dict, heard.extend, heard.extend)
        if not hooked:
            hooks.remove()
        output = table(torch.arange(4))
        output.register_hook(lambda gradient: places.append(gradient.data_ptr()))
        (output * torch.randn(4, 3)).sum().backward()
        assert table.weight.grad is not None, "a pass gives one"
        assert table.weight.grad._values().data_ptr() == places[-1], hooked
        hooks.remove()
    (given,) = heard
    assert given is not None
    assert table.weight.grad is not None
    assert given.to_dense().equal(table.weight.grad.to_dense())


def test_a_pass_is_told_once() -> None:
    """Each pass is reported once with its gradients, and not after the hooks are removed."""
    assert told(alone=False) == [(True, True), (True, False)]


def test_gradients_computed_apart_are_told_too() -> None:
    """Passes of torch.autograd.grad are reported; torch's own multi-tensor hook raises there."""
    assert told(alone=True) == [(True, True), (True, False)]


def test_gradients_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are held at a time; what was taken of them is told in their order."""
    monkeypatch.setattr(module_hooks, "_BYTES_MIN", 0)
    parameters = [torch.ones(size, requires_grad=True) for size in (2, 3, 4, 5, 6)]
    most, heard = [], list[str | None]()

    def take(gradients: Mapping[int, Tensor]) -> dict[int, str]:
        most.append(len(gradients))
        return {place: f"{place} of {gradient.numel()}" for place, gradient in gradients.items()}

    GradientHooks(parameters, lambda: None, take, heard.extend, heard.extend)
    used = [parameter for parameter in parameters if parameter.numel() != 4]
    torch.cat(used).sum().backward()  # type: ignore[no-untyped-call]
    assert heard == ["0 of 2", "1 of 3", None, "3 of 5", "4 of 6"]
    assert sum(most) == 4
    assert max(most) == 2, "a quarter of the gradients is five numbers"
