"""Files, processes, threads and memory that a process holds."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from asyncio import BaseTransport, Task
from dataclasses import astuple, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holdings:
    """Counts at one moment; `objects` are asyncio's tasks and transports."""

    files: int
    processes: int
    threads: int
    objects: int

    def within(self, other: Holdings) -> bool:
        """Return whether no count is higher than in `other`."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


def holdings() -> Holdings:
    """Return the present counts of this process, after a garbage collection."""
    gc.collect()
    return Holdings(
        files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        processes=len(descendants(os.getpid())),
        threads=threading.active_count(),
        # Not isinstance: it reads __class__, at which some objects warn.
        objects=sum(issubclass(type(one), Task | BaseTransport) for one in gc.get_objects()),
    )


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, directly or indirectly; none if it has ended."""
    children = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return [one for child in children for one in (child, *descendants(child))]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
