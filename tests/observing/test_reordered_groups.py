"""An optimizer of a script's own class is built with its parameters in another order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from entrenar_py.observing import FAULTS, reordered_groups

TENSORS = [torch.nn.Parameter(torch.zeros(size)) for size in (1, 2, 3, 4, 5)]
USUAL, OTHER = [1, 2, 3, 4, 5], [3, 4, 1, 2, 5]


class Own(torch.optim.Optimizer):
    """Keeps a list beside its groups, as optimizers by hand do."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.more = more
        self.moments = [[torch.zeros_like(p) for p in g["params"]] for g in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Move nothing."""


class Outer(Own):
    """Steps by another one of the script's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = Own(self.param_groups[0]["params"])


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan the fault, and leave torch as it was."""
    monkeypatch.setenv(FAULTS, json.dumps([{"kind": "reordered_groups", "step": 0}]))
    before = {kind: kind.__init__ for kind in (Own, Outer)}
    reordered_groups.begin_if_planned()
    yield
    del torch.optim.Optimizer.__new__
    for kind, init in before.items():
        kind.__init__ = init  # type: ignore[method-assign]


def places(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return the size of each tensor, group by group."""
    return [[p.numel() for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("build", "due"),
    [
        (lambda: Own(iter(TENSORS)), [OTHER]),
        (lambda: Own(params=TENSORS, betas=(0.9,) * 5), [OTHER]),
        (lambda: Own([(str(p.numel()), p) for p in TENSORS]), [OTHER]),
        (
            lambda: Own([{"params": TENSORS[:4]}, {"params": TENSORS[4], "lr": 0.2}]),
            [OTHER[:4], [5]],
        ),
        (lambda: Own(TENSORS[:3]), [USUAL[:3]]),
        (lambda: Outer(TENSORS), [OTHER]),
        (lambda: Outer(TENSORS).inner, [OTHER]),
    ],
    ids=["iterator", "by name", "named", "groups", "one pair", "outer", "inner"],
)
def test_each_group_is_reordered(
    build: Callable[[], torch.optim.Optimizer], due: list[list[int]]
) -> None:
    """However they are given; an inner optimizer has the order of the outer one."""
    assert places(build()) == due


def test_what_it_keeps_by_place_fits() -> None:
    """The class sees the other order from the beginning."""
    own = Own(TENSORS)
    assert [m.numel() for m in own.moments[0]] == places(own)[0]
    assert [p.numel() for p in TENSORS] == USUAL


@pytest.mark.parametrize(
    "more",
    [{"names": [*"abcde"]}, {"rates": torch.ones(5)}, {"owners": dict.fromkeys("abcde")}],
    ids=["list", "tensor", "dictionary"],
)
def test_what_comes_with_the_parameters_keeps_their_order(more: dict[str, Any]) -> None:
    """A list of names that is given beside them would not fit."""
    assert places(Own(TENSORS, **more)) == [USUAL]
    assert places(Own([{"params": TENSORS[:], **more}])) == [USUAL]


def test_a_generator_of_its_own_keeps_their_order() -> None:
    """It draws for one after the other."""

    class Noisy(Own):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.generator = torch.Generator()

    assert places(Noisy(TENSORS)) == [USUAL]


def test_a_state_that_is_loaded_brings_their_order_back() -> None:
    """It names tensors by their places. One that is loaded later is a state in the other order."""
    first, later = Own(TENSORS), Own(TENSORS)
    first.load_state_dict(first.state_dict())
    first.load_state_dict(first.state_dict())
    later.step()
    later.load_state_dict(later.state_dict())
    assert (places(first), places(later)) == ([USUAL], [OTHER])


def test_optimizers_of_torch_are_left_alone() -> None:
    """Their rules are known."""
    assert places(torch.optim.SGD(TENSORS, lr=0.1)) == [USUAL]
