"""Time without progress: what waits, what computes, what an overloaded machine holds up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from entrenar_py.shared import patience
from entrenar_py.shared.patience import LOOK_S, Patience

LIMIT_S = 4 * LOOK_S


def after(
    monkeypatch: pytest.MonkeyPatch,
    *,
    wall_s: float,
    cpu_s: float,
    signs: Iterator[int] | None = None,
) -> int | None:
    """Return the look at which patience runs out, if each comes `wall_s` after the last one.

    The processes compute `cpu_s` in that time. None if it does not run out within 100 looks.
    """
    clock = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["wall"])
    waiting = Patience(LIMIT_S, sign=lambda: signs and next(signs), cpu_s=lambda: clock["cpu"])
    for look in range(1, 101):
        clock["wall"] += wall_s
        clock["cpu"] += cpu_s
        if waiting.look():
            return look
    return None


def test_processes_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing computes, every second counts; a heartbeat now and then is no computing."""
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=0.0) == 4
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=LOOK_S / 1000) == 4


def test_processes_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless loop runs out of patience, with a tenth of a core ten times as late."""
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=LOOK_S) == 4
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=8 * LOOK_S) == 4
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=LOOK_S / 10) == 40


def test_a_watcher_that_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that comes late counts as one that comes in time."""
    assert after(monkeypatch, wall_s=1000 * LOOK_S, cpu_s=0.0) == 4


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes progress is never out of time."""
    assert after(monkeypatch, wall_s=LOOK_S, cpu_s=LOOK_S, signs=iter(range(200))) is None


def test_what_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is progress, and so is a module that was loaded."""
    before = patience.of_this_process()
    patience.mark()
    assert patience.of_this_process() != before
    before = patience.of_this_process()
    monkeypatch.setitem(sys.modules, "a_module_that_was_loaded", sys)
    assert patience.of_this_process() != before


def test_the_whole_family_computes() -> None:
    """A child's seconds count while it lives, its own child's too, and when both have ended."""
    code = "import sys\nfor _ in range(3_000_000): pass\nprint(flush=True)\nsys.stdin.read()"
    shell = f"{sys.executable} -c '{code}'; true"
    before = patience.family_cpu_s()
    with subprocess.Popen(
        ["/bin/sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = patience.family_cpu_s()
        child.communicate()
    own = sum(os.times()[:2])
    assert during - before > 0.03
    assert patience.family_cpu_s() - before > 0.03
    assert own <= patience.family_cpu_s()
