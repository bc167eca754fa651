"""Steps are made with the learning rates of another run, and the script goes on with its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from entrenar_py.check.observing import RATES
from entrenar_py.check.observing.planned_faults import PlannedRates
from entrenar_py.check.observing.subject import Subject

MODEL = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))


def planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *optimizers: torch.optim.Optimizer
) -> PlannedRates:
    """Return rates of two steps, of which `1.weight` has its own, for these optimizers."""
    file = folder / "rates.json"
    moved = {"0.weight": {"momentum": 0.75}}
    steps = {"0": [0.5, {"1.weight": 2.0}, {}], "1": [0.25, {"1.weight": 1.0}, moved]}
    file.write_text(json.dumps(steps))
    monkeypatch.setenv(RATES, str(file))
    subject = Subject(MODEL, [*optimizers], declared=None, rank=0, world_size=1)
    subject.look_up()
    return PlannedRates(subject)


def stepping(*names: str) -> torch.optim.SGD:
    """Return an optimizer with a group for each of these tensors."""
    held = dict(MODEL.named_parameters())
    return torch.optim.SGD([{"params": [held[name]]} for name in names], lr=8.0)


def test_each_group_has_the_rate_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that multiplies the rate goes on from the script's own, not from the planned."""
    optimizer = stepping("0.weight", "1.weight")
    rates, schedule = planned(tmp_path, monkeypatch, optimizer), ExponentialLR(optimizer, 0.5)
    seen, momentum = [], []
    for number in range(3):
        rates.begin_step(number)
        seen.append([group["lr"] for group in optimizer.param_groups])
        momentum.append([group["momentum"] for group in optimizer.param_groups])
        optimizer.step()
        rates.end_step()
        schedule.step()
    assert seen == [[0.5, 2.0], [0.25, 1.0], [2.0, 2.0]]
    assert momentum == [[0, 0], [0.75, 0], [0, 0]]


def test_several_optimizers_keep_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of a step are recorded at its end, when a schedule may have moved the first one."""
    both = stepping("0.weight"), stepping("1.weight")
    planned(tmp_path, monkeypatch, *both).begin_step(0)
    assert [one.param_groups[0]["lr"] for one in both] == [8.0, 8.0]


def test_a_group_whose_tensors_have_two_rates_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the groups are not those of the other run."""
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=8.0)
    planned(tmp_path, monkeypatch, optimizer).begin_step(0)
    assert optimizer.param_groups[0]["lr"] == 8.0
