"""Mean, norm, clip and step agree with torch's own over many steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from entrenar_py.train.arithmetic import optimizer
from entrenar_py.train.arithmetic.optimizer import Rule, Vector

SIZE, STEPS, RATE = 64, 200, 0.05
DECAYED = (np.arange(SIZE) < 40).astype(np.float32)
UNIT_ROUNDOFF = 2.0**-24


def _gradients(seed: int = 0) -> list[Vector]:
    """Return gradients of many magnitudes, with elements that are always 0."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-4, 1, SIZE) * (np.arange(SIZE) % 7 > 0)
    return [(rng.standard_normal(SIZE) * scale).astype(np.float32) for _ in range(STEPS)]


def _torch_weights(kind: str, weight_decay: float, start: Vector) -> list[NDArray[np.float64]]:
    """Return torch.optim's weights in float64, with a group that decays and one that does not."""
    weights = torch.from_numpy(start).double()
    groups: list[dict[str, Any]] = [
        {"params": [weights[:40].clone().requires_grad_()], "weight_decay": weight_decay},
        {"params": [weights[40:].clone().requires_grad_()], "weight_decay": 0.0},
    ]
    theirs: torch.optim.Optimizer
    if kind == "adamw":
        theirs = torch.optim.AdamW(groups, lr=RATE)
    else:
        theirs = torch.optim.SGD(groups, lr=RATE, momentum=0.9 if kind == "momentum" else 0.0)
    history = []
    for gradient in _gradients():
        for group, part in zip(groups, np.split(gradient, [40]), strict=True):
            group["params"][0].grad = torch.from_numpy(part).double()
        theirs.step()
        both = torch.cat([group["params"][0].detach() for group in groups])
        history.append(both.numpy())
    return history


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_steps_are_torch_s(kind: str, weight_decay: float) -> None:
    """Weights agree with torch's over 200 steps, within the float32 rounding of that many.

    A step rounds a weight at most 4 times relative to the largest it has been. It rounds the update
    8 times (moments, root, quotient, rate) relative to the largest update. Momentum carries the
    error of an update on for 1 / (1 - 0.9) = 10 steps.
    """
    start = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
    weights, state = start.copy(), optimizer.initial_state(kind, SIZE)
    rule = Rule(kind, weight_decay, DECAYED)
    before: NDArray[np.float64] = start.astype(np.float64)
    largest: NDArray[np.float64] = np.abs(before)
    moved = np.zeros(SIZE)
    expected = _torch_weights(kind, weight_decay, start)
    for step, (gradient, theirs) in enumerate(zip(_gradients(), expected, strict=True), start=1):
        kept = gradient.copy()
        optimizer.step(rule, weights, gradient, state, RATE)
        assert gradient.tobytes() == kept.tobytes()
        largest, moved = np.maximum(largest, np.abs(theirs)), moved + np.abs(theirs - before)
        before = theirs
        bound = UNIT_ROUNDOFF * (4 * step * largest + 8 * 10 * moved)
        assert (np.abs(weights - theirs) <= bound).all(), f"step {step}"


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_decay_without_a_decayed_group_is_none(kind: str) -> None:
    """`decayed=None` and a mask of zeros give the bits of no decay."""
    results = set()
    for rule in (
        Rule(kind, 0.0, DECAYED),
        Rule(kind, 0.1, None),
        Rule(kind, 0.1, np.zeros(SIZE, np.float32)),
    ):
        weights, state = np.ones(SIZE, np.float32), optimizer.initial_state(kind, SIZE)
        for gradient in _gradients()[:5]:
            optimizer.step(rule, weights, gradient, state, RATE)
        results.add(weights.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("sgd", {}),
        ("momentum", {"momentum": 5}),
        ("adamw", {"exp_avg": 5, "exp_avg_sq": 5, "count": 1}),
    ],
)
def test_state_starts_at_zero(kind: str, sizes: dict[str, int]) -> None:
    """Each optimizer's state has its vectors, in order, all zero."""
    state = optimizer.initial_state(kind, 5)
    assert {name: len(vector) for name, vector in state.items()} == sizes
    assert all(not vector.any() and vector.dtype == np.float32 for vector in state.values())


@given(st.integers(0, 99), st.floats(1e-3, 1e3))
def test_clip_is_torch_s(seed: int, clip_norm: float) -> None:
    """Clipping agrees with clip_grad_norm_ in float64, within two roundings."""
    gradient = _gradients(seed)[0]
    norm = optimizer.norm_l2(gradient)
    clipped = optimizer.clip(gradient, norm, clip_norm)
    tensor = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    tensor.grad = torch.from_numpy(gradient).double()
    their_norm = torch.nn.utils.clip_grad_norm_([tensor], clip_norm)
    assert norm == pytest.approx(their_norm.item(), rel=1e-13)
    theirs = tensor.grad.numpy()
    assert (np.abs(clipped - theirs) <= 2.1 * UNIT_ROUNDOFF * np.abs(theirs)).all()
    assert optimizer.norm_l2(clipped) <= clip_norm * (1 + 4 * UNIT_ROUNDOFF) or clipped is gradient


def test_what_is_small_enough_is_not_clipped() -> None:
    """A gradient below the limit, or without one, is returned itself."""
    gradient = np.array([3, 4], np.float32)
    assert optimizer.norm_l2(gradient) == 5.0
    assert optimizer.clip(gradient, 5.0, None) is gradient
    assert optimizer.clip(gradient, 5.0, 5.1) is gradient
    assert optimizer.clip(gradient, 5.0, 4.9) is not gradient


@pytest.mark.parametrize(
    "length", [1, 2**15 - 1, 2**15 + 1, 2**18 + 5, 2**20 + 3 * 2**15, 2**21 + 7]
)
def test_threads_change_no_bit(length: int) -> None:
    """The norm adds squares by 2^15, and these sums, whichever thread computes them."""
    gradient = np.random.default_rng(length).standard_normal(length, np.float32)
    parts = np.split(gradient, range(2**15, length, 2**15))
    sums = np.array([np.square(part, dtype=np.float64).sum() for part in parts])
    norm = optimizer.norm_l2(gradient)
    assert norm == math.sqrt(sums.sum())
    clipped = optimizer.clip(gradient, norm, norm / 3)
    assert clipped.tobytes() == (gradient * np.float32(norm / 3 / (norm + 1e-6))).tobytes()


def test_the_norm_of_huge_gradients_is_finite() -> None:
    """Squares that overflow float32 still give a finite norm."""
    gradient = np.full(4, 3e38, np.float32)
    assert optimizer.norm_l2(gradient) == pytest.approx(6e38, rel=1e-7)
    assert optimizer.norm_l2(np.full(4, 1e-30, np.float32)) == pytest.approx(2e-30, rel=1e-7)


def test_the_mean_divides_once() -> None:
    """The mean is a new vector, correctly rounded, and the sum stays unchanged."""
    total = np.array([1, 10, -7], np.float32)
    assert optimizer.mean(total, 3).tolist() == (total / np.float32(3)).tolist()
    assert total.tolist() == [1, 10, -7]


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_overflow_is_silent_and_visible(kind: str) -> None:
    """Overflow gives no warning, but weights that are not finite, as in torch."""
    weights, state = np.ones(2, np.float32), optimizer.initial_state(kind, 2)
    for _ in range(3):
        gradient = np.full(2, 3e38, np.float32)
        optimizer.step(Rule(kind, 1.0, np.ones(2, np.float32)), weights, gradient, state, 1e300)
    assert not np.isfinite(weights).any()
