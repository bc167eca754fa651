"""An optimizer of a script's own class is built with its parameters in another order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.check.observing import FAULTS, reordered_groups

LAYERS = [torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(1, 3), torch.nn.Linear(1, 4)]
TENSORS = [p for layer in LAYERS for p in layer.parameters()]  # weight, weight, bias, weight, bias
MATRICES = [torch.nn.Parameter(torch.zeros(size, 1)) for size in (1, 2, 3)]  # of no module
USUAL, OTHER = [2, 3, 3, 4, 4], [4, 4, 3, 3, 2]


Kind = Callable[..., Any]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kind, Kind]]:
    """Plan the fault, define two classes, and leave torch as it was."""
    monkeypatch.setenv(FAULTS, json.dumps([{"kind": "reordered_groups", "step": 0}]))
    reordered_groups.begin_if_planned()

    class Own(torch.optim.Optimizer):
        """Keeps a list beside its groups, as optimizers by hand do."""

        def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
            params = list(params)
            super().__init__(params, {"lr": lr})
            self.more = more
            self.moments = [[torch.zeros_like(p) for p in g["params"]] for g in self.param_groups]
            if "projects" in more:
                self.shares = [more["projects"]() for _ in self.param_groups[0]["params"]]

        def step(self, closure: Any = None) -> Any:
            """Draw noise, if there is any."""
            if "noise" in self.more:
                self.more["noise"]()

    class Outer(Own):
        """Steps by another one of the script's, and draws by a generator of its own if told."""

        def __init__(self, params: Any, *, draws: bool = False) -> None:
            super().__init__(params)
            self.inner = Own(self.param_groups[0]["params"])
            self.generator = torch.Generator() if draws else None

    yield Own, Outer
    del torch.optim.Optimizer.__init_subclass__
    reordered_groups._draws = None


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
        (lambda own, _: own(params=TENSORS, betas=(0.9,) * 5), [OTHER]),
        (lambda own, _: own([(str(place), p) for place, p in enumerate(TENSORS)]), [OTHER]),
        (
            lambda own, _: own([{"params": TENSORS[:3]}, {"params": TENSORS[3], "lr": 0.2}]),
            [OTHER[2:], [4]],
        ),
        (lambda own, _: own(TENSORS[1:3]), [[3, 3]]),
        (lambda own, _: own([*MATRICES, LAYERS[2].bias]), [[3, 4, 2, 1]]),
        (lambda _, outer: outer(TENSORS), [OTHER]),
        (lambda _, outer: outer(TENSORS).inner, [OTHER]),
    ],
    ids=["iterator", "by name", "named", "groups", "one module", "no modules", "outer", "inner"],
)
def test_each_group_is_reordered(
    kinds: tuple[Kind, Kind], build: Kind, due: list[list[int]]
) -> None:
    """Module by module, as they are given; an inner optimizer has the order of the outer one."""
    assert places(build(*kinds)) == due


def test_what_it_keeps_by_place_fits(own: Kind) -> None:
    """The class sees the other order from the beginning."""
    optimizer = own(TENSORS)
    assert [len(m) for m in optimizer.moments[0]] == places(optimizer)[0]
    assert [len(p) for p in TENSORS] == USUAL


@pytest.mark.parametrize(
    "more",
    [{"names": [*"abcde"]}, {"rates": torch.ones(5)}, {"owners": dict.fromkeys("abcde")}],
    ids=["list", "tensor", "dictionary"],
)
def test_what_comes_with_the_parameters_keeps_their_order(own: Kind, more: dict[str, Any]) -> None:
    """A list of names that is given beside them would not fit."""
    assert places(own(TENSORS, **more)) == [USUAL]
    assert places(own([{"params": TENSORS[:], **more}])) == [USUAL]


def test_a_generator_of_its_own_keeps_their_order(kinds: tuple[Kind, Kind]) -> None:
    """It draws for one after the other."""
    assert places(kinds[1](TENSORS, draws=True)) == [USUAL]


@pytest.mark.parametrize(
    "projects",
    [
        lambda: torch.randn(3),
        lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
        lambda: np.random.normal(),
        random.random,
    ],
    ids=["torch", "a generator", "numpy", "python"],
)
def test_what_a_constructor_draws_brings_their_order_back(
    own: Kind, projects: Callable[[], Any]
) -> None:
    """Each tensor has its own random numbers from then on."""
    assert places(own(TENSORS, projects=projects)) == [USUAL]


def test_what_a_step_draws_is_counted(own: Kind) -> None:
    """By a generator that is made in the step, which no state of another one shows."""
    before = reordered_groups.states()
    own(TENSORS).step()
    assert reordered_groups.states() == before
    own(TENSORS, noise=lambda: torch.rand(2, generator=torch.Generator().manual_seed(3))).step()
    torch.rand(2)
    assert before != {"an optimizer": "1"} == reordered_groups.states()


def test_a_state_that_is_loaded_brings_their_order_back(own: Kind) -> None:
    """It names tensors by their places. One that is loaded later is a state in the other order."""
    first, later = own(TENSORS), own(TENSORS)
    first.load_state_dict(first.state_dict())
    first.load_state_dict(first.state_dict())
    later.step()
    later.load_state_dict(later.state_dict())
    assert (places(first), places(later)) == ([USUAL], [OTHER])


@pytest.mark.usefixtures("kinds")
def test_optimizers_of_torch_are_left_alone() -> None:
    """Their rules are known."""
    assert places(torch.optim.SGD(TENSORS, lr=0.1)) == [USUAL]
