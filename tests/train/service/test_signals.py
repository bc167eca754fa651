"""Signals end a run after the step in work, or at once; a step that may wait has some seconds."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from entrenar_py.train.service.signals import Stopper

ENDED = """
import signal, sys, threading
from entrenar_py.train.service import signals
thread = threading.Thread(target=threading.Event().wait)
thread.start()  # what it computes is no longer needed
signals.end_with(4)
print("completed", end="")
signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_ends_a_process_whose_run_is_over() -> None:
    """With the run's exit code and all that was printed, though a thread still computes."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDED], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (4, "completed")


@dataclass
class Heard:
    """A server and a host that note what they are told."""

    at_once: list[bool] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def stop(self, reason: str, *, at_once: bool) -> None:
        assert reason == "the coordinator was stopped by SIGTERM"
        self.at_once.append(at_once)

    def note(self, what: str, text: str) -> None:
        assert what == "stopping"
        self.told.append(text)


@pytest.mark.parametrize(
    ("grace_s", "signals", "at_once", "told"),
    [
        (None, 1, [False], ["SIGTERM: stops after the current step"]),
        (0.05, 1, [False, True], ["SIGTERM: stops after the current step, 0.05 s at most"]),
        (
            None,
            2,
            [False, True],
            ["SIGTERM: stops after the current step", "SIGTERM: stops now"],
        ),
    ],
)
def test_when_a_run_ends(
    grace_s: float | None, signals: int, at_once: list[bool], told: list[str]
) -> None:
    heard: Any = Heard()

    async def stopped() -> None:
        stopper = Stopper(heard, heard.note, grace_s)
        for _ in range(signals):
            stopper.stop(signal.SIGTERM)
        await asyncio.sleep(0.2)

    asyncio.run(stopped())
    assert heard.at_once == at_once
    assert heard.told == told
