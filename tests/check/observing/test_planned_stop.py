"""A process ends before the planned step, and waits there for the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from entrenar_py.check.observing import FOLDER, STOP, planned_faults
from entrenar_py.check.observing.planned_faults import PlannedStop


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
