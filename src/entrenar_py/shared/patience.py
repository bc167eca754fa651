"""Measures how long a run makes no progress, on a machine that may be overloaded.

A clock on the wall says little about a run: on an overloaded machine an import of seconds takes
minutes. So what is counted is time without progress, and of that only what the run had of the
machine. Where processes wait, all seconds count. Where they compute, only the seconds that they
really computed do: an overloaded machine may give them one in ten. And between two looks never more
than their distance counts, since a watcher that was frozen has seen nothing.

Progress is whatever calls `mark` (an event that is recorded, an action in virtual time), and a
module that is loaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LOOK_S = 5.0
LOOKS_MIN = 4  # before patience runs out, even if it is short
IDLE_SHARE = 0.01  # of a core; heartbeats of a process that waits take less
_PROC = Path("/proc")

_marks: Any = SimpleNamespace(value=0)


def mark() -> None:
    """Note that a run in this process made progress."""
    _marks.value += 1


def share(counter: Any) -> None:
    """From now on count the progress of this process in `counter.value`, which others may read."""
    global _marks
    _marks = counter


def of_this_process() -> tuple[int, int]:
    """Return what changes whenever a run in this process makes progress."""
    return _marks.value, len(sys.modules)


def interval_s(seconds: float) -> float:
    """Return the seconds between two looks of a patience of this many `seconds`."""
    return min(LOOK_S, seconds / LOOKS_MIN)


class Patience:
    """Runs out after `seconds` in which `sign()` stays the same. Call `look` every `interval_s`."""

    def __init__(
        self,
        seconds: float,
        *,
        sign: Callable[[], object] = lambda: None,
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        """By default the time that this process and its descendants computed is `cpu_s`."""
        self.interval_s = interval_s(seconds)
        self._seconds, self._sign, self._cpu_s = seconds, sign, cpu_s or family_cpu_s
        self._stalled_s = 0.0
        self._seen = sign()
        self._now_s, self._computed_s = time.monotonic(), self._cpu_s()

    def look(self) -> bool:
        """Return whether patience has run out."""
        now_s, computed_s, seen = time.monotonic(), self._cpu_s(), self._sign()
        busy_s = computed_s - self._computed_s
        is_idle = busy_s < IDLE_SHARE * (now_s - self._now_s)
        self._stalled_s += self.interval_s if is_idle else min(busy_s, self.interval_s)
        if seen != self._seen:
            self._stalled_s = 0.0
        self._now_s, self._computed_s, self._seen = now_s, computed_s, seen
        return self._stalled_s >= self._seconds


def family_cpu_s() -> float:
    """Return the seconds that this process and all its descendants computed, those ended included.

    Without /proc, the seconds of this process and of those children that have ended.
    """
    by_parent: dict[int, list[tuple[int, float]]] = {}
    for pid, parent, computed_s in _processes():
        by_parent.setdefault(parent, []).append((pid, computed_s))
    total, parents = sum(os.times()[:4]), [os.getpid()]
    while parents:
        for pid, computed_s in by_parent.get(parents.pop(), ()):
            total += computed_s
            parents.append(pid)
    return total


def _processes() -> Iterable[tuple[int, int, float]]:
    """Yield the id of each process, its parent's, and the seconds of it and its ended children."""
    if not _PROC.exists():
        return
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # it has ended meanwhile
            # After the name, which may have spaces: the state, the parent, and later utime, stime,
            # cutime, cstime.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield int(folder.name), int(fields[1]), sum(map(int, fields[11:15])) / ticks
