"""Runs scenarios for the harness: each once, each under a deadline, each trace kept if asked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from entrenar_py import systems, trace
from entrenar_py.checks import Check
from entrenar_py.contract import Invariant
from entrenar_py.errors import SystemFailure
from entrenar_py.scenario import Scenario
from entrenar_py.verdict import Finding, inconclusive

RUN_DEADLINE_S = 120
REMEMBERED = 400  # traces; a baseline is asked for again soon or never


class Runner:
    """Runs and remembers. `trace_folder` receives every trace as `<scenario digest>.jsonl`."""

    def __init__(self, trace_folder: Path | None = None) -> None:
        self._folder = trace_folder
        self._known: dict[Scenario, trace.Trace] = {}

    def run(self, scenario: Scenario) -> trace.Trace:
        """The trace of `scenario`: run now, or remembered (a scenario is its run)."""
        if scenario not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            with _deadline(RUN_DEADLINE_S):
                result = systems.run(scenario)
            if self._folder is not None:
                trace.save(result, self._folder / f"{scenario.digest}.jsonl")
            self._known[scenario] = result
        return self._known[scenario]

    def try_scenario(self, invariant: Invariant, check: Check, scenario: Scenario) -> Finding:
        """The check's finding on `scenario` and the runs it must be judged beside."""
        traces = [self.run(member) for member in check.family(scenario)]
        return judge(invariant, check, traces)


def judge(invariant: Invariant, check: Check, traces: Sequence[trace.Trace]) -> Finding:
    """The check's finding on `traces`; inconclusive, with the reason, if the check crashes."""
    try:
        return check.judge(invariant, traces)
    except Exception as error:  # noqa: BLE001  (a checker that crashed knows nothing)
        reason = f"the check {check.name} crashed: {type(error).__name__}: {error}"
        return inconclusive(invariant.id, reason)


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Interrupts a run that hangs; the system's boundary turns that into a failed trace.

    By SIGALRM, so only where this is the main thread of a system that has it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SystemFailure(f"the run took longer than {seconds} s and was stopped")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
