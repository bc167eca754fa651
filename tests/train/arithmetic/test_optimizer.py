"""The optimizer's rules and the learning rate, against torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.optim import lr_scheduler

from entrenar_py.train.arithmetic import optimizer
from entrenar_py.train.arithmetic.optimizer import Rule, Vector, learning_rate

PEAK = 0.3


def _ours(kind: str, *, warmup_steps: int, num_steps: int) -> list[float]:
    return [
        learning_rate(step, peak=PEAK, kind=kind, warmup_steps=warmup_steps, num_steps=num_steps)
        for step in range(num_steps)
    ]


def _torch(optimizer: torch.optim.Optimizer, scheduler: object, num_steps: int) -> list[float]:
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_cosine_is_torch_s_cosine_annealing(num_steps: int) -> None:
    """`cosine` is CosineAnnealingLR with T_max = num_steps and eta_min = 0."""
    optimizer = _optimizer()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    expected = _torch(optimizer, scheduler, num_steps)
    ours = _ours("cosine", warmup_steps=0, num_steps=num_steps)
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_linear_is_torch_s_linear_decay(num_steps: int) -> None:
    """`linear` is LinearLR from 1 to 0 over num_steps."""
    optimizer = _optimizer()
    scheduler = lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_steps
    )
    expected = _torch(optimizer, scheduler, num_steps)
    ours = _ours("linear", warmup_steps=0, num_steps=num_steps)
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("warmup_steps", [1, 3, 9, 12])
def test_warmup_then_decay_is_torch_s_sequence(warmup_steps: int) -> None:
    """Warm-up and decay are LinearLR up, then down: a LambdaLR of the closed form, step by step."""
    num_steps = 9

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return 1 - (step - warmup_steps) / (num_steps - warmup_steps)

    optimizer = _optimizer()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: factor(min(step, num_steps - 1)))
    expected = _torch(optimizer, scheduler, num_steps)
    ours = _ours("linear", warmup_steps=warmup_steps, num_steps=num_steps)
    assert ours == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 30), st.integers(1, 30))
def test_rates_rise_to_the_peak_and_fall(kind: str, warmup_steps: int, num_steps: int) -> None:
    """Rates are positive, never above the peak, and rise only during the warm-up."""
    rates = _ours(kind, warmup_steps=warmup_steps, num_steps=num_steps)
    assert all(0 < rate <= PEAK for rate in rates)
    assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)
    assert rates[warmup_steps:][:1] in ([], [PEAK])


def test_constant_is_constant() -> None:
    """The rate stays at the peak after the warm-up."""
    assert _ours("constant", warmup_steps=1, num_steps=4) == [PEAK / 2, PEAK, PEAK, PEAK]


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


def _by_halves(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    while rows.shape[1] > 1:
        rows = np.add(*np.split(rows, 2, axis=1))
    return rows[:, 0]


@pytest.mark.parametrize(
    "length", [1, 2**15 - 1, 2**15 + 1, 2**18 + 5, 2**20 + 3 * 2**15, 2**21 + 7]
)
def test_threads_change_no_bit(length: int) -> None:
    """The norm adds squares by halves, in rows of 2^15, whichever thread computes a row."""
    gradient = np.random.default_rng(length).standard_normal(length, np.float32)
    rows = np.zeros(-(-length // 2**15) * 2**15)
    rows[:length] = np.square(gradient, dtype=np.float64)
    sums = _by_halves(rows.reshape(-1, 2**15))
    filled = np.zeros((1, 2 ** math.ceil(math.log2(len(sums)))))
    filled[0, : len(sums)] = sums
    norm = optimizer.norm_l2(gradient)
    assert norm == math.sqrt(_by_halves(filled)[0])
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
