"""Files, processes, threads and memory that a process holds."""

from __future__ import annotations

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
        """Return whether there is no more of anything than in `other`."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


def holdings() -> Holdings:
    """Return what this process holds now, after a collection of garbage."""
    gc.collect()
    return Holdings(
        files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        processes=len(descendants(os.getpid())),
        threads=threading.active_count(),
        # Not isinstance: some objects would be asked, and answer with a warning.
        objects=sum(issubclass(type(one), Task | BaseTransport) for one in gc.get_objects()),
    )


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and theirs."""
    tasks = Path(f"/proc/{pid}/task")
    children = [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]
    return [one for child in children for one in (child, *descendants(child))]


def resident_bytes() -> int:
    """The memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
