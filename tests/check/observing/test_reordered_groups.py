"""An optimizer of a script's own class is built with its parameters in another order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from entrenar_py.check.observing import FAULTS, planned_faults

LAYERS = [torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(1, 3), torch.nn.Linear(1, 4)]
TENSORS = [p for layer in LAYERS for p in layer.parameters()]  # weight, weight, bias, weight, bias
USUAL, OTHER = [2, 3, 3, 4, 4], [4, 4, 3, 3, 2]

Kind = Callable[..., Any]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kind, Kind]]:
    """Plan the fault, define two classes, and leave torch as it was."""
    monkeypatch.setenv(FAULTS, json.dumps([{"kind": "reordered_groups", "step": 0}]))
    planned_faults.begin()

    class Own(torch.optim.Optimizer):
        """Keeps a list beside its groups, as optimizers by hand do."""

        def __init__(self, params: Any, lr: float = 0.1, **_: Any) -> None:
            if isinstance(params, torch.nn.Module):
                params = params.parameters()
            params = list(params)
            super().__init__(params, {"lr": lr})
            self.moments = [[torch.zeros_like(p) for p in g["params"]] for g in self.param_groups]

    class Outer(Own):
        """Is derived from another one of the script's, and steps by a second one."""

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.inner = Own(self.param_groups[0]["params"])

    yield Own, Outer
    del torch.optim.Optimizer.__init_subclass__


@pytest.fixture
def own(kinds: tuple[Kind, Kind]) -> Kind:
    """Return the class of an optimizer of the script's."""
    return kinds[0]


def places(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return the size of each tensor, group by group."""
    return [[len(p) for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("build", "due"),
    [
        (lambda own, _: own(iter(TENSORS)), [OTHER]),
        (lambda own, _: own(params=TENSORS, betas=(0.9, 0.99)), [OTHER]),
        (lambda own, _: own([(str(place), p) for place, p in enumerate(TENSORS)]), [OTHER]),
        (
            lambda own, _: own([{"params": TENSORS[:3]}, {"params": TENSORS[3], "lr": 0.2}]),
            [OTHER[2:], [4]],
        ),
        (lambda own, _: own(TENSORS[1:3]), [[3, 3]]),
        (lambda own, _: own([LAYERS[2].bias, *TENSORS[:3]]), [[3, 3, 2, 4]]),
        (lambda own, _: own([LAYERS[1].bias, LAYERS[2].bias]), [[4, 3]]),
        (lambda own, _: own(torch.nn.Sequential(*LAYERS)), [USUAL]),
        (lambda _, outer: outer(TENSORS), [OTHER]),
        (lambda _, outer: outer(TENSORS).inner, [OTHER]),
    ],
    ids=[
        *("iterator", "by name", "named", "groups", "one layer", "vector first", "vectors"),
        *("model", "outer", "inner"),
    ],
)
def test_each_group_is_reordered(
    kinds: tuple[Kind, Kind], build: Kind, due: list[list[int]]
) -> None:
    """Layer by layer, as they are handed to a class; what it builds has the order that it got."""
    assert places(build(*kinds)) == due


def test_what_it_keeps_by_place_fits(own: Kind) -> None:
    """The class sees the other order from the beginning."""
    optimizer = own(TENSORS)
    assert [len(m) for m in optimizer.moments[0]] == places(optimizer)[0]
    assert [len(p) for p in TENSORS] == USUAL


def test_groups_stay_the_script_s(own: Kind) -> None:
    """It may keep one, to change its rate later."""
    group = {"params": iter(TENSORS), "lr": 0.2}
    optimizer = own([group])
    assert optimizer.param_groups[0] is group
    assert places(optimizer) == [OTHER]


@pytest.mark.usefixtures("kinds")
def test_optimizers_of_torch_are_left_alone() -> None:
    """Their rules are known."""
    assert places(torch.optim.SGD(TENSORS, lr=0.1)) == [USUAL]
