"""The formulas of the step rule against torch.optim, and what can't be known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.checks import update_rule
from entrenar_py.checks.update_rule import Rule
from entrenar_py.trace import Start, TensorRecord, Tensors, Update, record_tensor
from tests.checks.traces import scenario

NUM_STEPS, RATE, DECAY, CLIP = 6, 0.05, 0.1, 0.5


def record(tensor: torch.Tensor | None) -> Tensors:
    """A tensor called `w`, with its values."""
    assert tensor is not None
    return {"w": record_tensor(tensor.detach().numpy().copy(), values=True)}


def update(step: int, weights: Tensors, gradient: Tensors, **changes: Any) -> Update:
    """An update clipped to half its norm, unless `changes` say otherwise."""
    usual: Mapping[str, Any] = {
        "step": step,
        "rank": 0,
        "loss": 1.0,
        "weight": 1.0,
        "learning_rate": RATE,
        "finite": True,
        "grad_norm": 1.0,
        "applied_norm": CLIP,
    }
    return Update(weights=weights, gradient=gradient, **{**usual, **changes})


def rule(optimizer: str, weights: Tensors, *, step: int = 0, decayed: Any = ("w",)) -> Rule:
    """The rule of a rank that starts with `weights` before `step`."""
    start = Start(step=step, rank=0, weights=weights, decayed=decayed)
    return update_rule.after(None, start, scenario(optimizer=optimizer, weight_decay=DECAY))


def trained(optimizer: str) -> tuple[Tensors, list[Update]]:
    """The initial weights and the updates of torch's own optimizer on random gradients."""
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    kinds: Mapping[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD([weight], lr=RATE, weight_decay=DECAY),
        "momentum": lambda: torch.optim.SGD([weight], lr=RATE, momentum=0.9, weight_decay=DECAY),
        "adamw": lambda: torch.optim.AdamW([weight], lr=RATE, weight_decay=DECAY),
    }
    torch_optimizer = kinds[optimizer]()
    initial, updates, rng = record(weight), [], np.random.default_rng(0)
    for step in range(NUM_STEPS):
        gradient = torch.from_numpy(rng.normal(size=7))
        weight.grad = gradient * CLIP
        torch_optimizer.step()
        updates.append(update(step, record(weight), record(gradient)))
    return initial, updates


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_the_formulas_are_torchs(optimizer: str) -> None:
    """In float64 nothing but rounding lies between the two, step after step."""
    initial, updates = trained(optimizer)
    followed = rule(optimizer, initial)
    for one in updates:
        ((name, expected),) = followed.step(one)
        got = one.weights[name].values()
        assert got is not None
        np.testing.assert_allclose(expected.weight, got, rtol=1e-12, atol=1e-14)
        assert (expected.moved > 0).all()


@pytest.mark.parametrize(("optimizer", "known"), [("sgd", True), ("adamw", False)])
def test_moments_that_are_not_known(optimizer: str, known: bool) -> None:
    """A rank that joined, or missed a step, has unknown moments; plain SGD needs none."""
    _, updates = trained(optimizer)
    joined = rule(optimizer, updates[2].weights, step=3)
    assert bool(list(joined.step(updates[3]))) == known
    followed = rule(optimizer, updates[0].weights)
    list(followed.step(updates[0]))
    assert bool(list(followed.step(updates[2]))) == known
    assert bool(list(followed.step(updates[3]))) == known


def test_a_resume_keeps_the_moments() -> None:
    """After a resume the rule goes on, from the weights that were loaded."""
    initial, updates = trained("momentum")
    followed = rule("momentum", initial)
    list(followed.step(updates[0]))
    resumed = Start(step=1, rank=0, weights=updates[0].weights, resumed=True)
    assert update_rule.after(followed, resumed, followed.scenario) is followed
    assert list(followed.step(updates[1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norm": None},
        {"applied_norm": None},
        {"grad_norm": float("inf")},
        {"finite": False},
        {"gradient": {"w": TensorRecord("digest alone")}},
        {"gradient": {"other": TensorRecord("digest alone")}},
    ],
)
def test_what_was_not_recorded(changes: dict[str, Any]) -> None:
    """Without gradient, norms or weights there is nothing to expect, and no moments after it."""
    initial, updates = trained("momentum")
    followed = rule("momentum", initial)
    assert not list(
        followed.step(update(0, updates[0].weights, **{"gradient": updates[0].gradient, **changes}))
    )
    assert not list(followed.step(updates[1]))


def test_decay_that_was_not_declared() -> None:
    """Which tensors decay is the trainer's to say; until it does, nothing is expected."""
    initial, updates = trained("sgd")
    assert not list(rule("sgd", initial, decayed=None).step(updates[0]))
    (_, plain), (_, decayed) = (
        next(rule("sgd", initial, decayed=names).step(updates[0])) for names in ((), ("w",))
    )
    assert not np.array_equal(plain.weight, decayed.weight)
