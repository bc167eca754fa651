"""A run that stalls is stopped, and the runs after it are right; one that goes on is left alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from entrenar_py import systems
from entrenar_py.check.harness import runner
from entrenar_py.check.harness.runner import Runner
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder

SCENARIO = Scenario(system="reference", workload="linear", world_size=2, seed=0, num_steps=3)
STOPPED = "SystemFailure: the run made no progress for 0.05 s and was stopped"


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    """Give the process of these tests back the trust that they take from it."""
    yield
    runner._distrusted.clear()


def hang() -> NoReturn:
    """Wait for ever."""
    threading.Event().wait()
    raise AssertionError("an event that no one sets was set")


def replace_run(monkeypatch: pytest.MonkeyPatch, run: Callable[[Scenario], trace.Trace]) -> None:
    """Let `run` be the system of SCENARIO in this process."""
    monkeypatch.setattr("entrenar_py.train.reference.run", run)


def test_a_run_that_hangs_is_stopped_and_the_next_is_made_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trace has failed with the reason; the next run is right, and made in another process.

    In this process every run hangs, so one that ends was made elsewhere.
    """
    right = systems.run(SCENARIO)
    replace_run(monkeypatch, lambda one: hang())
    before = signal.getsignal(signal.SIGALRM)
    stopped = Runner(patience_s=0.05).run(SCENARIO).end
    assert (stopped.status, stopped.reason) == ("failed", STOPPED)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    elsewhere = Runner().run(SCENARIO)  # by a process that has loaded less: its environment differs
    assert (elsewhere.events, elsewhere.end) == (right.events, right.end)


def test_a_run_that_goes_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes much longer than the patience is not stopped while it records events."""

    def slow(one: Scenario) -> trace.Trace:
        recorder = Recorder(one)
        for step in range(10):
            recorder.emit(trace.Membership(step=step, rank=0, change="joined"))
            signal.pause()  # until somebody looks whether it stalls
        return recorder.finish(status="completed")

    replace_run(monkeypatch, slow)
    result = Runner(patience_s=0.4).run(SCENARIO)
    assert (result.end.status, result.end.reason) == ("completed", "")
    assert len(result.events) == 11


def test_a_signal_that_comes_at_the_end_of_a_run_has_no_successor() -> None:
    """One that is handled after the timer was stopped leaves it so, and interrupts nothing."""
    with runner._interrupted(60.0):
        signal.setitimer(signal.ITIMER_REAL, 0)
        look = signal.getsignal(signal.SIGALRM)
    assert callable(look)
    look(signal.SIGALRM, None)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_import_is_never_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that takes longer than the patience is loaded whole; then the run is stopped."""
    (tmp_path / "slowly_loaded.py").write_text(
        "import signal\nfor _ in range(20):\n    signal.pause()\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def run(one: Scenario) -> trace.Trace:
        import slowly_loaded  # type: ignore[import-not-found]  # noqa: F401

        return hang()

    replace_run(monkeypatch, run)
    assert Runner(patience_s=0.05).run(SCENARIO).end.reason == STOPPED
    assert sys.modules.pop("slowly_loaded").whole


def test_outside_the_main_thread_no_run_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals reach the main thread alone: elsewhere a run may take as long as it likes."""
    runs = Runner(patience_s=1e-9)
    thread = threading.Thread(target=runs.run, args=(SCENARIO,))
    thread.start()
    thread.join()
    monkeypatch.setattr(systems, "run", pytest.fail)  # it is remembered
    assert runs.run(SCENARIO).end.status == "completed"


@pytest.mark.by_hand
def test_a_process_elsewhere_is_replaced() -> None:
    """One that hangs is killed, and one that dies is noticed; the next run is right each time."""
    elsewhere, right = runner.Elsewhere(), systems.run(SCENARIO)
    for end, reason in ((signal.SIGSTOP, "made no progress for 1 s"), (signal.SIGKILL, "died")):
        assert elsewhere.run(SCENARIO, patience_s=60.0) == right
        process = elsewhere._process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, end)
        assert reason in elsewhere.run(SCENARIO, patience_s=1.0).end.reason
    assert elsewhere.run(SCENARIO, patience_s=60.0) == right
    elsewhere.end()
