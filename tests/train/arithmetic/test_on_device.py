"""Tests of the optimizer in a device's memory: the bits are those on the host.

Here the device is the CPU, through torch. On a GPU the same tests run where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar_py.train.arithmetic import on_device, optimizer
from entrenar_py.train.arithmetic.on_device import DeviceOptimizer
from entrenar_py.train.arithmetic.optimizer import Rule

PLACES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 1000, 2**15 + 3, 2**20 + 17])
def test_steps_have_the_bits_of_the_host(place: str, weight_decay: float, size: int) -> None:
    """Norms, clipped gradients, weights and moments are the host's after each of five steps."""
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = np.random.default_rng(size)
    rule = Rule("adamw", weight_decay, (np.arange(size) % 3 > 0).astype(np.float32))
    weights = rng.standard_normal(size, np.float32)
    state = optimizer.initial_state("adamw", size)
    copy, copied = weights.copy(), {name: one.copy() for name, one in state.items()}
    device = DeviceOptimizer(rule, torch.from_numpy(copy).to(place, copy=True), copied)
    for step in range(5):
        gradient = rng.standard_normal(size, np.float32) * np.float32(10.0 ** (step - 4))
        gradient[:: 7 + step] = 0
        norm = optimizer.norm_l2(gradient)
        clipped = optimizer.clip(gradient, norm, 0.5)
        optimizer.step(rule, weights, clipped, state, 1e-3 / (step + 1))
        uploaded = device.upload(gradient)
        assert device.norm_l2(uploaded) == norm
        theirs = device.clip(uploaded, norm, 0.5)
        assert theirs.cpu().numpy().tobytes() == clipped.tobytes()
        device.step(theirs, 1e-3 / (step + 1))
        device.copy_back(copy)
        assert copy.tobytes() == weights.tobytes()
        assert {n: a.tobytes() for n, a in copied.items()} == {
            n: a.tobytes() for n, a in state.items()
        }


def test_what_takes_its_steps_on_the_device() -> None:
    """AdamW of adapters does; other rules and whole models don't."""
    assert on_device.fits(Rule("adamw", 0.0, None), 33_000_000)
    assert not on_device.fits(Rule("adamw", 0.0, None), 4_000_000_000)
    assert not on_device.fits(Rule("sgd", 0.0, None), 1000)
    assert not on_device.fits(Rule("adamw", 0.0, None), 0)
