"""What the harness plans for a rank: learning rates, and the end of its process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from entrenar_py.check.observing import FOLDER, RATES, STOP, planned_faults
from entrenar_py.check.observing.planned_faults import PlannedRates, PlannedStop
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


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Return the exit codes with which the process was to end."""
    codes: list[int] = []
    leave: Callable[[int], None] = codes.append
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return codes


def test_without_a_plan_nothing_ends(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is not to be stopped goes on, whatever the step."""
    monkeypatch.delenv(STOP, raising=False)
    PlannedStop(0, 1).perhaps_end(7, 0)
    assert ended == []


@pytest.mark.parametrize(
    ("step", "micro_batch", "codes"), [(2, 0, []), (3, 1, []), (3, 0, [0]), (4, 0, [0])]
)
def test_the_step_before_which_it_ends(
    step: int, micro_batch: int, codes: list[int], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the first micro-batch of the step, or of a later one."""
    monkeypatch.setenv(STOP, "3")
    PlannedStop(0, 1).perhaps_end(step, micro_batch)
    assert ended == codes


@pytest.mark.parametrize(("begins", "step"), [(0, 3), (3, 6), (4, 6)])
def test_steps_after_a_resume_are_counted_as_the_script_says(
    begins: int, step: int, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that doesn't say how many steps were made before it counts its own, from 0."""
    monkeypatch.setenv(STOP, "6 from 3")
    stop = PlannedStop(0, 1, begins=begins)
    stop.perhaps_end(step - 1, 0)
    assert ended == []
    stop.perhaps_end(step, 0)
    assert ended == [0]


def test_a_rank_that_never_comes_is_not_waited_for(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for other ranks has a limit, and leaves a mark for them."""
    monkeypatch.setenv(STOP, "3")
    monkeypatch.setattr(planned_faults, "PATIENCE_S", 0.02)
    PlannedStop(1, 2).perhaps_end(3, 0)
    assert ended == [0]
    assert (Path(os.environ[FOLDER]) / "00001.before-3").exists()
