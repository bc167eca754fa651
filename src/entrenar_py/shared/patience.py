"""A measure of how long a run makes no progress, on a machine that may be overloaded.

Wall time says little about a run: on an overloaded machine, an import of seconds takes minutes. So
only time without progress counts, and only the part of it in which the run could work. While its
processes wait, all seconds count. While they compute, only their CPU seconds count, since an
overloaded machine may give them one second in ten. Between two checks, never more than their
distance counts, since a frozen watcher has seen nothing.

Progress is any call of `mark` (for a recorded event, or an action in virtual time), and any module
that is loaded.
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
LOOKS_MIN = 4  # checks before patience runs out, even if it is short
IDLE_SHARE = 0.01  # of a core; the heartbeats of a waiting process take less
_PROC = Path("/proc")

_marks: Any = SimpleNamespace(value=0)


def mark() -> None:
    """Record that a run in this process made progress."""
    _marks.value += 1


def share(counter: Any) -> None:
    """Count the progress of this process in `counter.value`, which other processes may read."""
    global _marks
    _marks = counter


def of_this_process() -> tuple[int, int]:
    """Return a value that changes whenever a run in this process makes progress."""
    return _marks.value, len(sys.modules)


def interval_s(seconds: float) -> float:
    """Return the seconds between two checks of a patience of this many `seconds`."""
    return min(LOOK_S, seconds / LOOKS_MIN)


class Patience:
    """Patience that ends after `seconds` with an unchanged `sign()`; see `look`.

    `look` must be called every `interval_s` seconds.
    """

    def __init__(
        self,
        seconds: float,
        *,
        sign: Callable[[], object] = lambda: None,
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        """`cpu_s` returns the CPU seconds of the run, by default those of `family_cpu_s`."""
        self.interval_s = interval_s(seconds)
        self._seconds, self._sign, self._cpu_s = seconds, sign, cpu_s or family_cpu_s
        self._stalled_s = 0.0
        self._seen = sign()
        self._now_s, self._computed_s = time.monotonic(), self._cpu_s()

    def look(self) -> bool:
        """Return whether patience has run out; call this every `interval_s` seconds."""
        now_s, computed_s, seen = time.monotonic(), self._cpu_s(), self._sign()
        busy_s = computed_s - self._computed_s
        is_idle = busy_s < IDLE_SHARE * (now_s - self._now_s)
        self._stalled_s += self.interval_s if is_idle else min(busy_s, self.interval_s)
        if seen != self._seen:
            self._stalled_s = 0.0
        self._now_s, self._computed_s, self._seen = now_s, computed_s, seen
        return self._stalled_s >= self._seconds


def family_cpu_s() -> float:
    """Return the CPU seconds of this process and all its descendants, including ended ones.

    Without /proc, return those of this process and of its children that have ended.
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
    """Yield each process's id, its parent's id, and its CPU seconds, ended children included."""
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
