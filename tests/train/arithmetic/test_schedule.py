"""The learning rate agrees with torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from entrenar_py.train.arithmetic.schedule import learning_rate

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
