"""A measure of how long a run makes no progress, on a machine that may be overloaded.

Wall time says little about a run: on an overloaded machine, an import of seconds takes minutes. So
only time without progress counts, and only the part of it in which the run could work. While the
run's processes wait, all seconds count. While they compute, only their CPU seconds count, since an
overloaded machine may give them one second in ten. At most `interval_s` counts between two checks,
since a watcher that was itself frozen has seen nothing.

Progress is a call of `mark` (for a recorded event, or an action in virtual time), or a newly loaded
module.
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
IDLE_SHARE = 0.01  # share of a core; a waiting process uses less, for its heartbeats
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
    """Return the seconds between two checks of a run that may stall for `seconds`."""
    return min(LOOK_S, seconds / LOOKS_MIN)


class Patience:
    """A timer that runs out when a run has made no progress for `seconds`.

    Progress is a change of `sign()`. The caller must call `look` every `interval_s` seconds.
    """

    def __init__(
        self,
        seconds: float,
        *,
        sign: Callable[[], object] = lambda: None,
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        """`cpu_s` returns the CPU seconds used by the run; None stands for `family_cpu_s`."""
        self.interval_s = interval_s(seconds)
        self._seconds, self._sign, self._cpu_s = seconds, sign, cpu_s or family_cpu_s
        self._stalled_s = 0.0
        self._seen = sign()
        self._now_s, self._computed_s = time.monotonic(), self._cpu_s()

    def look(self) -> bool:
        """Return whether `seconds` without progress are over. Call it every `interval_s`."""
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

    Without /proc, descendants count only if they are children that have ended.
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
    """Yield the id, the parent's id and the CPU seconds (with ended children) of each process."""
    if not _PROC.exists():
        return
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # the process has ended meanwhile
            # The fields after the name, which may contain spaces: the state, the parent, and later
            # utime, stime, cutime, cstime.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield int(folder.name), int(fields[1]), sum(map(int, fields[11:15])) / ticks
