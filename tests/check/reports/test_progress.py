"""The line of progress: on a terminal, in a pipe, and with --quiet."""

from __future__ import annotations

import io
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from rich.console import Console

from entrenar_py.check.reports import progress
from tests.check.reports.conftest import full_report


def output(*, tty: bool, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=tty, color_system=None)
    held, open_one = full_report().entries[:2]
    with progress.Progress(console, **options) as shown:
        shown.show("F-DP-001", 0, 0, "planning")
        for known in full_report().entries[3], open_one, replace(open_one, finding=held.finding):
            shown.know(known)
        shown.show("F-DP-001", 3, 12, "[bold]linear\x1b")
    return file.getvalue()


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows what broke, invariant, count and work as plain text; a pipe nothing."""
    monkeypatch.setenv("TERM", "xterm")  # rich animates nothing on a dumb terminal
    shown = output(tty=True)
    assert "F-DP-001" in shown
    assert "F-DP-005 FALSIFIED, F-DP-001" in shown, "F-DP-002 holds by now"
    assert "3/12" in shown
    assert r"[bold]linear\x1b" in shown
    assert output(tty=False) == ""
    assert output(tty=True, is_quiet=True) == ""


def test_a_pipe_gets_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log shows which run is going on. With --quiet it shows nothing."""
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    lines: list[str] = []
    written = Event()

    def write(line: str) -> None:
        lines.append(line)
        written.set()

    console = Console(file=io.StringIO(), force_terminal=False)
    with progress.Progress(console, write=write) as shown:
        shown.show("run", 1, 4, "the same run again")
        assert written.wait(60)
    assert {*lines} == {"run 2 of 4: the same run again"}
    lines.clear()
    with progress.Progress(console, write=write, is_quiet=True) as shown:
        shown.show("run", 1, 4, "the same run again")
    assert not lines


def test_the_time_left_follows_from_the_runs_so_far() -> None:
    """The first run tells nothing; later ones take as long as those before, on average."""
    times = iter([100.0, 108.0, 112.0])
    pace = progress.Pace(lambda: next(times))
    pace.foreseen = 4
    assert pace.begins(1) == (0, 4, ""), "the first run shows which runs follow"
    assert pace.begins(2) == (1, 4, "about 24 s left")
    assert pace.begins(1) == (2, 4, "about 12 s left")
