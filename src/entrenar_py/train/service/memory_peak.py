"""The most memory that a process has used so far."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import NamedTuple

_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Memory(NamedTuple):
    """Peaks in bytes: of resident memory, and of what torch holds on GPUs (None without one)."""

    host_bytes: int
    device_bytes: int | None


def here() -> Memory:
    """Return the peaks of this process. Does not load torch, nor start a GPU."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return Memory(resident, None)
    devices = range(torch.cuda.device_count())
    return Memory(resident, sum(torch.cuda.max_memory_reserved(device) for device in devices))


def total(peaks: Iterable[Memory]) -> Memory:
    """Return the sum of the peaks of several processes, which need not be at one time."""
    held = list(peaks)
    devices = [peak.device_bytes for peak in held if peak.device_bytes is not None]
    return Memory(sum(peak.host_bytes for peak in held), sum(devices) if devices else None)
